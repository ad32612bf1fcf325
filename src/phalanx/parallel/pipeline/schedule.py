"""Pipeline schedules as data: what each rank does, in which order. No torch here.

The blocks of a model are cut into stages, and a microbatch passes them in turn: forward from the
first stage to the last, backward from the last to the first. p ranks have v stages each, its
chunks. A schedule is a list of actions for each rank:

    F   forward of one microbatch through one stage
    B   its backward: the gradients of the input and of the weights
    I   the part of B that the stage before waits for: the gradient of the input
    W   the part that nobody waits for: the gradients of the weights

Below, a rank's list is written as phases: how often, and what. `F I W` stands for one forward, the
gradient of one input, and the gradients of the weights that have waited longest; `F1` names the
second chunk. Microbatches are counted from 0 by each kind of action and chunk. lowering.py puts
sends, receives and reductions into the lists, which simulate.py validates and runtime.py runs.

naive          one microbatch at a time: plain inter-layer model parallelism
gpipe          Huang et al. 2019, arXiv 1811.06965
1f1b           Narayanan et al. 2021, arXiv 2006.09503 (PipeDream-Flush)
interleaved/v  Narayanan et al. 2021, arXiv 2104.04473, section 2.2
zb/v           Qi et al. 2023, arXiv 2401.10241: ZB-H1; with v > 1 its order is the interleaved one
zbv            Qi et al. 2024, arXiv 2405.15362: ZB-V
dualpipev      DeepSeek-AI 2024, arXiv 2412.19437: DualPipe, cut in half to a V
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from phalanx.errors import StrategyError

Op = Literal[
    "F", "B", "I", "W",
    "SEND_F", "RECV_F", "SENT_F", "SEND_B", "RECV_B", "SENT_B",
    "REDUCE",
]  # fmt: skip
"""Computes, then messages and the reduction of gradients, see lowering.py."""


class Action(NamedTuple):
    """What a rank does with one microbatch in one stage; its text form is such as `2F0`."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Who has which stage, and what each rank does.

    Attributes:
        kind: its name in a strategy.
        rank_of: stage -> rank.
        orders: rank -> what it computes, in order.
        num_microbatches: of one step.
        written: rank -> its list with sends and receives, where a file has them.
    """

    kind: str
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    written: tuple[tuple[Action, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank: its chunks, in the order of the model."""
        return tuple(stage for stage, of in enumerate(self.rank_of) if of == rank)


Phases = Iterator[tuple[int, str]]
"""How often, and what: `(3, "F")`, `(2, "F0 F1")`."""


def naive(rank: int, p: int, m: int, v: int) -> Phases:
    """Each microbatch passes all stages, there and back, before the next begins."""
    yield m, "F B"


def gpipe(rank: int, p: int, m: int, v: int) -> Phases:
    """All forwards, then all backwards. It holds all m microbatches."""
    yield m, "F"
    yield m, "B"


def one_f_one_b(rank: int, p: int, m: int, v: int) -> Phases:
    """A backward as soon as there is one. Rank r holds p - r microbatches."""
    warmup = p - rank - 1
    yield warmup, "F"
    yield m - warmup, "F B"
    yield warmup, "B"


def interleaved(rank: int, p: int, m: int, v: int) -> Phases:
    """1F1B over v chunks a rank: v times as many messages, 1/v of the bubble."""
    warmup = _warmup_of_interleaved(rank, p, v)
    yield warmup, "F"
    yield m * v - warmup, "F B"
    yield warmup, "B"


def zero_bubble(rank: int, p: int, m: int, v: int) -> Phases:
    """1F1B whose gradients of weights wait, so that they fill the bubble at the end.

    Rank r has the gradients of r microbatches wait: with one chunk all hold as much as the first.
    """
    warmup = p - rank - 1 if v == 1 else _warmup_of_interleaved(rank, p, v)
    yield warmup, "F"
    yield rank, "F I"
    yield m * v - warmup - rank, "F I W"
    yield warmup, "I W"
    yield rank, "W"


def zbv(rank: int, p: int, m: int, v: int) -> Phases:
    """Chunks in the form of a V: the first rank has the first and the last stage."""
    yield 2 * (p - rank) - 1, "F0"
    yield rank, "F1 F0"
    yield p - rank, "F1 I1 W"
    yield m - 2 * p + rank + 1, "F0 I0 W F1 I1 W"
    yield p - rank - 1, "I0 W F1 I1 W"
    yield rank, "I0 I1"
    yield p - rank, "I0 W"
    yield 2 * rank, "W"


