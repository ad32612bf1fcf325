"""Validate a pipeline schedule, and compute its timeline from the durations of actions; no torch.

Both run the lists of all ranks (lowering.py). Messages take no time: a compute begins when its rank
is free and its inputs have been computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.lowering import (
    COMPUTES,
    RECEIVES,
    SEND_WAITS,
    SENDS,
    lower,
    messages_of,
    other_end,
    other_stage,
    receive_before,
)
from phalanx.parallel.pipeline.schedule import Action, Op, Schedule

UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Default durations of computes: a full backward takes twice as long as a forward."""


class Span(NamedTuple):
    """An action with its begin and end, in the unit of its duration."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The begin and end of all computes of a step.

    Attributes:
        lanes: rank -> spans of its computes, in order.
    """

    lanes: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """Duration from the begin of the first compute, at 0, to the end of the last."""
        return max(span.end for lane in self.lanes for span in lane)

    @property
    def bubble(self) -> float:
        """Fraction of the time of all ranks in which they are idle, from 0 to 1."""
        busy = sum(span.end - span.begin for lane in self.lanes for span in lane)
        return 1 - busy / (self.length * len(self.lanes))


def simulate(schedule: Schedule, cost: Callable[[Action], float] | None = None) -> Timeline:
    """Return the timeline of a schedule whose computes take `cost(action)`, by default UNITS.

    The ranks run their lists under the rules of NCCL. Messages from one rank to another use one
    queue in the order of the calls, and a send and its receive end when both have begun. The first
    message of a queue blocks both ranks until then. A receive of an activation waits for a header,
    and so blocks its rank until the send has begun. Lists that end under these rules also end with
    gloo.

    Raises:
        StrategyError: the schedule is invalid, see `check_complete`; a message is sent and not
            received, or the reverse; or the ranks deadlock, where the error names the action that
            each rank waits for.
    """
    check_complete(schedule)
    # A schedule file may lack a send or a receive, repeat one, or have one that nobody needs.
    for rank, listed in enumerate(schedule.written):
        expected = Counter(m for a in schedule.orders[rank] for m in messages_of(schedule, a))
        written = Counter(action for action in listed if action.op in SENDS + RECEIVES)
        for message in (expected - written) + (written - expected):
            raise StrategyError(
                f"schedule {schedule.kind}: rank {rank} has {message} {written[message]} times; "
                f"expected {expected[message]}"
            )
    return _Simulation(schedule, cost or (lambda action: UNITS[action.op])).run()


