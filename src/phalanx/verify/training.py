"""Verify the road that training takes: first weights, data, evaluation, saving and going on.

A small run takes its first steps under one strategy and saves; a second goes on from there under
another strategy and with another global batch. Plain PyTorch on one process takes the same steps
without a break. A third run is in bfloat16, for the data types that it keeps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.primitives import local_part
from phalanx.config import BatchConfig, CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.data.batch import Batch
from phalanx.data.loader import evaluation_rows
from phalanx.data.order import Order
from phalanx.data.samples import Samples
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Axis, Strategy
from phalanx.train.evaluate import evaluate
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.session import Session, open_session
from phalanx.verify.cases import awkward_shapes
from phalanx.verify.compare import Difference, compare_named, compare_scalar
from phalanx.verify.plain import PlainDecoder, PlainNextToken
from phalanx.verify.record import Case
from phalanx.verify.reference import ReferenceRun, StepRecord
from phalanx.verify.verdict import Place, Verdict

STEPS = 2
"""Optimizer steps of each part."""

NARROW_ERROR = 5e-3
"""Largest relative error of the loss of the run in bfloat16, beside float64."""


@dataclass(frozen=True)
class State:
    """The trained state, in full tensors; empty but on rank 0."""

    weights: Mapping[str, Tensor]
    first_moments: Mapping[str, Tensor]
    second_moments: Mapping[str, Tensor]


@dataclass
class Part:
    """What one rank says of one part of the run.

    Attributes:
        begin: the state before the first step.
        end: the state after the last step.
        consumed: position in the data before the first step and after the last.
        steps_done: the same of the steps.
        rows: positions in the data of the rows of each step.
        losses: of each step.
        norms: of each step.
        evaluations: the validation loss before the first step and after the last.
        is_training: whether the model was in training mode after each evaluation.
        is_kept: whether each evaluation left the weights as they were.
        dtypes: what is kept, and in which data types.
    """

    begin: State
    end: State | None = None
    consumed: list[int] = field(default_factory=list[int])
    steps_done: list[int] = field(default_factory=list[int])
    rows: list[list[int]] = field(default_factory=list[list[int]])
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    evaluations: list[float] = field(default_factory=list[float])
    is_training: list[bool] = field(default_factory=list[bool])
    is_kept: list[bool] = field(default_factory=list[bool])
    dtypes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def run_config(strategy: Strategy, folder: Path) -> TrainConfig:
    """Write a text into `folder`, and return the settings of a run on it."""
    text = "".join(f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(300))
    (folder / "squares.txt").write_text(text)
    shape = awkward_shapes(strategy)["llama"]
    names = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "dropout")
    row_shards = plan_decoder(strategy, shape).row_shards
    sizes = ShapeConfig(
        **{name: getattr(shape, name) for name in names}, vocab_size=307, max_seq_len=32, tied=True
    )
    return TrainConfig(
        data=str(folder / "squares.txt"),
        strategy=str(strategy),
        steps=2 * STEPS,
        precision="float64",
        device="cpu",
        eval_samples=5,
        out=str(folder / "first"),
        shape=sizes,
        corpus=CorpusConfig(
            seq_len=17, vocab_size=300, validation=0.1, cache=str(folder / "cache")
        ),
        batch=BatchConfig(microbatch=max(2, row_shards), accumulation=2),
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.2, warmup_steps=1),
    )


def continued(config: TrainConfig, strategy: Strategy, folder: Path) -> TrainConfig:
    """Return the settings of the run that goes on: another strategy, another global batch."""
    degree = strategy.num_ranks
    other = Strategy(fsdp=Axis(degree, "zero3"))
    if strategy.fsdp.degree > 1:
        other = Strategy(dp=Axis(degree, "bucketed"))
    return dataclasses.replace(
        config,
        resume=str(folder / "first"),
        out=str(folder / "second"),
        strategy=str(other),
        batch=BatchConfig(microbatch=2, accumulation=3),
    )


def verify_training(strategy: Strategy, folder: Path) -> list[Verdict]:
    """Run the parts, each on new processes, and compare.

    Args:
        strategy: of the first part.
        folder: an empty one.
    """
    config = run_config(strategy, folder)
    jobs: list[Job] = []
    parts: list[list[Part]] = []
    for each in (config, continued(config, strategy, folder)):
        jobs.append(resolve(each))
        parts.append(run_ranks(train_part, strategy.num_ranks, jobs[-1]))
    narrow = resolve(narrowed(config, folder))
    of_narrow = run_ranks(train_part, strategy.num_ranks, narrow)
    return [compare_parts(jobs, parts), compare_narrow(narrow, of_narrow)]


def narrowed(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the settings of the run in bfloat16."""
    return dataclasses.replace(config, precision="bfloat16", out=str(folder / "narrow"))


