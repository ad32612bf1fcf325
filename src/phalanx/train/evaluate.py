"""Compute the mean loss and further metrics on the validation data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.together import gather_objects
from phalanx.errors import ConfigError
from phalanx.train.notice import notice_if_slow

if TYPE_CHECKING:
    from phalanx.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on validation data.

    Attributes:
        step: steps taken before the evaluation.
        loss: mean over the tokens (or samples) of the data; for text in nats a token.
        metrics: further measures, by name. For text: `bits_per_byte`, loss in bits / bytes of the
            predicted text, which is comparable across tokenizers.
    """

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def evaluate(session: Session) -> Evaluation | None:
    """Return the evaluation on validation data, or None without; every rank calls this together.

    Sums are all-reduced, never means, because ranks may have different numbers of samples, or none.
    """
    batches = session.validation_batches()
    if batches is None:
        return None
    step, comm = session.step, session.comm
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)

    def forward(batch: Any) -> torch.Tensor:
        return step.objective.loss_sum(step.model, batch, 0)

    metrics = _Metrics(session)
    modes = {module: module.training for module in step.model.modules()}
    step.model.eval()
    with notice_if_slow("evaluating"):
        for batch in batches:
            loss_sum = step.run.infer(batch, forward)
            totals[0] += 0 if loss_sum is None else loss_sum  # only on the last pipeline stage
            totals[1] += step.objective.num_valid(batch)
            metrics.take(batch)
    for module, is_training in modes.items():  # a user may keep some in eval mode
        module.training = is_training
    comm.all_reduce(totals[:1], "loss")
    comm.all_reduce(totals[1:], "data")
    loss_sum, num_valid = totals.tolist()
    scores = {**session.scores(loss_sum), **metrics.values()}
    return Evaluation(step.steps_done, loss_sum / max(num_valid, 1), scores)


class _Metrics:
    """Sums an objective's metrics over batches and ranks; see `Objective`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sums_of = getattr(session.step.objective, "metric_sums", None)
        self._totals: dict[str, torch.Tensor] = {}

    def take(self, batch: Any) -> None:
        """Add the metrics of a batch; every rank calls this together."""
        if self._sums_of is not None:
            self._session.step.run.infer(batch, self._forward)

    def _forward(self, batch: Any) -> torch.Tensor:
        """Add the metric sums of a batch; of pipeline stages, only the last runs it to its end."""
        session = self._session
        objective, device = session.step.objective, session.comm.device
        assert self._sums_of is not None
        for name, found in self._sums_of(session.step.model, batch).items():
            pair = found if isinstance(found, tuple) else (found, objective.num_valid(batch))
            pair = [torch.as_tensor(each).detach().to(device, torch.float64) for each in pair]
            if name == "loss" or any(each.ndim for each in pair):
                sizes = [list(each.shape) for each in pair]
                raise ConfigError(
                    f"metric_sums: {name} has a sum and a count of the shapes {sizes}; expected "
                    "two numbers of each metric, and no metric named loss"
                )
            zeros = torch.zeros(2, dtype=torch.float64, device=device)
            self._totals[name] = self._totals.get(name, zeros) + torch.stack(pair)
        return torch.zeros((), device=device)

    def values(self) -> dict[str, float]:
        """Return the mean of each metric over all ranks; every rank calls this together."""
        if self._sums_of is None:
            return {}
        comm = self._session.comm
        names = list(dict.fromkeys(itertools.chain(*gather_objects(list(self._totals)))))
        zeros = torch.zeros(2, dtype=torch.float64, device=comm.device)
        totals = torch.stack([zeros, *(self._totals.get(name, zeros) for name in names)])
        rows = comm.all_reduce(totals, "loss").tolist()[1:]
        return {
            n: s / count if count else math.nan for n, (s, count) in zip(names, rows, strict=True)
        }
