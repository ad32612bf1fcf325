"""Pipeline schedules as data: the actions of each rank, in order. This module does not use torch.

The layers of a model are cut into stages. A microbatch passes all stages: forward from the first to
the last, backward from the last to the first. Each of p ranks has v stages, called its chunks. A
schedule has a list of actions for each rank:

    F   forward of one microbatch through one stage
    B   its backward: the gradients of the input and of the weights
    I   the part of B that the previous stage waits for: the gradient of the input
    W   the part of B that no other stage waits for: the gradients of the weights

Below, a rank's list is written as phases: a number of repetitions, and actions. `F I W` means one
forward, the gradient of one input, and the oldest pending gradients of weights; `F1` is a forward
of the second chunk. Each kind of action counts its microbatches from 0, for each chunk. lowering.py
adds sends, receives and reductions to the lists, simulate.py validates them, runtime.py runs them.

naive          one microbatch at a time: plain inter-layer model parallelism
gpipe          Huang et al. 2019, arXiv 1811.06965
1f1b           Narayanan et al. 2021, arXiv 2006.09503 (PipeDream-Flush)
interleaved/v  Narayanan et al. 2021, arXiv 2104.04473, section 2.2
zb/v           Qi et al. 2023, arXiv 2401.10241: ZB-H1; with v > 1 in the order of interleaved
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
"""Operation: a compute, a message or the reduction of gradients; see lowering.py."""


class Action(NamedTuple):
    """One operation on one microbatch in one stage; its text form is, for example, `2F0`."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The rank of each stage, and the actions of each rank.

    Attributes:
        kind: name of the kind in a strategy, or the path of the schedule file.
        rank_of: stage -> rank.
        orders: rank -> its computes, in order.
        num_microbatches: microbatches of one step.
        written: rank -> its actions with sends and receives, if a schedule file lists them; else
            empty.
    """

    kind: str
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    written: tuple[tuple[Action, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages (chunks) of a rank, in the order of the model."""
        return tuple(stage for stage, of in enumerate(self.rank_of) if of == rank)


Phases = Iterator[tuple[int, str]]
"""Number of repetitions and actions of each phase, such as `(3, "F")` or `(2, "F0 F1")`."""


def naive(rank: int, p: int, m: int, v: int) -> Phases:
    """Each microbatch passes all stages, there and back, before the next begins."""
    yield m, "F B"


def gpipe(rank: int, p: int, m: int, v: int) -> Phases:
    """All forwards, then all backwards. It holds all m microbatches."""
    # p = 3, m = 3; a backward B takes two units of time:
    #
    #   rank 0   F0 F1 F2                   B0 -- B1 -- B2 --
    #   rank 1      F0 F1 F2          B0 -- B1 -- B2 --
    #   rank 2         F0 F1 F2 B0 -- B1 -- B2 --
    yield m, "F"
    yield m, "B"


def one_f_one_b(rank: int, p: int, m: int, v: int) -> Phases:
    """A backward as soon as there is one. Rank r holds p - r microbatches."""
    # p = 3, m = 4. Rank r begins with p - r - 1 forwards, so that its first backward follows the
    # forward after them at once:
    #
    #   rank 0   F0 F1 F2             B0 -- F3 B1 --    B2 --    B3 --
    #   rank 1      F0 F1       B0 -- F2 B1 -- F3 B2 --    B3 --
    #   rank 2         F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    warmup = p - rank - 1
    yield warmup, "F"
    yield m - warmup, "F B"
    yield warmup, "B"