def train_part(job: Job) -> Part:
    """Take the steps of one part on this rank, as `train.loop` does, and save."""
    session = open_session(job)
    with session.loader, session.saver:
        part = Part(_state_of(session))
        _note_position(part, session)
        _evaluate(part, session)
        hook = session.model.blocks[0].register_forward_hook(functools.partial(_note_output, part))
        for _ in range(STEPS):
            batches = next(session.loader)
            part.rows.append([int(row) for batch in batches for row in batch.rows_B])
            result = session.step([batch.to(session.device) for batch in batches])
            part.losses.append(result.loss)
            part.norms.append(result.grad_norm)
        hook.remove()
        _note_dtypes(part, session)
        _evaluate(part, session)
        _note_position(part, session)
        session.begin_save()
        session.saver.finish()
        part.end = _state_of(session)
    return part


def _note_output(part: Part, module: nn.Module, args: object, output: Tensor) -> None:
    del module, args
    part.dtypes.setdefault("output of a block", set()).add(str(output.dtype))


def _note_position(part: Part, session: Session) -> None:
    part.consumed.append(session.loader.consumed)
    part.steps_done.append(session.step.steps_done)


def _note_dtypes(part: Part, session: Session) -> None:
    parameters = list(session.model.parameters())
    part.dtypes["weights"] = {str(p.dtype) for p in parameters}
    part.dtypes["gradients"] = {str(p.grad.dtype) for p in parameters if p.grad is not None}
    states = session.step.optimizer.state.values()
    part.dtypes["moments"] = {
        str(s[key].dtype) for s in states for key in ("exp_avg", "exp_avg_sq")
    }


def _evaluate(part: Part, session: Session) -> None:
    before = [local_part(p).detach().clone() for p in session.model.parameters()]
    evaluation = evaluate(session)
    after = [local_part(p).detach() for p in session.model.parameters()]
    assert evaluation is not None  # the text is long enough for some validation
    part.evaluations.append(evaluation.loss)
    part.is_training.append(session.model.training)
    part.is_kept.append(all(map(torch.equal, before, after)))


def _state_of(session: Session) -> State:
    """Gather the state; every rank calls this together."""
    named = session.model.state_dict(keep_vars=True)  # FSDP2 puts back its shards
    optimizer = session.step.optimizer
    tables: list[dict[str, Tensor]] = [{}, {}, {}]
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        tensors = (parameter, state.get("exp_avg"), state.get("exp_avg_sq"))
        for table, tensor in zip(tables, tensors, strict=True):
            if tensor is not None:
                tensor = tensor.detach()
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                table[name] = full.cpu().clone()
    return State(*tables) if dist.get_rank() == 0 else State({}, {}, {})


def compare_parts(jobs: Sequence[Job], parts: Sequence[Sequence[Part]]) -> Verdict:
    """Compare the parts with plain PyTorch, which takes all steps without a break.

    Args:
        jobs: of each part.
        parts: of each part and rank.
    """
    name = ", then ".join(f"{job.strategy}" for job in jobs)
    differences: list[Difference] = []
    problems: list[tuple[str | None, str]] = []
    position, done = 0, 0
    expected = _expected(jobs)
    for job, ranks in zip(jobs, parts, strict=True):
        problems += _check_facts(job, ranks, position, done)
        position += STEPS * job.batch.global_size
        first, begin = ranks[0], next(expected)
        differences += _compare_state(done, first.begin, begin.state)
        differences.append(_loss(done, "validation loss", first.evaluations[0], begin.evaluation))
        for step, (loss, norm) in enumerate(zip(first.losses, first.norms, strict=True), done):
            found = next(expected)
            differences.append(_loss(step, "loss", loss, found.loss))
            differences.append(_loss(step, "norm", norm, found.norm, name="2"))
        done += STEPS
        end = next(expected)
        assert first.end is not None
        differences += _compare_state(done, first.end, end.state)
        differences.append(_loss(done, "validation loss", first.evaluations[1], end.evaluation))
    return _verdict(f"training {name}", differences, problems)


@dataclass(frozen=True)
class Expected:
    """What the reference has: after a step its loss and norm, between steps its state."""

    loss: float = 0.0
    norm: float = 0.0
    evaluation: float = 0.0
    state: State = dataclasses.field(default_factory=lambda: State({}, {}, {}))


def _expected(jobs: Sequence[Job]) -> Iterator[Expected]:
    """Yield of each part what stands before it, each of its steps, and what stands after it."""
    first = jobs[0]
    case = Case(
        functools.partial(_plain_first, first.shape, first.config.seed),
        PlainNextToken(first.config.seed, first.shape.dropout),
        list(_batches(jobs)),
        optimizer=first.config.optimizer,
    )
    run = ReferenceRun(case, torch.device("cpu"))
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    state = State(weights, {}, {})
    steps = run.steps()
    for job in jobs:
        yield Expected(evaluation=_validation_loss(run.model, job), state=state)
        for _ in range(STEPS):
            record: StepRecord = next(steps)
            yield Expected(record.loss, record.norms[first.config.optimizer.clip_p])
            state = State(record.weights, record.first_moments, record.second_moments)
        yield Expected(evaluation=_validation_loss(run.model, job), state=state)