class _Simulation:
    """The state of a simulation: the remaining actions of each rank, and the queues."""

    def __init__(self, schedule: Schedule, cost: Callable[[Action], float]) -> None:
        self._schedule, self._cost = schedule, cost
        ranks = range(len(schedule.orders))
        self._left = [list(reversed(lower(schedule, rank))) for rank in ranks]
        self._lanes: list[list[Span]] = [[] for _ in ranks]
        # Compute -> its end; send or receive -> its begin.
        self._times: dict[Action, float] = {}
        # (sender, receiver) -> receives that match the sends begun, and receives begun.
        self._sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self._received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)

    def run(self) -> Timeline:
        """Run all lists to their ends, and return the timeline."""
        # A list and no generator: `any` would stop at the first rank that makes progress.
        while any([self._advance(rank) for rank in range(len(self._left))]):
            pass
        waits = ", ".join(
            f"rank {rank} waits at {left[-1]} for {next(self._awaited(left[-1]))}"
            for rank, left in enumerate(self._left)
            if left
        )
        if waits:
            raise StrategyError(f"schedule {self._schedule.kind}: its ranks deadlock: {waits}")
        return Timeline(tuple(map(tuple, self._lanes)))

    def _advance(self, rank: int) -> bool:
        """Run a rank until an action must wait; return whether any progress was made."""
        left, has_moved = self._left[rank], False
        while left:
            action = left[-1]
            if action.op in SENDS + RECEIVES and action not in self._times:
                has_moved |= self._begin(rank, action)
            if any(True for _ in self._awaited(action)):
                break
            left.pop()
            has_moved = True
            if action.op in COMPUTES:
                begin = max([self._clock(rank), *(self._times[n] for n in self._needs(action))])
                self._times[action] = begin + self._cost(action)
                self._lanes[rank].append(Span(action, begin, self._times[action]))
        return has_moved

    def _clock(self, rank: int) -> float:
        lane = self._lanes[rank]
        return lane[-1].end if lane else 0.0

    def _begin(self, rank: int, message: Action) -> bool:
        """Put a message into its queue; return False for a send whose tensor is not computed."""
        if any(need not in self._times for need in self._needs(message)):
            return False
        self._times[message] = self._clock(rank)
        line = self._line(message)
        mine, other = self._sent[line], self._received[line]
        mine.append(other_end(message)) if message.op in SENDS else other.append(message)
        # A queue matches by order alone: the n-th send to the n-th receive. The pair that this
        # message completes is the last that both sides have.
        at = min(len(mine), len(other)) - 1
        if 0 <= at and mine[at] != other[at]:
            raise StrategyError(
                f"schedule {self._schedule.kind}: rank {line[1]} begins {other[at]} where rank "
                f"{line[0]} has sent {other_end(mine[at])}; expected receives in the order of the "
                "sends"
            )
        return True

    def _line(self, message: Action) -> tuple[int, int]:
        """Return the ranks (sender, receiver) of a message."""
        rank_of = self._schedule.rank_of
        ends = rank_of[message.stage], rank_of[other_stage(message)]
        return ends if message.op not in RECEIVES else (ends[1], ends[0])

    def _maker(self, send: Action) -> Action:
        """Return the compute that produces the tensor of a send."""
        if send.op == "SEND_F":
            return send._replace(op="F")
        half = send._replace(op="I")
        return half if half in self._times else send._replace(op="B")

    def _needs(self, action: Action) -> Iterator[Action]:
        """Yield the computes that must have ended, and the messages begun, before `action` begins.

        A receive needs none.
        """
        if action.op in SENDS:
            yield self._maker(action)
        if action.op == "W":
            yield action._replace(op="I")
        if action.op in ("B", "I"):
            yield action._replace(op="F")
        receive = receive_before(action, self._schedule.num_stages - 1)
        if receive is not None:
            sender, receiver = self._line(receive)
            send = other_end(receive)
            yield from (self._maker(send),) if sender == receiver else (receive, send)

    def _awaited(self, action: Action) -> Iterator[Action]:
        """Yield the actions that a rank waits for at `action`; none if it can continue."""
        yield from (need for need in self._needs(action) if need not in self._times)
        if action.op in SENDS + RECEIVES:
            line = self._line(action)
            # NCCL connects two ranks at their first message, which needs both; later sends only
            # enqueue.
            is_first = not (self._sent[line] and self._received[line])
            if (is_first or action.op == "RECV_F") and other_end(action) not in self._times:
                yield other_end(action)
        if action.op in SEND_WAITS and other_end(action) not in self._times:
            yield other_end(action)


def check_complete(schedule: Schedule) -> None:
    """Refuse a schedule in which a compute is missing, repeated or on the wrong rank."""
    counts = Counter(action for order in schedule.orders for action in order)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if schedule.rank_of[action.stage] != rank:
                raise StrategyError(
                    f"schedule {schedule.kind}: {action} is on rank {rank}; stage {action.stage} "
                    f"is on rank {schedule.rank_of[action.stage]}"
                )
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            ops: tuple[Op, ...] = ("F", "B", "I", "W")
            count = {op: counts.pop(Action(op, stage, microbatch), 0) for op in ops}
            if (*count.values(),) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                counted = ", ".join(f"{number} {op}" for op, number in count.items())
                raise StrategyError(
                    f"schedule {schedule.kind}: microbatch {microbatch} has {counted} in stage "
                    f"{stage}; expected 1 F, and 1 B or 1 I and 1 W"
                )
    if counts:
        raise StrategyError(
            f"schedule {schedule.kind}: {next(iter(counts))} has a stage or microbatch out of range"
        )


def most_in_flight(schedule: Schedule) -> list[int]:
    """Return, for each rank, the peak number of forwards whose activations it holds.

    The activations of one stage for one microbatch count as 1, so a rank with v chunks may count
    one microbatch v times.
    """
    most: list[int] = []
    for order in schedule.orders:
        held, peak = 0, 0
        for action in order:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.op]
            peak = max(peak, held)
        most.append(peak)
    return most
