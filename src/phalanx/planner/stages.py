"""How long a pipeline's step is, by the seconds of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.parallel.pipeline.cut import schedule_of
from phalanx.parallel.pipeline.schedule import Action, Schedule
from phalanx.parallel.pipeline.simulate import Timeline, simulate
from phalanx.strategy import Strategy


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one microbatch, its collectives included."""

    forward: float
    backward: float
    message: float
    """Of what it sends to another stage, either way."""


def busiest(times: Sequence[StageTimes], schedule: Schedule | None) -> tuple[int, ...]:
    """Return the stages of the rank that computes longest."""
    if schedule is None:
        return (0,)
    ranks = [schedule.stages_of(rank) for rank in range(len(schedule.orders))]
    return max(ranks, key=lambda stages: sum(times[s].forward + times[s].backward for s in stages))


@functools.lru_cache(maxsize=4096)
def step_s(strategy: Strategy, num_microbatches: int, times: tuple[StageTimes, ...]) -> float:
    """Return the length of a step of the pipeline.

    After some microbatches each further round of them adds the same, so that long steps are made
    longer, not simulated.
    """
    round_size = strategy.pp.degree
    short = 2 * round_size + num_microbatches % round_size
    if num_microbatches <= short + round_size:
        return _length(schedule_of(strategy, num_microbatches), times)
    first = _length(schedule_of(strategy, short), times)
    more = _length(schedule_of(strategy, short + round_size), times) - first
    return first + more * (num_microbatches - short) / round_size


def _length(schedule: Schedule, times: tuple[StageTimes, ...]) -> float:
    """Return when the last action ends: of `simulate`, which also watches the queues, the length.

    What each action waits for is worked out once for a schedule, so that a search can ask often.
    """
    cost = _costs(times)
    seconds = {(op, stage): cost(op, stage) for op in "FBIW" for stage in range(len(times))}
    ends: list[float] = []
    for op, stage, needs in _waits(schedule):
        ends.append(max((ends[need] for need in needs), default=0.0) + seconds[op, stage])
    return max(ends)


@functools.lru_cache(maxsize=256)
def _waits(schedule: Schedule) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Return each action after those that it waits for, by their numbers in the list."""
    last, left = schedule.num_stages - 1, [list(reversed(order)) for order in schedule.orders]
    numbers: dict[Action, int] = {}
    before: list[int | None] = [None] * len(left)
    found: list[tuple[str, int, tuple[int, ...]]] = []
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(left):
            while actions:
                action = actions[-1]
                needs = [_made(numbers, need) for need in _needs(action, last)]
                if None in needs:
                    break
                needs += [] if before[rank] is None else [before[rank]]
                before[rank] = numbers[action] = len(found)
                found.append((action.op, action.stage, tuple(n for n in needs if n is not None)))
                actions.pop()
                has_moved = True
    return tuple(found)


def _made(numbers: dict[Action, int], need: Action) -> int | None:
    """Return the number of an action that makes a gradient: whole, or of the input alone."""
    return numbers.get(need, numbers.get(need._replace(op="I")) if need.op == "B" else None)


def _needs(action: Action, last: int) -> list[Action]:
    if action.op == "F":
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    if action.op == "W":
        return [action._replace(op="I")]
    own = action._replace(op="F")
    return [own, action._replace(op="B", stage=action.stage + 1)] if action.stage < last else [own]


def _costs(times: tuple[StageTimes, ...]) -> Callable[[str, int], float]:
    """Return the seconds of each action, what it sends included."""
    last = len(times) - 1

    def cost(op: str, stage: int) -> float:
        of = times[stage]
        if op == "F":
            return of.forward + (of.message if stage < last else 0.0)
        message = of.message if stage else 0.0
        halves = {"B": of.backward + message, "I": of.backward / 2 + message, "W": of.backward / 2}
        return halves[op]

    return cost


def timeline(strategy: Strategy, num_microbatches: int, times: tuple[StageTimes, ...]) -> Timeline:
    """Return when each rank of the pipeline does what, in seconds."""
    cost = _costs(times)
    schedule = schedule_of(strategy, num_microbatches)
    return simulate(schedule, lambda action: cost(action.op, action.stage))
