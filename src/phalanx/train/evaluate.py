"""Validation loss in nats a token and in bits a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phalanx.data.batch import Batch
from phalanx.data.loader import evaluation_batches, evaluation_rows
from phalanx.train.notice import said_if_long
from phalanx.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """A measurement on text that is not trained on.

    Attributes:
        loss: nats a token.
        bits_per_byte: loss in bits / bytes of the predicted text; it compares across tokenizers.
    """

    loss: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(session: Session) -> Evaluation | None:
    """Measure the validation loss, if text was kept aside; every rank calls this together.

    Ranks may have fewer samples than others, or none: sums are added over the ranks, never means.
    """
    job = session.job
    rows = evaluation_rows(len(session.validation), job.config.eval_samples)
    if len(rows) == 0:
        return None
    rank, num_ranks = session.comm.coord("data"), session.comm.size("data")
    nats, num_tokens = torch.zeros(2, dtype=torch.float64, device=session.comm.device)
    batches = evaluation_batches(
        session.validation, rows, microbatch=job.batch.microbatch, rank=rank, num_ranks=num_ranks
    )

    def forward(batch: Batch) -> torch.Tensor:
        return session.step.objective.loss_sum(session.model, batch, 0)

    session.model.eval()
    with said_if_long(f"evaluating on {len(rows):,} samples"):
        for batch in batches:
            loss_sum = session.step.run.infer(batch.to(session.comm.device), forward)
            nats += 0 if loss_sum is None else loss_sum  # the last stage of a pipeline has it
            num_tokens += batch.count_valid()
    session.model.train()
    total = session.comm.all_reduce(nats, "loss").item()
    num_valid = session.comm.all_reduce(num_tokens, "data").item()
    num_bytes = session.validation.count_bytes(rows, job.tokens.token_bytes())
    return Evaluation(
        loss=total / num_valid,
        bits_per_byte=total / math.log(2) / num_bytes,
    )
