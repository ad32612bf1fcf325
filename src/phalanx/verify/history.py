"""What a run computes, step by step: of a rank, or of plain PyTorch in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.data.rows import count_rows
from phalanx.verify.reference import ReferenceRun, StepRecord

if TYPE_CHECKING:
    from phalanx.verify.record import Case

BitsKey = tuple[str, str, tuple[int, ...]]
"""Quantity, name of the parameter, and where the shard begins."""


@dataclass(frozen=True)
class RankFacts:
    """What one rank holds after a step, small enough to compare between all ranks.

    Attributes:
        numbers: the loss, norms by p and learning rates, as this rank knows them.
        bits: hash of each shard of this rank.
        nonfinite: names of the parameters whose gradient is not finite here.
    """

    numbers: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    bits: dict[BitsKey, str] = field(default_factory=dict[BitsKey, str])
    nonfinite: list[str] = field(default_factory=list[str])


@dataclass
class History:
    """What a run has done; full tensors are the first rank's alone.

    Attributes:
        begin: weights, buffers and the optimizer's state before a step, by its number.
        records: of each step, by its number.
        facts: what ranks must agree on, by the number of the step.
        evaluations: validation losses, by the steps done.
        evaluated: sum of the losses of the last batch in eval mode.
        rows: positions in the data of the rows of each step, by its number.
        consumed: position in the data at each evaluation, by the steps done; text alone has it.
        idle: modules that an evaluation has left in eval mode.
        is_kept: whether all evaluations left the weights as they were.
        dtypes: what is kept, and in which data types; text alone has it.
    """

    begin: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    records: dict[int, dict[str, dict[str, Tensor | float]]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    facts: dict[int, RankFacts] = field(default_factory=dict[int, RankFacts])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    evaluated: float | None = None
    rows: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    consumed: dict[int, int] = field(default_factory=dict[int, int])
    idle: list[str] = field(default_factory=list[str])
    is_kept: bool = True
    dtypes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def reference_history(
    case: Case, start: int, every: int, validate: Callable[[nn.Module], float | None]
) -> History:
    """Take all steps of a case in plain PyTorch, and return those from `start` on.

    Args:
        case: what is run.
        start: steps that a run which resumes has done.
        every: evaluations stand after so many steps, and after the last.
        validate: returns the mean loss of the validation data; None without.
    """
    run, history = ReferenceRun(case, torch.device("cpu")), History()
    steps, position, last = run.steps(), 0, len(case.batches)
    for number in range(last + 1):
        is_due = number >= start
        if is_due:
            history.begin[number] = run.state()
        if is_due and (number % every == 0 or number == last):
            history.consumed[number] = position
            if (loss := validate(run.model)) is not None:
                history.evaluations[number] = loss
        if number < last:
            record, end = next(steps), position + count_rows(case.batches[number])
            if is_due:
                history.records[number] = {q: dict(values) for q, values in record.items()}
                history.rows[number] = list(range(position, end))
            position = end
    history.evaluated = float(run.evaluate())
    return history