def _plain_first(shape: ModelShape, seed: int) -> nn.Module:
    decoder = Decoder(shape).double()
    decoder.initialize(seed)
    model = PlainDecoder(shape).double()
    model.load_state_dict(decoder.state_dict())
    return model


def _batches(jobs: Sequence[Job]) -> Iterator[Batch]:
    """Yield the global batch of each step, by the law of the stream: one position after another."""
    position = 0
    for job in jobs:
        corpus, size = job.config.corpus, job.batch.global_size
        samples = Samples(job.tokens.train, corpus.seq_len, document_mask=corpus.document_mask)
        order = Order(len(samples), job.config.seed, corpus.shuffle)
        for _ in range(STEPS):
            rows = np.arange(position, position + size, dtype=np.int64)
            yield samples.batch(order.samples(rows), rows)
            position += size


@torch.no_grad()
def _validation_loss(model: nn.Module, job: Job) -> float:
    corpus = job.config.corpus
    samples = Samples(job.tokens.validation, corpus.seq_len, document_mask=corpus.document_mask)
    rows = evaluation_rows(len(samples), job.config.eval_samples)
    batch = samples.batch(rows, rows)
    objective = PlainNextToken(job.config.seed, 0.0)
    model.eval()
    loss = float(objective.loss_sum(model, batch, 0)) / objective.num_valid(batch)
    model.train()
    return loss


def _check_facts(
    job: Job, ranks: Sequence[Part], position: int, done: int
) -> Iterator[tuple[str | None, str]]:
    """Yield (module, what is wrong) of what needs no arithmetic to be judged."""
    size = job.batch.global_size
    for rank, part in enumerate(ranks):
        where = f"{job.strategy}, rank {rank}"
        if part.consumed != [position, position + STEPS * size]:
            yield (
                None,
                (
                    f"{where}: the position in the data is {part.consumed[0]} before and "
                    f"{part.consumed[1]} after its steps; it should be {position} and "
                    f"{position + STEPS * size}"
                ),
            )
        if part.steps_done != [done, done + STEPS]:
            yield None, f"{where}: the number of steps done is {part.steps_done[0]}, not {done}"
        if not all(part.is_training):
            yield "", f"{where}: evaluation leaves the model in eval mode, without dropout"
        if not all(part.is_kept):
            yield "", f"{where}: evaluation changes the weights"
        if part.losses != ranks[0].losses or part.norms != ranks[0].norms:
            yield None, f"{where}: its losses or norms are not those of rank 0"
    for step in range(STEPS):
        taken = {row for part in ranks for row in part.rows[step]}
        due = set(range(position + step * size, position + (step + 1) * size))
        if taken != due:
            yield (
                None,
                (
                    f"{job.strategy}, step {done + step}: its {len(taken)} rows are {min(taken)} "
                    f"to {max(taken)}, where {min(due)} to {max(due)} are due"
                ),
            )


def _compare_state(step: int, ours: State, reference: State) -> list[Difference]:
    rows: list[Difference] = []
    for quantity in ("weight", "first moment", "second moment"):
        attribute = f"{quantity.replace(' ', '_')}s"
        rows += compare_named(
            step, quantity, getattr(ours, attribute), getattr(reference, attribute)
        )
    return rows


def _loss(step: int, quantity: str, ours: float, reference: float, name: str = "") -> Difference:
    return compare_scalar(step, quantity, name, ours, reference)


def compare_narrow(job: Job, ranks: Sequence[Part]) -> Verdict:
    """Check the data types of a run in bfloat16, and that its losses are near those of float64."""
    problems: list[tuple[str | None, str]] = []
    for what, found in ranks[0].dtypes.items():
        expected = "torch.bfloat16" if what == "output of a block" else "torch.float32"
        if found != {expected}:
            module = "blocks.0" if what == "output of a block" else ""
            kinds = ", ".join(sorted(found))
            problems.append((module, f"the {what} are in {kinds}; {expected} is due"))
    expected = [each.loss for each in _expected([job])][1 : 1 + STEPS]
    differences = [
        dataclasses.replace(_loss(step, "loss", *losses), limit=NARROW_ERROR)
        for step, losses in enumerate(zip(ranks[0].losses, expected, strict=True))
    ]
    return _verdict(f"training {job.strategy} in bfloat16", differences, problems)


def _verdict(
    name: str, differences: list[Difference], problems: Sequence[tuple[str | None, str]]
) -> Verdict:
    verdict = Verdict(name, differences, [text for _, text in problems])
    if verdict.is_equal:
        return verdict
    if problems:
        module, text = problems[0]
        return dataclasses.replace(verdict, place=Place(module, text))
    first = verdict.first
    assert first is not None
    owner = first.name.rpartition(".")[0] if first.quantity != "norm" else None
    what = f"{first.what} is the first that differs, and all before agrees"
    return dataclasses.replace(verdict, place=Place(owner or None, what, first.step))
