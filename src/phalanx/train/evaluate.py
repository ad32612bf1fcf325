"""Evaluate on the validation data: mean loss and metrics, the best so far, and early stopping."""

from __future__ import annotations

import dataclasses
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


LOSS = "min:loss"
"""Measure by which evaluations are compared if `save` has no best."""


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
    An objective's metrics are sums over the batches too; see `Objective`.
    """
    batches = session.validation_batches()
    if batches is None:
        return None
    step, comm, objective = session.step, session.comm, session.step.objective
    metric_sums = getattr(objective, "metric_sums", None)
    zeros = torch.zeros(2, dtype=torch.float64, device=comm.device)  # a sum and its count
    totals, metrics = zeros.clone(), dict[str, torch.Tensor]()

    def forward(batch: Any) -> torch.Tensor:
        return objective.loss_sum(step.model, batch, 0)

    def measure(batch: Any) -> torch.Tensor:
        assert metric_sums is not None
        sums = metric_sums(step.model, batch)
        if isinstance(sums, torch.Tensor):
            return sums
        for name, found in sums.items():
            pair = found if isinstance(found, tuple) else (found, objective.num_valid(batch))
            pair = [torch.as_tensor(each).detach().to(zeros) for each in pair]
            if name == "loss" or any(each.ndim for each in pair):
                sizes = [list(each.shape) for each in pair]
                raise ConfigError(
                    f"metric_sums: {name} has a sum and a count of the shapes {sizes}; expected "
                    "two numbers of each metric, and no metric named loss"
                )
            metrics[name] = metrics.get(name, zeros) + torch.stack(pair)
        return zeros[0]

    modes = {module: module.training for module in step.model.modules()}
    step.model.eval()
    with notice_if_slow("evaluating"):
        for batch in batches:
            # Of pipeline stages, only the last runs either forward to its end.
            loss_sum = step.run.infer(batch, forward)
            totals[0] += 0 if loss_sum is None else loss_sum
            totals[1] += objective.num_valid(batch)
            if metric_sums is not None:
                step.run.infer(batch, measure)
    for module, is_training in modes.items():  # a user may keep some in eval mode
        module.training = is_training
    comm.all_reduce(totals[:1], "loss")
    comm.all_reduce(totals[1:], "data")
    loss_sum, num_valid = totals.tolist()
    scores = {**session.scores(loss_sum)}
    if metric_sums is not None:
        names = list(dict.fromkeys(itertools.chain(*gather_objects(list(metrics)))))
        every = torch.stack([zeros, *(metrics.get(name, zeros) for name in names)])
        rows = comm.all_reduce(every, "loss").tolist()[1:]
        means = {n: s / num if num else math.nan for n, (s, num) in zip(names, rows, strict=True)}
        scores |= means
    return Evaluation(step.steps_done, loss_sum / max(num_valid, 1), scores)


@dataclass
class BestTracker:
    """Tracks the best evaluation; the state is equal on all ranks.

    Attributes:
        measure: "min:loss", or "min:" or "max:" and the name of a metric.
        patience: evaluations without improvement after which the run ends; None: no early stop.
        value: measure of the best evaluation; None before the first.
        step: steps taken before the best evaluation.
        num_worse: evaluations since the best one.
        judged: steps taken before the latest evaluation that was compared; a resumed run repeats
            that evaluation, which is then ignored.
    """

    measure: str
    patience: int | None = None
    value: float | None = None
    step: int = 0
    num_worse: int = 0
    judged: int = -1

    def take(self, evaluation: Evaluation) -> bool:
        """Compare an evaluation with the best; return whether it is the best so far.

        An evaluation whose measure is NaN is never the best.

        Raises:
            ConfigError: the evaluation does not have the measure.
        """
        if evaluation.step <= self.judged:
            return False
        self.judged = evaluation.step
        direction, _, name = self.measure.partition(":")
        measures = {"loss": evaluation.loss, **evaluation.metrics}
        if name not in measures:
            raise ConfigError(
                f"save: best is {self.measure}, but an evaluation measures {', '.join(measures)}; "
                f"expected one of these names after {direction}:"
            )
        value, sign = measures[name], -1 if direction == "max" else 1
        is_better = self.value is None or sign * value < sign * self.value
        if math.isnan(value) or not is_better:
            self.num_worse += 1
            return False
        self.value, self.step, self.num_worse = value, evaluation.step, 0
        return True

    @property
    def is_over(self) -> bool:
        """Whether `patience` evaluations without improvement have passed, which ends the run."""
        return self.patience is not None and self.num_worse >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a manifest."""
        state = dataclasses.asdict(self)
        del state["patience"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, unless it is of another measure."""
        if state["measure"] == self.measure:
            for name, value in state.items():
                setattr(self, name, value)

    def text(self) -> str:
        """Describe the best evaluation, and whether the run ended early."""
        if self.value is None:
            return f"{self.measure}: no evaluation gave a number"
        end = f"; the run ended because {self.num_worse} evaluations since then were no better"
        found = f"{self.measure} {self.value:.4f} after step {self.step}"
        return found + (end if self.is_over else "")
