"""What NCCL does with the calls of all ranks, from their records alone: no GPU, no clock, no luck.

The rules, of groups whose communicators are made at once (a device is named when the job joins):

    queues      a rank runs the calls of one group one after the other, in the order in which it
                makes them: point-to-point calls and collectives alike. Groups run side by side.
    rendezvous  nothing is buffered: a send ends when its receive runs too, and so the reverse. A
                collective ends when all ranks of the group run it.
    batches     the sends and receives of one batch run side by side.
    connecting  the first message of one rank to another in a group holds both processes up, not
                their queues alone, until both have called.
    waits       what a rank calls after a wait begins once what it waited for has ended.
    matching    what meets must be alike in kind, data type and sizes: NCCL does not compare, it
                computes garbage or stands still. It matches by order alone and knows no tags.

The queues of a rank see nothing of those of another but what they meet with. So whatever runs first
where several calls can run, the end is the same: one simulation tells for all timings.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.debug.fingerprint import Fingerprint, difference, pair_difference


@dataclass(frozen=True)
class Message:
    """A send or a receive.

    Attributes:
        peer: global rank of the other side.
    """

    is_send: bool
    peer: int
    what: Fingerprint


@dataclass(frozen=True)
class Call:
    """One call on one group: messages of a batch or alone, or else a collective.

    Attributes:
        number: of the call on its rank.
        ranks: global ranks of the group.
        messages: empty for a collective.
        what: the first message, or the collective.
    """

    number: int
    group: str
    ranks: tuple[int, ...]
    what: Fingerprint
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Wait:
    """A rank waits for one of its calls."""

    number: int


Event = Call | Wait


class Broken(AssertionError):
    """The calls of the ranks break a rule of NCCL."""


@dataclass
class _Rank:
    """How far a rank is.

    Attributes:
        at: how many of its events have begun or passed.
        queues: of each group, calls that have not ended.
        left: messages of the calls at the heads of queues that have not met theirs.
        ended: numbers of calls.
    """

    events: Sequence[Event]
    at: int = 0
    queues: dict[str, deque[Call]] = field(default_factory=lambda: defaultdict(deque))
    left: dict[int, list[Message]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @property
    def next(self) -> Event | None:
        """What it comes to; None at the end."""
        return self.events[self.at] if self.at < len(self.events) else None

    def head(self, group: str) -> Call | None:
        """Return what runs on a group."""
        queue = self.queues[group]
        return queue[0] if queue else None

    def end(self, call: Call) -> None:
        """End what runs on a group."""
        assert self.queues[call.group].popleft() is call
        self.ended.add(call.number)


def check(events: Sequence[Sequence[Event]]) -> None:
    """Run the events of all ranks, by rank, as NCCL does.

    Raises:
        Broken: they do not end, or ranks call unlike things; names the calls.
    """
    _Simulation([_Rank(each) for each in events]).run()


class _Simulation:
    def __init__(self, ranks: list[_Rank]) -> None:
        self._ranks = ranks
        self._connected: set[tuple[str, int, int]] = set()

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: there is none.
        """
        while any([self._advance(rank) for rank in range(len(self._ranks))]):
            pass
        if any(rank.next or any(rank.queues.values()) for rank in self._ranks):
            raise Broken(self._told())
        unawaited = [
            f"{_named(number, call)} is never waited for"
            for number, rank in enumerate(self._ranks)
            for call in _unawaited(rank.events)
        ]
        if unawaited:
            raise Broken("\n".join(unawaited))

    def _advance(self, number: int) -> bool:
        """Let a rank go as far as it can; return whether it moved, or a call of it ended."""
        rank, has_moved = self._ranks[number], False
        while (event := rank.next) is not None:
            if isinstance(event, Wait):
                if event.number not in rank.ended:
                    break
            else:
                if event.number not in rank.left:  # it is called now
                    rank.queues[event.group].append(event)
                    rank.left[event.number] = list(event.messages)
                    has_moved = True
                self._settle(number, event.group)
                if not self._is_connected(number, event):
                    break
            rank.at += 1
            has_moved = True
        for group in list(rank.queues):
            has_moved |= self._settle(number, group)
        return has_moved

    def _is_connected(self, number: int, call: Call) -> bool:
        """Tell whether the peers of a call's messages have called too, or ever have before."""
        is_connected = True
        for message in call.messages:
            line = _line(number, call.group, message)
            if line in self._connected:
                continue
            peer = self._ranks[message.peer]
            have_called = {
                _line(message.peer, call.group, other)
                for queued in peer.queues[call.group]
                for other in queued.messages
            }
            if line in have_called:
                self._connected.add(line)
            else:
                is_connected = False
        return is_connected

    def _settle(self, number: int, group: str) -> bool:
        """End what a rank runs on a group, if it meets what it needs; return whether it did."""
        call = self._ranks[number].head(group)
        if call is None:
            return False
        return self._meet(call) if not call.messages else self._exchange(number, call)

    def _meet(self, call: Call) -> bool:
        heads = {rank: self._ranks[rank].head(call.group) for rank in call.ranks}
        if any(head is None or head.messages for head in heads.values()):
            return False
        found = {rank: head.what for rank, head in heads.items() if head is not None}
        if unlike := difference(found, lambda _: False):
            one, other, what = unlike
            raise Broken(
                f"ranks {one} and {other} differ in the {what}\n"
                f"{_told(one, found[one])}\n{_told(other, found[other])}"
            )
        for rank, head in heads.items():
            assert head is not None
            self._ranks[rank].end(head)
        return True

    def _exchange(self, number: int, call: Call) -> bool:
        has_met, mine = False, self._ranks[number].left[call.number]
        for message in list(mine):
            other = self._ranks[message.peer].head(call.group)
            if other is None:
                continue
            theirs = self._ranks[message.peer].left[other.number]
            line = _line(number, call.group, message)
            of_line = [m for m in theirs if m.is_send != message.is_send]
            found = next((m for m in of_line if _line(message.peer, call.group, m) == line), None)
            if found is None:
                continue
            if what := pair_difference(message.what, found.what):
                raise Broken(
                    f"a message of ranks {number} and {message.peer} differs in the {what}\n"
                    f"{_told(number, message.what)}\n{_told(message.peer, found.what)}"
                )
            self._connected.add(line)
            mine.remove(message)
            theirs.remove(found)
            if not theirs:
                self._ranks[message.peer].end(other)
            has_met = True
        if not mine:
            self._ranks[number].end(call)
        return has_met

    def _told(self) -> str:
        """Say where each rank stands that does not end."""
        lines = ["deadlock:"]
        for number, rank in enumerate(self._ranks):
            runs = [queue[0] for queue in rank.queues.values() if queue]
            lines += [f"{_named(number, call)} runs, and does not end" for call in runs]
            event = rank.next
            if isinstance(event, Wait):
                call = next(
                    c for c in rank.events if isinstance(c, Call) and c.number == event.number
                )
                if call not in runs:
                    lines.append(f"{_named(number, call)} is behind it, and waited for")
            elif event is not None and event not in runs:
                lines.append(f"{_named(number, event)} is behind it, and connects")
        return "\n".join(lines)


def _unawaited(events: Sequence[Event]) -> list[Call]:
    awaited = {event.number for event in events if isinstance(event, Wait)}
    return [e for e in events if isinstance(e, Call) and e.number not in awaited]


def _line(number: int, group: str, message: Message) -> tuple[str, int, int]:
    """Return group, sender and receiver of a rank's message."""
    ends = (number, message.peer) if message.is_send else (message.peer, number)
    return group, *ends


def _named(number: int, call: Call) -> str:
    ends = ", ".join(f"{'to' if m.is_send else 'from'} rank {m.peer} " for m in call.messages)
    return f"{_told(number, call.what)} {ends}on group {call.group}"


def _told(number: int, what: Fingerprint) -> str:
    return f"rank {number}: {what} at {' from '.join(what.places)}"
