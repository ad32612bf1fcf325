"""Verify the road that training takes: first weights, data, evaluation, saving and going on.

A run takes all its steps in the loop of `phalanx train`, and saves in the middle and at the end. A
second run goes on from the middle, under another strategy and with another global batch. Plain
PyTorch takes the same steps on one process. A third run is in a narrow data type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.checkpoint import manifest
from phalanx.comm.comm import Ranks, local_shard
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.config import TrainConfig
from phalanx.data.batch import Batch
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.train.evaluate import Evaluation
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.loop import Watcher, take_steps
from phalanx.train.objective import Objective
from phalanx.train.session import Session, open_session
from phalanx.train.step import StepResult
from phalanx.verify.compare import Difference, compare_named, compare_scalar, compare_step
from phalanx.verify.locate import Recording, locate
from phalanx.verify.record import Case, full, state_of
from phalanx.verify.reference import StepRecord
from phalanx.verify.road import Road, reference_case, reference_road
from phalanx.verify.runs import STEPS, first_run, narrow_run, second_run
from phalanx.verify.trace import Recorder
from phalanx.verify.verdict import Place, Verdict

NARROW_ERROR = 5e-3
"""Largest relative error of the losses of the narrow run, beside float64."""

MOMENTS = ("exp_avg", "exp_avg_sq")

Value = TypeVar("Value")
Problem = tuple[str | None, str]
"""The module at fault, as in `Place`, and what is wrong."""


def verify_training(strategy: Strategy, given: TrainConfig, folder: Path) -> list[Verdict]:
    """Take the runs, each on new processes, up to the first that differs.

    In a job that others have started, its ranks take them, and all call this together.

    Args:
        strategy: of the first run.
        given: settings of the runs, see road.py.
        folder: an empty one, which all ranks see.
    """
    config = first_run(given, strategy, folder)
    first = _resolved(config)
    verdicts = [_judged([first])]
    if verdicts[0].is_equal:
        middle = manifest.whole(first.out)[STEPS]
        verdicts.append(_judged([first, _resolved(second_run(config, strategy, middle))]))
    if verdicts[-1].is_equal:
        narrow = _resolved(narrow_run(config, given.precision))
        roads = _on_ranks(train_rank, narrow)
        verdicts.append(_once(lambda: compare_narrow(narrow, roads)))
    return verdicts


def _resolved(config: TrainConfig) -> Job:
    return _once(lambda: resolve(config))


def _once(function: Callable[[], Value]) -> Value:
    """Return what `function()` returns; in a job on rank 0, so that all ranks go on alike."""
    if not dist.is_initialized():
        return function()
    return broadcast_object(function() if dist.get_rank() == 0 else None)


def _on_ranks(function: Callable[..., Value], job: Job, *args: Any) -> list[Value]:
    """Return what `function(job, *args)` returns on each rank."""
    if dist.is_initialized():
        return gather_objects(function(job, *args))
    return run_ranks(
        function, job.strategy.num_ranks, job, *args, device=job.device,
        threads=job.config.threads, timeout_s=job.config.timeout_s,
    )  # fmt: skip


def _judged(jobs: Sequence[Job]) -> Verdict:
    """Take the last of the runs, compare it, and find the module at fault where that can be."""
    job = jobs[-1]
    roads = _on_ranks(train_rank, job)
    verdict = _once(lambda: compare(jobs, roads))
    # A fault of the model shows in an evaluation first, and its step tells the module.
    wrong = (d for d in verdict.differences if not d.passes and d.quantity != "validation loss")
    first = next(wrong, None)
    is_in_step = first is not None and first.quantity in ("loss", "gradient", "norm")
    if not is_in_step or verdict.replicas or job.config.compile:
        return verdict
    again = dataclasses.replace(job.config, out=f"{job.out}-again")
    place = _on_ranks(locate_rank, _resolved(again), reference_case(jobs), first)[0]
    return dataclasses.replace(verdict, place=place)


def train_rank(job: Job) -> Road:
    """Train on this rank in the loop of `phalanx train`, and take down what happens."""
    session = open_session(job)
    with session.loader, session.saver:
        witness = Witness(session)
        with session.step.watched(witness.phase):
            take_steps(session, witness)
    return witness.road


class Witness(Watcher):
    """Takes down what the loop does, in the place of a run's records."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gradients: dict[str, Tensor] = {}
        self._weights = self._shards()
        self.road = Road(self._record())
        session.step.objective = _Noting(session.step.objective, self.road.rows)
        session.model.blocks[0].register_forward_hook(functools.partial(_note_output, self.road))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Take down the gradients once they are reduced, before they are clipped."""
        if name == "clip":
            named = self._session.model.named_parameters()
            self._gradients = {n: full(p.grad) for n, p in named if p.grad is not None}
        yield

    def keep(self, result: StepResult) -> None:
        """Take down a step."""
        model, step, road = self._session.model, self._session.step, self.road
        norms = {step.config.clip_p: result.grad_norm}
        road.records[step.steps_done - 1] = self._record(result.loss, norms)
        self._weights = self._shards()
        kept = {
            "weights": list(model.parameters()),
            "gradients": step.gradients(),
            "moments": [t for key in MOMENTS for _, t in state_of(model, step.optimizer, key)],
        }
        road.dtypes |= {what: {str(t.dtype) for t in tensors} for what, tensors in kept.items()}

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Take down an evaluation, and what it leaves."""
        road, done = self.road, self._session.step.steps_done
        road.consumed[done] = self._session.loader.consumed
        if evaluation is not None:
            road.evaluations[done] = evaluation.loss
        road.is_training = road.is_training and self._session.model.training
        road.is_kept = road.is_kept and all(map(torch.equal, self._weights, self._shards()))

    def _shards(self) -> list[Tensor]:
        return [local_shard(p).detach().clone() for p in self._session.model.parameters()]

    def _record(self, loss: float = 0.0, norms: Mapping[float, float] | None = None) -> StepRecord:
        """Gather the state; every rank calls this together."""
        model, optimizer = self._session.model, self._session.step.optimizer
        states = [state_of(model, optimizer, key) for key in MOMENTS]
        states.append(list(model.named_parameters()))
        named = [{name: full(tensor) for name, tensor in state} for state in states]
        if not self._session.is_first:
            return StepRecord(loss, norms or {}, {}, {}, {}, {})
        return StepRecord(loss, norms or {}, self._gradients, *named)


