"""What a pipeline schedule takes if each action takes as long as it is said to; no torch.

Messages take no time. An action begins when its rank is free and what it needs is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.schedule import Action, Op, Schedule

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Durations for drawings: a backward does twice the work of a forward."""


class Span(NamedTuple):
    """An action and when it runs, in the unit of its duration."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what.

    Attributes:
        lanes: rank -> its actions, in order.
    """

    lanes: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """From the begin of the first action, 0, to the end of the last."""
        return max(span.end for lane in self.lanes for span in lane)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, from 0 to 1."""
        busy = sum(span.end - span.begin for lane in self.lanes for span in lane)
        return 1 - busy / (self.length * len(self.lanes))


def simulate(schedule: Schedule, cost: Callable[[Action], float] | None = None) -> Timeline:
    """Return when each action runs if it takes `cost(action)`, by default that of UNITS.

    Raises:
        StrategyError: the schedule is not legal, see `check_complete`, or its ranks wait for each
            other for ever; it names the action that each of them waits for.
    """
    check_complete(schedule)
    cost = cost or (lambda action: UNITS[action.op])
    last_stage = schedule.num_stages - 1
    ends: dict[Action, float] = {}
    lanes: list[list[Span]] = [[] for _ in schedule.orders]
    left = [list(reversed(order)) for order in schedule.orders]
    moved = True
    while moved:
        moved = False
        for lane, order in zip(lanes, left, strict=True):
            while order:
                needed = [_end(ends, each) for each in _needs(order[-1], last_stage)]
                ready = [when for when in needed if when is not None]
                if len(ready) < len(needed):
                    break
                action = order.pop()
                begin = max([0.0, *ready, *(span.end for span in lane[-1:])])
                ends[action] = begin + cost(action)
                lane.append(Span(action, begin, ends[action]))
                moved = True
    if any(left):
        waits = ", ".join(f"rank {rank} for {_text(o[-1])}" for rank, o in enumerate(left) if o)
        raise StrategyError(f"schedule {schedule.kind}: its ranks wait for ever: {waits}")
    return Timeline(tuple(map(tuple, lanes)))


def _needs(action: Action, last_stage: int) -> Iterator[Action]:
    """Yield what must have run before an action, wherever; of a backward in one form."""
    op, stage, microbatch = action
    if op == "F":
        if stage > 0:
            yield Action("F", stage - 1, microbatch)
    elif op == "W":
        yield Action("I", stage, microbatch)
    else:
        yield Action("F", stage, microbatch)
        if stage < last_stage:
            yield Action("B", stage + 1, microbatch)


def _end(ends: dict[Action, float], needed: Action) -> float | None:
    """Return when an action has ended; its gradient comes of B, or of I."""
    end = ends.get(needed)
    if end is None and needed.op == "B":
        return ends.get(needed._replace(op="I"))
    return end


def check_complete(schedule: Schedule) -> None:
    """Refuse a schedule in which an action is missing, doubled or on the wrong rank.

    Raises:
        StrategyError: names the first action at fault.
    """
    found = Counter(action for order in schedule.orders for action in order)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if schedule.rank_of[action.stage] != rank:
                raise StrategyError(
                    f"schedule {schedule.kind}: {_text(action)} is on rank {rank}; stage "
                    f"{action.stage} is on rank {schedule.rank_of[action.stage]}"
                )
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            ops: tuple[Op, ...] = ("F", "B", "I", "W")
            count = {op: found.pop(Action(op, stage, microbatch), 0) for op in ops}
            if (*count.values(),) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                counted = ", ".join(f"{number} {op}" for op, number in count.items())
                raise StrategyError(
                    f"schedule {schedule.kind}: microbatch {microbatch} has {counted} in stage "
                    f"{stage}; expected 1 F, and 1 B or 1 I and 1 W"
                )
    if found:
        raise StrategyError(
            f"schedule {schedule.kind}: {_text(next(iter(found)))} is of no stage or microbatch"
        )


def most_in_flight(schedule: Schedule) -> list[int]:
    """Return, for each rank, the most forwards whose activations it holds at a time.

    Those of one stage, for one microbatch, count 1: of a rank with v chunks each is 1/v of what it
    holds of a microbatch.
    """
    most: list[int] = []
    for order in schedule.orders:
        held, peak = 0, 0
        for action in order:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.op]
            peak = max(peak, held)
        most.append(peak)
    return most


def draw(schedule: Schedule) -> str:
    """Return the schedule as text, a lane a rank, a cell a unit of time of UNITS.

    `F3` is the forward of microbatch 3, `B3` its backward; `f3` is that of the second chunk. With
    more chunks than two, `a` to `z` after the number names the chunk.
    """
    lines: list[str] = []
    chunks = len(schedule.stages_of(0))
    for rank, lane in enumerate(simulate(schedule).lanes):
        cells: list[str] = []
        for action, begin, end in lane:
            chunk = schedule.stages_of(rank).index(action.stage)
            cell = f"{action.op}{action.microbatch}"
            if chunks > 2:
                cell += chr(ord("a") + chunk)
            cells += [""] * (int(begin) - len(cells))
            cells += [cell.lower() if chunk == 1 and chunks == 2 else cell] * int(end - begin)
        lines.append(" ".join(f"{cell or '.':>2}" for cell in cells).rstrip())
    return "\n".join(lines)


def _text(action: Action) -> str:
    return f"{action.op} of microbatch {action.microbatch} in stage {action.stage}"