def interleaved(rank: int, p: int, m: int, v: int) -> Phases:
    """1F1B over v chunks a rank: v times as many messages, 1/v of the bubble."""
    # p = 2, v = 2, m = 4. Chunks a of ranks 0 and 1 are stages 0 and 1, chunks b stages 2 and 3.
    # The forwards of microbatches 0 and 1 pass chunk a, then chunk b, before 2 and 3 enter; here a
    # backward takes as long as a forward:
    #
    #   rank 0   Fa0 Fa1 Fb0 Fb1 Fa2 Bb0 Fa3 Bb1 Fb2 Ba0 Fb3 Ba1     Bb2     Bb3 Ba2 Ba3
    #   rank 1       Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Fa2 Ba0 Fa3 Ba1 Fb2 Bb2 Fb3 Bb3 Ba2 Ba3
    warmup = _warmup_of_interleaved(rank, p, v)
    yield warmup, "F"
    yield m * v - warmup, "F B"
    yield warmup, "B"


def zero_bubble(rank: int, p: int, m: int, v: int) -> Phases:
    """1F1B whose gradients of weights wait, so that they fill the bubble at the end.

    Rank r has the gradients of r microbatches wait: with one chunk all hold as much as the first.
    """
    # p = 3, m = 6. Rank 2 ends with three W, at the time at which it idles in 1f1b:
    #
    #   rank 0   F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    #   rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    #   rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5
    warmup = p - rank - 1 if v == 1 else _warmup_of_interleaved(rank, p, v)
    yield warmup, "F"
    yield rank, "F I"
    yield m * v - warmup - rank, "F I W"
    yield warmup, "I W"
    yield rank, "W"


def zbv(rank: int, p: int, m: int, v: int) -> Phases:
    """Chunks in the form of a V: the first rank has the first and the last stage."""
    # p = 2, m = 4. Stages 0 and 3 are chunks a and b of rank 0, stages 1 and 2 of rank 1, so rank 0
    # begins the first backward as soon as it has computed the loss:
    #
    #   rank 0   Fa0 Fa1 Fa2 Fb0 Ib0 Wb0 Fb1 Ib1 Wb1 Fa3 Ia0 Wa0 Fb2 Ib2 Wb2 Ia1 Wa1 Fb3 ...
    #   rank 1       Fa0 Fb0 Fa1 Fb1 Ib0 Wb0 Fa2 Ia0 Wa0 Fb2 Ib1 Wb1 Fa3 Ia1 Wa1 Fb3 Ib2 ...
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
    # p = 2, m = 4, placed as in zbv; B takes two units. The pairs are F B next to each other, each
    # of another microbatch and chunk:
    #
    #   rank 0   Fa0 Fa1 Fa2 Fb0 Ib0 Wb0 Fb1 Fa3 Bb1 --- Fb2 Ba0 --- Bb2 --- Fb3     Ba1 --- ...
    #   rank 1       Fa0 Fb0 Fa1 Fb1 Fa2 Bb0 --- Fb2 Ba0 --- Fa3 Bb1 --- Fb3 Ba1 --- Bb2 --- ...
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
    """Return the number of warm-up forwards of a rank, over all chunks."""
    # Rank r runs v - 1 chunks of p microbatches ahead; then each rank after it adds two units to
    # the way of the first microbatch, one there and one back.
    return 2 * (p - rank - 1) + (v - 1) * p


class ScheduleKind(NamedTuple):
    """A kind of schedule.

    Attributes:
        phases: returns the phases of one rank, from rank, p, m and v.
        chunks: stages a rank; None if the strategy sets it.
        is_v: whether stages are placed in a V, ranks 0 to p - 1 and back; else ranks 0 to p - 1
            repeat.
        min_microbatches_per_rank: smallest number of microbatches, as a multiple of p, for which
            `phases` is valid.
        splits_backward: whether a backward is divided into I and W.
    """

    phases: Callable[[int, int, int, int], Phases]
    chunks: int | None = 1
    is_v: bool = False
    min_microbatches_per_rank: int = 1
    splits_backward: bool = False