@dataclass(frozen=True)
class _Noting(Objective):
    """An objective that notes the rows that it computes on in training."""

    inner: Objective
    rows: dict[int, list[list[int]]]

    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        if torch.is_grad_enabled():
            self.rows.setdefault(step, []).append(microbatch.rows_B.tolist())
        return self.inner.loss_sum(model, microbatch, step)

    def num_valid(self, microbatch: Batch) -> int | Tensor:
        return self.inner.num_valid(microbatch)


def _note_output(road: Road, module: nn.Module, args: object, output: Tensor) -> None:
    del module, args
    road.dtypes.setdefault("output of a block", set()).add(str(output.dtype))


def locate_rank(job: Job, case: Case, first: Difference) -> Place:
    """Take the run again on this rank, and find the module at which a step goes wrong."""
    comm = Ranks(job.strategy, job.device)
    return locate(case, job.strategy, comm, first, functools.partial(_record_step, job, case))


def _record_step(job: Job, case: Case, step: int, suspect: str | None) -> Recording:
    session = open_session(job)
    recorder = Recorder(session.model, copies=job.strategy.tp.degree == 1, suspect=suspect)
    rows: dict[int, list[list[int]]] = {}
    session.step.objective = _Noting(session.step.objective, rows)
    pointer = _Pointer(session, recorder, step)
    with session.loader, session.saver, session.step.watched(recorder.phase):
        take_steps(session, pointer)
    begin = int(case.batches[step].rows_B[0])
    of_batch = [torch.tensor(each) - begin for each in rows[step]]
    return Recording(recorder, of_batch, session.comm.coord("data"))


