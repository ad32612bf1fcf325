"""What a run of training has seen on its way, and what plain PyTorch sees on the same way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from phalanx.data.batch import Batch
from phalanx.data.loader import evaluation_rows
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.train.job.resolve import Job
from phalanx.train.objective import NextToken
from phalanx.verify.cases import as_plain
from phalanx.verify.plain import PlainNextToken
from phalanx.verify.record import Case
from phalanx.verify.reference import ReferenceRun, StepRecord
from phalanx.verify.runs import STEPS


@dataclass
class Road:
    """What a rank, or the reference, has seen on its way; keys are numbers of steps done.

    Attributes:
        begin: the trained state that it begins with; full tensors are rank 0's alone.
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
    first = jobs[0]
    shape, seed = first.shape, first.config.seed
    return Case(
        functools.partial(_decoder, shape, seed),
        NextToken(seed, shape.dropout),
        list(_batches(jobs)),
        optimizer=first.config.optimizer,
        reference=(
            functools.partial(_plain_decoder, shape, seed),
            PlainNextToken(seed, shape.dropout),
        ),
    )


def reference_road(jobs: Sequence[Job]) -> Road:
    """Go the road of the last job in plain PyTorch."""
    case, start = reference_case(jobs), STEPS * (len(jobs) - 1)
    run = ReferenceRun(case, torch.device("cpu"))
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    state = StepRecord(0.0, {}, {}, {}, {}, weights)
    steps, road, position = run.steps(), Road(state), 0
    for done in range(2 * STEPS + 1):
        if done == start:
            road = Road(state)
        if done % STEPS == 0:
            road.consumed[done] = position
            if (loss := _validation_loss(run.model, jobs[-1])) is not None:
                road.evaluations[done] = loss
        if done < 2 * STEPS:
            state = next(steps)
            clip_p = case.optimizer.clip_p
            road.records[done] = dataclasses.replace(state, norms={clip_p: state.norms[clip_p]})
            rows = case.batches[done].rows_B.tolist()
            road.rows[done] = [rows]
            position += len(rows)
    return road


def _decoder(shape: ModelShape, seed: int) -> Decoder:
    decoder = Decoder(shape).double()
    decoder.initialize(seed)
    return decoder


def _plain_decoder(shape: ModelShape, seed: int) -> nn.Module:
    return as_plain(_decoder(shape, seed))


def _batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Yield the global batch of each step, by the law of the stream: one position after another."""
    position = 0
    for step in range(2 * STEPS):
        job = jobs[min(step // STEPS, len(jobs) - 1)]
        corpus, size = job.config.corpus, job.batch.global_size
        samples = Samples(job.tokens.train, corpus.seq_len, document_mask=corpus.document_mask)
        order = Order(len(samples), job.config.seed, corpus.shuffle)
        rows = np.arange(position, position + size, dtype=np.int64)
        yield samples.batch(order.samples(rows), rows)
        position += size


@torch.no_grad()
def _validation_loss(model: nn.Module, job: Job) -> float | None:
    corpus = job.config.corpus
    samples = Samples(job.tokens.validation, corpus.seq_len, document_mask=corpus.document_mask)
    rows = evaluation_rows(len(samples), job.config.eval_samples)
    if not len(rows):
        return None
    batch = samples.batch(rows, rows)
    objective = PlainNextToken(job.config.seed, 0.0)
    model.eval()
    loss = float(objective.loss_sum(model, batch, 0)) / objective.num_valid(batch)
    model.train()
    return loss
