"""Write a schedule as text, and read a schedule from a file; without torch.

The text has a line for each rank, with its actions separated by commas, in the format of
torch.distributed.pipelining:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

A file lists only computes, as here, or also sends and receives (lowering.py), with or without SENT
and REDUCE. PyTorch writes an empty cell where a rank waits. Empty cells, empty lines and lines that
begin with # are ignored.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.pipeline.lowering import COMPUTES, RECEIVES, SENDS, lower
from phalanx.parallel.pipeline.schedule import Action, Op, Schedule
from phalanx.parallel.pipeline.simulate import simulate
from phalanx.storage import read_text

_ACTION = re.compile(
    rf"([0-9]{{1,6}})({'|'.join(sorted(get_args(Op), reverse=True))})([0-9]{{1,6}})"
)

_Lines = Sequence[tuple[Action, ...]]


def text_of(schedule: Schedule) -> list[str]:
    """Return a line for each rank: its lowered actions, with messages and reductions."""
    return [",".join(map(str, lower(schedule, rank))) for rank in range(len(schedule.orders))]


@functools.lru_cache
def read_schedule(path: str, num_ranks: int) -> Schedule:
    """Return the schedule in a file; cached, so that a process reads the file once.

    Raises:
        StrategyError: the file cannot be read, does not have `num_ranks` ranks, or has a schedule
            that is invalid or deadlocks; see `simulate`.
    """
    try:
        text = read_text(Path(path))
    except ConfigError as error:
        raise StrategyError(f"schedule: {error}") from None
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    if len(lines) != num_ranks:
        raise StrategyError(
            f"schedule {path}: the file has {len(lines)} lines of actions; expected {num_ranks}, "
            "one for each rank of pp"
        )
    listed: list[tuple[Action, ...]] = []
    for number, line in lines:
        actions: list[Action] = []
        for word in filter(None, map(str.strip, line.split(","))):
            if (match := _ACTION.fullmatch(word)) is None:
                raise StrategyError(
                    f"schedule {path}, line {number}: cannot read {word[:40]!r}; expected a stage, "
                    f"one of {', '.join(get_args(Op))}, and a microbatch, such as 2F0"
                )
            stage, op, microbatch = match.groups()
            actions.append(Action(cast(Op, op), int(stage), int(microbatch)))
        listed.append(tuple(actions))
    schedule = _schedule(path, listed)
    simulate(schedule)
    # Refuse SENT and REDUCE in places other than where lowering inserts them.
    for rank, written in enumerate(listed):
        if all(action.op in COMPUTES + SENDS + RECEIVES for action in written):
            continue
        for action, expected in itertools.zip_longest(written, lower(schedule, rank)):
            if action != expected:
                raise StrategyError(
                    f"schedule {schedule.kind}: rank {rank} has {action or 'nothing'} where "
                    f"{expected or 'nothing'} is expected; leave SENT and REDUCE out, and they are "
                    "inserted where they belong"
                )
    return schedule


def _schedule(path: str, listed: _Lines) -> Schedule:
    """Return the schedule of the lists of all ranks; refuse gaps in stages or microbatches."""
    orders = tuple(tuple(a for a in actions if a.op in COMPUTES) for actions in listed)
    every = [action for order in orders for action in order]
    counts = {
        "stage": {action.stage for action in every},
        "microbatch": {action.microbatch for action in every},
    }
    for what, numbers in counts.items():
        missing = next(n for n in itertools.count() if n not in numbers)
        if missing != len(numbers) or not numbers:
            raise StrategyError(
                f"schedule {path}: no rank computes {what} {missing}; expected each from 0 to "
                f"{max(numbers, default=0)}"
            )
    ranks = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    rank_of = tuple(ranks[stage] for stage in range(len(ranks)))
    for rank in range(len(orders)):
        if rank not in rank_of:
            raise StrategyError(f"schedule {path}: rank {rank} computes no stage; expected one")
    for stage, (one, other) in enumerate(itertools.pairwise(rank_of)):
        if (one - other) % len(orders) not in (0, 1, len(orders) - 1):
            raise StrategyError(
                f"schedule {path}: stage {stage} is on rank {one}, and stage {stage + 1} on rank "
                f"{other}; expected the same rank or a neighbour of it"
            )
    is_whole = any(action.op in SENDS + RECEIVES for actions in listed for action in actions)
    ops = COMPUTES + SENDS + RECEIVES
    written = (tuple(tuple(a for a in actions if a.op in ops) for actions in listed),)
    return Schedule(path, rank_of, orders, len(counts["microbatch"]), *written[:is_whole])
