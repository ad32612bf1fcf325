"""What a training run has done, on a rank, and what plain PyTorch does in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from phalanx.data.batch import Batch
from phalanx.data.loader import evaluation_rows
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.train.job.resolve import Job
from phalanx.verify.cases import decoder_case, initial_decoder
from phalanx.verify.plain import PlainNextToken, plain_batch
from phalanx.verify.record import Case
from phalanx.verify.reference import MOMENTS, ReferenceRun, StepRecord
from phalanx.verify.runs import STEPS


@dataclass
class History:
    """What a run has done; keys are numbers of steps done.

    Attributes:
        begin: weights and moments that it begins with; full tensors are rank 0's alone.
        records: of each step, the norm being that which clips.
        rows: positions in the data of the rows of each microbatch of each step.
        consumed: position in the data at each evaluation.
        evaluations: validation losses.
        is_training: whether the model was in training mode after all evaluations.
        is_kept: whether all evaluations left the weights as they were.
        dtypes: what is kept, and in which data types.
    """

    begin: StepRecord
    records: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    rows: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])
    consumed: dict[int, int] = field(default_factory=dict[int, int])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    is_training: bool = True
    is_kept: bool = True
    dtypes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def reference_case(jobs: Sequence[Job]) -> Case:
    """Return the steps of the last job, and before them those of the job that it goes on from."""
    shape, config = jobs[0].shape, jobs[0].config
    batches = list(_batches(jobs))
    return decoder_case(shape, batches, config.seed, config.optimizer, initial_decoder)


def reference_history(jobs: Sequence[Job]) -> History:
    """Do in plain PyTorch what the last job does."""
    case, start = reference_case(jobs), STEPS * (len(jobs) - 1)
    run = ReferenceRun(case, torch.device("cpu"))
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    state: StepRecord = {"weight": weights, **{moment: {} for moment in MOMENTS}}
    steps, history, position = run.steps(), History(state), 0
    for done in range(2 * STEPS + 1):
        if done == start:
            history = History({what: state[what] for what in ("weight", *MOMENTS)})
        if done % STEPS == 0:
            history.consumed[done] = position
            if (loss := _validation_loss(run.model, jobs[-1])) is not None:
                history.evaluations[done] = loss
        if done < 2 * STEPS:
            state = next(steps)
            clip_p = f"{case.optimizer.clip_p:g}"
            history.records[done] = {**state, "norm": {clip_p: state["norm"][clip_p]}}
            rows = case.batches[done].rows_B.tolist()
            history.rows[done] = [rows]
            position += len(rows)
    return history


def _batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Yield the global batch of each step, by the law of the stream: one position after another."""
    position = 0
    for step in range(2 * STEPS):
        job = jobs[min(step // STEPS, len(jobs) - 1)]
        corpus, size = job.config.corpus, job.batch.global_size
        count = len(Samples(job.tokens.train, corpus.seq_len))
        order = Order(count, job.config.seed, corpus.shuffle)
        rows = np.arange(position, position + size, dtype=np.int64)
        yield plain_batch(job.tokens.train, order.samples(rows), rows, corpus)
        position += size


@torch.no_grad()
def _validation_loss(model: nn.Module, job: Job) -> float | None:
    corpus = job.config.corpus
    count = len(Samples(job.tokens.validation, corpus.seq_len))
    rows = evaluation_rows(count, job.config.eval_samples)
    if not len(rows):
        return None
    batch = plain_batch(job.tokens.validation, rows, rows, corpus)
    objective = PlainNextToken(job.config.seed, 0.0)
    model.eval()
    loss = float(objective.loss_sum(model, batch, 0)) / objective.num_valid(batch)
    model.train()
    return loss
