"""Compare the history of a run on its ranks with the history of one process, for a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from phalanx.comm.together import on_first_rank
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.verify.compare import Difference, compare_step, compare_values
from phalanx.verify.record import owner
from phalanx.verify.reference import BitsKey, History, RankFacts
from phalanx.verify.settings import EVALUATION
from phalanx.verify.verdict import Place, Verdict

Value = TypeVar("Value")

VALIDATION = "validation loss"

_OF_ALL = ("loss", "norm", "learning rate", EVALUATION, VALIDATION)
"""Quantities of the whole model or run, which belong to no module."""


def judge(title: str, ranks: Sequence[History], expected: History) -> Verdict:
    """Compare the history of each rank of a run with the expected history of one process.

    If the initial state of the run differs, nothing else is compared; otherwise the run is compared
    to the end of the first step that differs.
    """
    ours = ranks[0]
    differences, unequal = list[Difference](), list[Place]()
    for number, record in ours.begin.items():
        if number in expected.begin:
            differences += compare_step(number, record, expected.begin[number])
    if all(row.passes for row in differences):
        found, unequal = _compare(ranks, expected)
        differences += found
    return verdict_of(title, differences, list(_problems(title, ranks, expected)), unequal)


def verdict_of(
    title: str, differences: list[Difference], problems: Sequence[Place], unequal: Sequence[Place]
) -> Verdict:
    """Return the verdict on differences, on other faults of the run, and on unequal replicas."""
    replicas = [problem.what for problem in problems]
    replicas += [f"step {each.step}: {each.what}" for each in unequal]
    place = next(iter(problems), None)
    if place is None and (first := to_locate(differences)) is not None:
        module = None if first.quantity in _OF_ALL else owner(first.name)
        what = f"{first.what} is the first quantity that differs; all earlier ones agree"
        place = Place(module, what, first.step)
    return Verdict(title, differences, replicas, place=place or next(iter(unequal), None))


def to_locate(differences: Sequence[Difference]) -> Difference | None:
    """Return the first difference in a step, or else the first differing validation loss."""
    wrong = [row for row in differences if not row.passes]
    in_steps = (row for row in wrong if row.quantity != VALIDATION)
    return next(in_steps, next(iter(wrong), None))


def located(verdict: Verdict, find: Callable[[Difference], Place]) -> Verdict:
    """Return the verdict with the place that `find` returns, if a step differs.

    A verdict with `replicas`, or with a difference in the initial state, keeps its place.
    """
    first = to_locate(verdict.differences)
    is_step = any(row.quantity == "loss" for row in verdict.differences)  # else the initial state
    if first is None or first.quantity == VALIDATION or verdict.replicas or not is_step:
        return verdict
    return dataclasses.replace(verdict, place=find(first))


def once(function: Callable[[], Value]) -> Value:
    """Return `function()`; in a job, call it only on rank 0 and return its result on all ranks."""
    if not dist.is_initialized():
        return function()
    try:
        return on_first_rank(function, "cannot verify the run")
    except CheckpointError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PhalanxError | OSError):
            raise
        raise cause from None  # an error of the program keeps its traceback


def _compare(ranks: Sequence[History], expected: History) -> tuple[list[Difference], list[Place]]:
    """Compare evaluations and steps in order; return the differences, and the unequal ranks."""
    ours, differences = ranks[0], list[Difference]()
    for number in sorted({*ours.records, *ours.evaluations}):
        if number in ours.evaluations and number in expected.evaluations:
            left, right = ({"": each.evaluations[number]} for each in (ours, expected))
            differences += compare_values(number, VALIDATION, left, right)
        if number in ours.records and number in expected.records:
            differences += compare_step(number, ours.records[number], expected.records[number])
            facts = [rank.facts[number] for rank in ranks if number in rank.facts]
            unequal = unequal_ranks(number, facts)
            wrong = any(not row.passes and row.quantity != VALIDATION for row in differences)
            if unequal or wrong:
                return differences, unequal
    if ours.evaluated is not None and expected.evaluated is not None:
        left, right = ({"": each.evaluated} for each in (ours, expected))
        last = max(ours.records, default=0)
        differences += compare_values(last, EVALUATION, left, right)  # pyright: ignore[reportArgumentType]
    return differences, []


def _problems(title: str, ranks: Sequence[History], expected: History) -> Iterator[Place]:
    """Yield faults other than numeric differences: of steps, rows, positions and evaluations."""
    for rank, history in enumerate(ranks):
        where = f"{title}, rank {rank}"
        pairs = {
            "it takes the steps": [[n + 1 for n in each.records] for each in (history, expected)],
            "its positions in the data are": [
                list((each.consumed or expected.consumed).values()) for each in (history, expected)
            ],
            "it evaluates after the steps": [
                list(each.evaluations) for each in (history, expected)
            ],
        }
        for what, (ours, due) in pairs.items():
            if ours != due:
                yield Place(None, f"{where}: {what} {ours}; expected {due}", None, rank)
        if history.idle:
            what = f"an evaluation leaves {history.idle[0] or 'the model'} in eval mode"
            yield Place(history.idle[0], f"{where}: {what}", None, rank)
        if not history.is_kept:
            yield Place("", f"{where}: an evaluation changes the weights", None, rank)
    for step, due in expected.rows.items():
        taken = {row for each in ranks for row in each.rows.get(step, [])}
        if taken and taken != set(due):
            what = f"its {len(taken)} rows are {min(taken)} to {max(taken)}"
            what += f"; expected {due[0]} to {due[-1]}"
            yield Place(None, f"{title}, step {step}: {what}")


def unequal_ranks(step: int, facts: Sequence[RankFacts]) -> list[Place]:
    """Return differences between ranks in values that must be equal, roughly in order of a step."""
    return [
        *_unequal_numbers(step, "the loss", [rank.numbers["loss"][""] for rank in facts]),
        *unequal_replicas(step, facts),
        *(
            place
            for p in facts[0].numbers.get("norm", {})
            for place in _unequal_numbers(
                step, f"the {p}-norm of the gradient", [rank.numbers["norm"][p] for rank in facts]
            )
        ),
    ]


def unequal_replicas(step: int, facts: Sequence[RankFacts]) -> list[Place]:
    """Return the gradients that a rank lacks, and the tensors that differ from their replicas."""
    return [*_lacking(step, facts), *_unequal_bits(step, facts)]


def _unequal_numbers(step: int, what: str, numbers: Sequence[float]) -> list[Place]:
    same = repr(numbers[0])  # unlike the numbers, the texts of two NaNs are equal
    odd = [rank for rank, number in enumerate(numbers) if repr(number) != same]
    if not odd:
        return []
    text = f"{what} is {numbers[0]:.17g} on rank 0 and {numbers[odd[0]]:.17g} on rank {odd[0]}"
    return [Place(None, text, step, odd[0])]


def _lacking(step: int, facts: Sequence[RankFacts]) -> Iterator[Place]:
    # A rank is only compared for parameters that it has: a pipeline stage has some of them.
    held, trained = (
        [{name for kind, name, _ in rank.bits if kind == wanted} for rank in facts]
        for wanted in ("weight", "gradient")
    )
    for name in sorted(set[str]().union(*trained)):
        without = [r for r, names in enumerate(trained) if name in held[r] and name not in names]
        if without:
            text = f"{name} has a gradient on some ranks, but none on rank {without[0]}"
            yield Place(owner(name), text, step, without[0])


def _unequal_bits(step: int, facts: Sequence[RankFacts]) -> Iterator[Place]:
    first: dict[BitsKey, tuple[int, str]] = {}
    seen: set[tuple[str, str]] = set()
    for number, rank in enumerate(facts):
        for key, digest in rank.bits.items():
            quantity, name, _ = key
            holder, other = first.setdefault(key, (number, digest))
            if other != digest and (quantity, name) not in seen:
                seen.add((quantity, name))
                text = (
                    f"the {quantity} of {name} on rank {number} differs from its replica on "
                    f"rank {holder}"
                )
                yield Place(owner(name), text, step, number)
