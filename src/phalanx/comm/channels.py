"""Words by which the ranks of one host say to each other where data lies, and that it is read.

Each rank writes words of its own alone, and others read them: no word has two writers. The writes
of a core are seen in the order in which it makes them, on x86-64; other processors do not promise
that (`IS_SUPPORTED`).

    sleeps 1 or 0                          this rank sleeps, or is about to
    post   number, offset, bytes, what     call `number` of this rank, whose data lies at offset
    ack    number                          call `number` of that rank has been read, or written to

A channel is a row of calls: one to all ranks, and one to each for messages. A rank posts call n on
a channel in slot n mod `SLOTS`, once all have acknowledged the call that was there before.

A rank that waits looks for `SPIN_S`, and then sleeps in the kernel until the word that it waits for
is written (futex), so that the core is free for the rank that writes the word. Who writes a word
wakes the ranks that say they sleep. It must not look for them before its word is seen: the lock
that it takes in between makes its core write first. The kernel looks at the word once more before
it lets a rank sleep, so one of the two sees the other.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from phalanx.comm.heap import Heap, Mapped
from phalanx.errors import PeerLost, named

IS_SUPPORTED: Final = (
    sys.platform == "linux"
    and platform.machine() == "x86_64"
    and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
)
"""Whether writes are seen in order here, and this Python knows anonymous files and processes.

A Python that was built on an old system lacks the latter two.
"""

SLOTS: Final = 16
"""Calls of a channel that some rank may not have acknowledged yet."""

SPIN_S: Final = 20e-6
"""How long a rank looks before it sleeps, in seconds; to sleep and wake costs as much."""

TICK_S: Final = 0.25
"""How often a rank that sleeps looks whether the others live, in seconds."""

_POST_WORDS: Final = 4
_FUTEX: Final = 202
_WAIT, _WAKE = 0, 1


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Post(NamedTuple):
    """Where the data of a call lies, and what the call is."""

    offset: int
    num_bytes: int
    what: int


@dataclass(frozen=True)
class SharedRank:
    """A rank of the group.

    Attributes:
        rank: in the job.
        process: its number.
        memory: its heap.
        first: its word that says whether it sleeps; its posts and acknowledgements follow.
    """

    rank: int
    process: int
    memory: Mapped
    first: int


@dataclass(frozen=True)
class AwaitedWord:
    """A word that a rank waits for: of `member`, at `index`, to be `number`."""

    member: SharedRank
    index: int
    number: int

    def is_met(self) -> bool:
        """Return whether the word is there."""
        return self.member.memory.words[self.index] >= self.number


def num_words(num_ranks: int) -> int:
    """Return the words of one rank in a group."""
    return 1 + SLOTS * (_POST_WORDS * (1 + num_ranks) + 2 * num_ranks)


class Channels:
    """The words of a group, as this rank writes and reads them.

    A channel is `None` to all, or the number in the group of who gets a message.
    """

    def __init__(
        self, members: Sequence[SharedRank], coord: int, timeout_s: Callable[[], float]
    ) -> None:
        """Begin with no call; the words of all ranks are zero.

        A rank waits `timeout_s()` for another.
        """
        self.members = list(members)
        self.coord = coord
        self._me = members[coord]
        self._timeout_s = timeout_s
        self._acks = 1 + _POST_WORDS * SLOTS * (1 + len(members))
        self._fence = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _post_index(self, member: SharedRank, channel: int | None, number: int) -> int:
        row = 0 if channel is None else 1 + channel
        return member.first + 1 + _POST_WORDS * (SLOTS * row + number % SLOTS)

    def _ack_index(self, member: SharedRank, of: int, channel: int | None, number: int) -> int:
        row = 2 * of + (channel is not None)
        return member.first + self._acks + SLOTS * row + number % SLOTS

    def post(self, channel: int | None, number: int, post: Post) -> None:
        """Say where this rank's data of a call lies."""
        words, index = self._me.memory.words, self._post_index(self._me, channel, number)
        words[index + 1], words[index + 2], words[index + 3] = post
        words[index] = number
        self._wake(index, self.members)

    def ack(self, of: int, channel: int | None, number: int) -> None:
        """Acknowledge that a call of a rank has been read, or written to."""
        index = self._ack_index(self._me, of, channel, number)
        self._me.memory.words[index] = number
        self._wake(index, [self.members[of]])

    def posted(self, by: int, channel: int | None, number: int) -> AwaitedWord:
        """Return the need for the post of a rank."""
        member = self.members[by]
        return AwaitedWord(member, self._post_index(member, channel, number), number)

    def acked(self, by: int, channel: int | None, number: int) -> AwaitedWord:
        """Return the need for the acknowledgement by a rank of this one's call."""
        member = self.members[by]
        return AwaitedWord(member, self._ack_index(member, self.coord, channel, number), number)

    def read(self, by: int, channel: int | None, number: int) -> Post:
        """Return a post that is there."""
        member = self.members[by]
        index = self._post_index(member, channel, number)
        return Post(*member.memory.words[index + 1 : index + _POST_WORDS])

    def _wake(self, index: int, readers: Sequence[SharedRank]) -> None:
        """Wake the readers of a word of this rank that sleep."""
        with self._fence:
            pass
        if any(reader.memory.words[reader.first] for reader in readers):
            address, all_of_them = _address(self._me, index), len(self.members)
            self._libc.syscall(_FUTEX, address, _WAKE, all_of_them, None, None, 0)

    def sleep(self, need: AwaitedWord, begun_s: float, limit_s: float = TICK_S) -> None:
        """Return when a need is met, or after a while.

        Raises:
            PeerLost: the rank has ended, or has not come since `begun_s` for the timeout.
        """
        until_s = time.monotonic() + SPIN_S
        while time.monotonic() < until_s:
            if need.is_met():
                return
        words, index = need.member.memory.words, need.index
        seen = words[index]
        if seen >= need.number:
            return
        limit, mine = _Time(0, int(limit_s * 1e9)), self._me
        mine.memory.words[mine.first] = 1
        try:
            self._libc.syscall(
                _FUTEX, _address(need.member, index), _WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF),
                ctypes.byref(limit), None, 0,
            )  # fmt: skip
        finally:
            mine.memory.words[mine.first] = 0
        if not need.is_met():
            self._refuse_lost(need, time.monotonic() - begun_s)

    def _refuse_lost(self, need: AwaitedWord, waited_s: float) -> None:
        member = need.member
        who = f"{named([member.rank])} (process {member.process})"
        vain = f"{named([self._me.rank])} has waited in vain for another rank"
        if has_ended(member.process) and not need.is_met():
            raise PeerLost(f"{who} has ended; {vain}")
        if waited_s > self._timeout_s():
            raise PeerLost(f"{who} has not been heard of for {waited_s:.0f} s; {vain}")


def _address(member: SharedRank, index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(member.memory.address + 8 * index)


def has_ended(process: int) -> bool:
    """Return whether a process of this host has ended, be it waited for or not."""
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:  # a sandbox does not allow to ask
        return False
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(file)


def reserve(heap: Heap, num_ranks: int) -> tuple[int, object]:
    """Return the first word of this rank in a group, all zero, and what keeps them."""
    block = heap.block(8 * num_words(num_ranks))
    block[:] = 0
    return (block.ctypes.data - heap.address) // 8, block