KINDS: Final = {
    "naive": ScheduleKind(naive),
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_f_one_b),
    "interleaved": ScheduleKind(interleaved, chunks=None, min_microbatches_per_rank=2),
    "zb": ScheduleKind(zero_bubble, chunks=None, min_microbatches_per_rank=2, splits_backward=True),
    "zbv": ScheduleKind(
        zbv, chunks=2, is_v=True, min_microbatches_per_rank=2, splits_backward=True
    ),
    "dualpipev": ScheduleKind(
        dualpipev, chunks=2, is_v=True, min_microbatches_per_rank=2, splits_backward=True
    ),
}
"""Kind of pp in a strategy -> its kind of schedule."""


MOST_COMPUTES: Final = 1 << 18
"""Largest product of microbatches and stages; lists of a few stages are then made in seconds."""


def build_schedule(kind: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Return the schedule of a kind of pp.

    If m is below the minimum of the kind or not a multiple of p, the schedule is built for the next
    valid number of microbatches, and the actions of the surplus microbatches are removed.

    Args:
        kind: one of KINDS.
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        chunks: v, stages a rank, for kinds that do not fix v.

    Raises:
        StrategyError: the lists would be too long to build.
    """
    p, of = num_ranks, KINDS[kind]
    v = of.chunks or chunks
    rank_of = [*range(p), *reversed(range(p))] if of.is_v else [*range(p)] * v
    check_length(kind, len(rank_of), num_microbatches)
    # Phases hold only for a multiple of p microbatches: the surplus ones are built and then
    # dropped.
    most = -(-max(num_microbatches, of.min_microbatches_per_rank * p) // p) * p
    orders: list[tuple[Action, ...]] = []
    for rank in range(p):
        stages = [stage for stage, other in enumerate(rank_of) if other == rank]
        orders.append(tuple(_unrolled(of.phases(rank, p, most, v), stages, p)))
    schedule = Schedule(kind, tuple(rank_of), tuple(orders), most)
    return with_microbatches(schedule, num_microbatches)


def check_length(kind: str, num_stages: int, num_microbatches: int) -> None:
    """Raise StrategyError if the lists of a schedule would be too long to build."""
    if num_microbatches * num_stages > MOST_COMPUTES:
        raise StrategyError(
            f"schedule {kind}: a step has {num_microbatches:,} microbatches; the most with "
            f"{num_stages} stages are {MOST_COMPUTES // num_stages:,}; take larger microbatches"
        )


def with_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return the schedule cut to its first `num_microbatches` microbatches.

    Raises:
        StrategyError: the schedule has fewer microbatches.
    """
    if num_microbatches > schedule.num_microbatches:
        raise StrategyError(
            f"schedule {schedule.kind}: a step has {num_microbatches} microbatches; the schedule "
            f"is written for at most {schedule.num_microbatches}"
        )

    def fewer(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in order if action.microbatch < num_microbatches)

    orders, written = tuple(map(fewer, schedule.orders)), tuple(map(fewer, schedule.written))
    return Schedule(schedule.kind, schedule.rank_of, orders, num_microbatches, written)


def with_whole_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with a full backward B in place of each I, and without W."""

    def whole(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(a._replace(op="B") if a.op == "I" else a for a in order if a.op != "W")

    orders, written = tuple(map(whole, schedule.orders)), tuple(map(whole, schedule.written))
    return dataclasses.replace(schedule, orders=orders, written=written)


def _unrolled(phases: Iterable[tuple[int, str]], stages: list[int], p: int) -> Iterator[Action]:
    """Yield the actions of a rank's phases, with stages and microbatches."""
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
            if word[1:]:
                at = stages[int(word[1])], number
            else:
                # Interleaved: a group of p microbatches runs through one chunk, then through the
                # next; backward starts with the last chunk.
                group, turn = divmod(number, p * len(stages))
                chunk, microbatch = divmod(turn, p)
                at = stages[chunk if op == "F" else -1 - chunk], group * p + microbatch
            if op == "I":
                due.append(at)
            yield Action(op, *at)  # pyright: ignore[reportArgumentType]