@dataclass(frozen=True)
class _Pointer(Watcher):
    """Has one step of the loop recorded."""

    session: Session
    recorder: Recorder
    step: int

    @contextmanager
    def watching(self) -> Generator[None]:
        if self.session.step.steps_done == self.step:
            self.recorder.restart()
        yield
        self.recorder.is_on = False


def compare(jobs: Sequence[Job], ranks: Sequence[Road]) -> Verdict:
    """Compare the last run with plain PyTorch.

    Args:
        jobs: of the run, and before it of the one that it goes on from.
        ranks: what each rank has seen.
    """
    ours, expected = ranks[0], reference_road(jobs)
    start = min(expected.records)
    differences: list[Difference] = []
    for quantity in ("weight", "first moment", "second moment"):
        kept = f"{quantity.replace(' ', '_')}s"
        tensors = (getattr(road.begin, kept) for road in (ours, expected))
        differences += compare_named(start, quantity, *tensors)
    for done in range(start, 2 * STEPS + 1):
        if done in ours.evaluations and done in expected.evaluations:
            losses = ours.evaluations[done], expected.evaluations[done]
            differences.append(compare_scalar(done, "validation loss", "", *losses))
        if done in ours.records and done in expected.records:
            differences += compare_step(done, ours.records[done], expected.records[done])
    before = "".join(f", going on from {job.strategy}" for job in jobs[:-1])
    problems = list(_problems(jobs[-1], ranks, expected))
    return _verdict(f"training {jobs[-1].strategy}{before}", differences, problems)


def _problems(job: Job, ranks: Sequence[Road], expected: Road) -> Iterator[Problem]:
    """Yield what is wrong and needs no arithmetic to be judged."""
    for rank, road in enumerate(ranks):
        where = f"{job.strategy}, rank {rank}"
        if list(road.records) != list(expected.records):
            steps, due = ([step + 1 for step in each.records] for each in (road, expected))
            yield None, f"{where}: it takes the steps {steps}, where {due} are due"
        elif road.consumed != expected.consumed:
            found, due = (list(each.consumed.values()) for each in (road, expected))
            yield None, f"{where}: its positions in the data are {found}, where {due} are due"
        if road.evaluations.keys() != expected.evaluations.keys():
            found, due = (list(each.evaluations) for each in (road, expected))
            yield None, f"{where}: it evaluates after the steps {found}, where {due} are due"
        if not road.is_training:
            yield "", f"{where}: evaluation leaves the model in eval mode, without dropout"
        if not road.is_kept:
            yield "", f"{where}: evaluation changes the weights"
        numbers = [
            [(record.loss, record.norms) for record in each.records.values()]
            for each in (road, ranks[0])
        ]
        if numbers[0] != numbers[1]:
            yield None, f"{where}: its losses or norms are not those of rank 0"
    for step, (due,) in expected.rows.items():
        taken = {row for road in ranks for rows in road.rows.get(step, []) for row in rows}
        if taken and taken != set(due):
            what = f"its {len(taken)} rows are {min(taken)} to {max(taken)}"
            yield None, f"{job.strategy}, step {step}: {what}, where {due[0]} to {due[-1]} are due"


def compare_narrow(job: Job, ranks: Sequence[Road]) -> Verdict:
    """Check the data types of a narrow run, and that its losses are near those of float64."""
    precision = job.config.precision
    problems: list[Problem] = []
    for what, found in ranks[0].dtypes.items():
        is_output = what == "output of a block"
        due = f"torch.{precision}" if is_output else "torch.float32"
        if found != {due}:
            kinds = ", ".join(sorted(found))
            problems.append(
                ("blocks.0" if is_output else "", f"the {what} are in {kinds}; {due} is due")
            )
    expected = reference_road([job]).records
    differences = [
        dataclasses.replace(
            compare_scalar(step, "loss", "", record.loss, expected[step].loss), limit=NARROW_ERROR
        )
        for step, record in ranks[0].records.items()
    ]
    return _verdict(f"training {job.strategy} in {precision}", differences, problems)


def _verdict(name: str, differences: list[Difference], problems: Sequence[Problem]) -> Verdict:
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
