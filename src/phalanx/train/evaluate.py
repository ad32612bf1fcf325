"""The mean loss of the validation data, and what is measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.train.notice import said_if_long
from phalanx.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """A measurement on data that is not trained on.

    Attributes:
        step: steps taken before it.
        loss: mean over the tokens (or samples) of the data, for text in nats a token.
        metrics: what is measured beside it, by name. Of text: `bits_per_byte`, loss in bits / bytes
            of the predicted text, which compares across tokenizers.
    """

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def evaluate(session: Session) -> Evaluation | None:
    """Measure the validation loss, if there is such data; every rank calls this together.

    Ranks may have fewer samples than others, or none: sums are added over the ranks, never means.
    """
    batches = session.validation_batches()
    if batches is None:
        return None
    step, comm = session.step, session.comm
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)

    def forward(batch: Any) -> torch.Tensor:
        return step.objective.loss_sum(step.model, batch, 0)

    modes = {module: module.training for module in step.model.modules()}
    step.model.eval()
    with said_if_long("evaluating"):
        for batch in batches:
            loss_sum = step.run.infer(batch, forward)
            totals[0] += 0 if loss_sum is None else loss_sum  # the last stage of a pipeline has it
            totals[1] += step.objective.num_valid(batch)
    for module, is_training in modes.items():  # some may be frozen in eval()
        module.training = is_training
    comm.all_reduce(totals[:1], "loss")
    comm.all_reduce(totals[1:], "data")
    loss_sum, num_valid = totals.tolist()
    return Evaluation(step.steps_done, loss_sum / max(num_valid, 1), session.scores(loss_sum))
