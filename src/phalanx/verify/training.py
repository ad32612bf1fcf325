"""Verify a training run: first weights, data, evaluation, saving and going on.

A run takes all its steps in the loop of `phalanx train`, and saves in the middle and at the end. A
second run goes on from the middle, under another strategy and with another global batch. Plain
PyTorch takes the same steps on one process. A third run is in a narrow data type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.checkpoint import manifest
from phalanx.comm.together import gather_objects, on_first_rank
from phalanx.config import TrainConfig
from phalanx.errors import CheckpointError, PhalanxError, RankFailed
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy
from phalanx.train.job.resolve import Job, resolve
from phalanx.verify.compare import Difference, compare_step, compare_values
from phalanx.verify.history import History, reference_case, reference_history
from phalanx.verify.record import owner
from phalanx.verify.runs import STEPS, first_run, narrow_run, second_run
from phalanx.verify.verdict import Place, Verdict
from phalanx.verify.whereabouts import failed
from phalanx.verify.witness import locate_rank, train_rank

NARROW_ERROR = 5e-3
"""Largest relative error of the losses of the narrow run, beside float64."""

Value = TypeVar("Value")


def verify_training(strategy: Strategy, given: TrainConfig, folder: Path) -> list[Verdict]:
    """Take the runs, each on new processes, up to the first that differs.

    In a job that others have started, its ranks take them, and all call this together.

    Args:
        strategy: of the first run.
        given: settings of the runs, see runs.py.
        folder: an empty one; in a job that of rank 0 is used, which all ranks must see.
    """
    folder = _once(lambda: folder)
    config = first_run(given, strategy, folder)
    first = _once(lambda: resolve(config))
    verdicts = [_judged([first])]
    if verdicts[0].is_equal:
        going_on = second_run(config, strategy, manifest.whole(first.out)[STEPS])
        verdicts.append(_judged([first, _once(lambda: resolve(going_on))]))
    if verdicts[-1].is_equal:
        narrow = _once(lambda: resolve(narrow_run(config, given.precision)))
        try:
            histories = _on_ranks(train_rank, narrow)
        except RankFailed as failure:
            return [*verdicts, failed(_name([narrow]), failure)]
        verdicts.append(_once(lambda: compare_narrow(narrow, histories)))
    return verdicts


def _once(function: Callable[[], Value]) -> Value:
    """Return what `function()` returns; in a job on rank 0, so that all ranks go on alike."""
    if not dist.is_initialized():
        return function()
    try:
        return on_first_rank(function, "cannot verify the training run")
    except CheckpointError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PhalanxError | OSError):
            raise
        raise cause from None  # a fault of the program keeps its traceback


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
    try:
        histories = _on_ranks(train_rank, job)
    except RankFailed as failure:
        return failed(_name(jobs), failure)
    verdict = _once(lambda: compare(jobs, histories))
    # A fault of the model shows in an evaluation first, and its step tells the module.
    wrong = (d for d in verdict.differences if not d.passes and d.quantity != "validation loss")
    first = next(wrong, None)
    is_in_step = first is not None and first.quantity in ("loss", "gradient", "norm")
    if not is_in_step or verdict.replicas or job.config.compile:
        return verdict
    again = dataclasses.replace(job.config, out=f"{job.out}-again")
    job = _once(lambda: resolve(again))
    place = _on_ranks(locate_rank, job, reference_case(jobs), first)[0]
    return dataclasses.replace(verdict, place=place)


def compare(jobs: Sequence[Job], ranks: Sequence[History]) -> Verdict:
    """Compare what the last of the jobs has done on each rank with plain PyTorch.

    The job before it, if there is one, is what it goes on from.
    """
    ours, expected = ranks[0], reference_history(jobs)
    start = min(expected.records)
    differences = compare_step(start, ours.begin, expected.begin)
    for done in range(start, 2 * STEPS + 1):
        if done in ours.evaluations and done in expected.evaluations:
            left, right = ({"": each.evaluations[done]} for each in (ours, expected))
            differences += compare_values(done, "validation loss", left, right)
        if done in ours.records and done in expected.records:
            differences += compare_step(done, ours.records[done], expected.records[done])
    problems = list(_problems(jobs[-1], ranks, expected))
    return _verdict(_name(jobs), differences, problems)


def _name(jobs: Sequence[Job]) -> str:
    before = "".join(f", going on from {job.strategy}" for job in jobs[:-1])
    return f"training {jobs[-1].strategy}{before}"


def _problems(job: Job, ranks: Sequence[History], expected: History) -> Iterator[Place]:
    """Yield what is wrong and needs no arithmetic to be judged."""
    for rank, history in enumerate(ranks):
        where = f"{job.strategy}, rank {rank}"
        ours, due = (_course(each) for each in (history, expected))
        for what in due:
            if ours[what] != due[what]:
                text = f"{where}: {what} {ours[what]}, where {due[what]} are due"
                yield Place(None, text)
        if not history.is_training:
            yield Place("", f"{where}: evaluation leaves the model in eval mode, without dropout")
        if not history.is_kept:
            yield Place("", f"{where}: evaluation changes the weights")
        numbers, of_first = (
            repr([(record["loss"], record["norm"]) for record in each.records.values()])
            for each in (history, ranks[0])
        )
        if numbers != of_first:
            yield Place(None, f"{where}: its losses or norms are not those of rank 0")
    for step, (due,) in expected.rows.items():
        taken = {row for each in ranks for rows in each.rows.get(step, []) for row in rows}
        if taken and taken != set(due):
            what = f"its {len(taken)} rows are {min(taken)} to {max(taken)}"
            where = f"{job.strategy}, step {step}"
            yield Place(None, f"{where}: {what}, where {due[0]} to {due[-1]} are due")


def _course(history: History) -> dict[str, list[int]]:
    return {
        "it takes the steps": [step + 1 for step in history.records],
        "its positions in the data are": list(history.consumed.values()),
        "it evaluates after the steps": list(history.evaluations),
    }


def compare_narrow(job: Job, ranks: Sequence[History]) -> Verdict:
    """Check the data types of a narrow run, and that its losses are near those of float64."""
    precision = job.config.precision
    problems: list[Place] = []
    for what, found in ranks[0].dtypes.items():
        is_output = what == "output of a block"
        due = f"torch.{precision}" if is_output else "torch.float32"
        if found != {due}:
            text = f"the {what} are in {', '.join(sorted(found))}; {due} is due"
            problems.append(Place("blocks.0" if is_output else "", text))
    expected = reference_history([job]).records
    differences = [
        dataclasses.replace(difference, limit=NARROW_ERROR)
        for step, record in ranks[0].records.items()
        for difference in compare_values(step, "loss", record["loss"], expected[step]["loss"])
    ]
    return _verdict(f"training {job.strategy} in {precision}", differences, problems)


def _verdict(name: str, differences: list[Difference], problems: Sequence[Place]) -> Verdict:
    verdict = Verdict(name, differences, [problem.what for problem in problems])
    first, place = verdict.first, next(iter(problems), None)
    if place is None and first is not None:
        module = (first.quantity != "norm" and owner(first.name)) or None
        what = f"{first.what} is the first that differs, and all before agrees"
        place = Place(module, what, first.step)
    return dataclasses.replace(verdict, place=place)