def dualpipev(rank: int, p: int, m: int, v: int) -> Phases:
    """As zbv, in pairs of a forward and a backward that a GPU may run at once.

    The backwards of the pairs are whole: B, not I and W.
    """
    after = p - rank - 1
    yield 2 * after, "F0"
    yield rank + 1, "F0 F1"
    yield after, "I1 W F1"
    yield m - 2 * p + rank + 1, "F0 B1 F1 B0"
    yield after, "B1 F1 B0"
    whole = (rank + 1) // 2
    yield whole, "B1 B0"
    if rank % 2 == 0:
        yield 1, "B1 I0"
    yield (rank + 1) // 2, "I1 I0"
    yield after, "W I0"
    yield rank + 1, "W"


def _warmup_of_interleaved(rank: int, p: int, v: int) -> int:
    """Return the forwards of a rank before its first backward, of all chunks."""
    return 2 * (p - rank - 1) + (v - 1) * p


class ScheduleKind(NamedTuple):
    """A schedule.

    Attributes:
        phases: of one rank.
        chunks: stages a rank; None where the strategy says it.
        is_v: the chunks lie in the form of a V, not in p after p.
        fewest: for how many microbatches a rank it is written.
    """

    phases: Callable[[int, int, int, int], Phases]
    chunks: int | None = 1
    is_v: bool = False
    fewest: int = 1


KINDS: Final = {
    "naive": ScheduleKind(naive),
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_f_one_b),
    "interleaved": ScheduleKind(interleaved, chunks=None, fewest=2),
    "zb": ScheduleKind(zero_bubble, chunks=None, fewest=2),
    "zbv": ScheduleKind(zbv, chunks=2, is_v=True, fewest=2),
    "dualpipev": ScheduleKind(dualpipev, chunks=2, is_v=True, fewest=2),
}
"""Kind of pp in a strategy -> its schedule."""


def build_schedule(kind: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Return the schedule of a kind of pp.

    A schedule of fewer microbatches than it is written for, or of a number that the ranks do not
    divide, is the schedule of more of them, without the actions of the microbatches above.

    Args:
        kind: one of KINDS.
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        chunks: v, stages a rank, of kinds that leave it open.
    """
    p, of = num_ranks, KINDS[kind]
    v = of.chunks or chunks
    rank_of = [*range(p), *reversed(range(p))] if of.is_v else [*range(p)] * v
    most = -(-max(num_microbatches, of.fewest * p) // p) * p
    orders: list[tuple[Action, ...]] = []
    for rank in range(p):
        stages = [stage for stage, other in enumerate(rank_of) if other == rank]
        orders.append(tuple(_unrolled(of.phases(rank, p, most, v), stages, p)))
    schedule = Schedule(kind, tuple(rank_of), tuple(orders), most)
    return with_microbatches(schedule, num_microbatches)


def with_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return the schedule of fewer microbatches: without the actions of those above.

    Raises:
        StrategyError: it has not as many.
    """
    if num_microbatches > schedule.num_microbatches:
        raise StrategyError(
            f"schedule {schedule.kind}: a step has {num_microbatches} microbatches; the most that "
            f"it is written for are {schedule.num_microbatches}"
        )

    def fewer(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in order if action.microbatch < num_microbatches)

    orders, written = tuple(map(fewer, schedule.orders)), tuple(map(fewer, schedule.written))
    return Schedule(schedule.kind, schedule.rank_of, orders, num_microbatches, written)


def with_whole_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with B for each I, and nothing for W."""

    def whole(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(a._replace(op="B") if a.op == "I" else a for a in order if a.op != "W")

    orders, written = tuple(map(whole, schedule.orders)), tuple(map(whole, schedule.written))
    return dataclasses.replace(schedule, orders=orders, written=written)


def _unrolled(phases: Iterable[tuple[int, str]], stages: list[int], p: int) -> Iterator[Action]:
    """Yield the actions that a rank's phases stand for."""
    done: Counter[str] = Counter()
    due: deque[tuple[int, int]] = deque()
    for times, words in phases:
        for word in words.split() * times:
            op = word[0]
            if op == "W":
                yield Action("W", *due.popleft())
                continue
            counted = word.replace("I", "B")
            number = done[counted]
            done[counted] += 1
            at = (stages[int(word[1])], number) if word[1:] else _turn(op, number, stages, p)
            if op == "I":
                due.append(at)
            yield Action(op, *at)  # pyright: ignore[reportArgumentType]


def _turn(op: str, number: int, stages: list[int], p: int) -> tuple[int, int]:
    """Return stage and microbatch of a rank's action where the chunks take turns.

    Groups of p microbatches pass one chunk after the other; backward from the last chunk.
    """
    group, at = divmod(number, p * len(stages))
    chunk, microbatch = divmod(at, p)
    return stages[chunk if op == "F" else -1 - chunk], group * p + microbatch
