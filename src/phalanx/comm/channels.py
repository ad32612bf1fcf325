"""Shared-memory words by which ranks on one host announce data and acknowledge that they read it.

A rank writes only its own words, and the other ranks read them: no word has two writers. On x86-64
other cores see a core's writes in program order; other processors do not guarantee this
(`IS_SUPPORTED`).

    sleeps 1 or 0                          this rank sleeps, or is about to
    post   number, offset, bytes, what     call `number` of this rank; its data is at offset
    ack    number                          call `number` of a peer has been read, or written to
    free   number                          this rank uses a buffer no more for calls up to `number`

A channel is a sequence of calls: each rank has one channel to all ranks, and one to each rank for
messages. A rank posts call n of a channel in slot n mod `SLOTS`, after all readers have
acknowledged the previous call in that slot.

A waiting rank polls for `SPIN_S`, then sleeps in the kernel (futex) until the awaited word is
written, so that the core is free for the rank that writes it. The writer wakes the ranks whose
`sleeps` word is 1. It must read those words after its own write is visible: acquiring a lock in
between is a memory barrier. The kernel compares the awaited word again before it puts a rank to
sleep. So either the writer sees the sleeper, or the sleeper sees the write.
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
"""Whether this is Linux on x86-64, and this Python has `memfd_create` and `pidfd_open`.

Only x86-64 orders writes as needed; a Python built on an old system lacks the two functions.
"""

SLOTS: Final = 16
"""Most calls of a channel that may be unacknowledged at a time."""

NUM_BUFFERS: Final = 2
"""Buffers that the ranks of a group have in common, see gather_buffers.py."""

SPIN_S: Final = 20e-6
"""Time a rank polls before it sleeps, in seconds; sleeping and waking costs as much."""

TICK_S: Final = 0.25
"""Interval at which a sleeping rank checks whether the awaited rank is alive, in seconds."""

_POST_WORDS: Final = 4
_FUTEX: Final = 202
_WAIT, _WAKE = 0, 1


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Post(NamedTuple):
    """Heap offset and size of a call's data, and `what`, the encoded call (call_number.py)."""

    offset: int
    num_bytes: int
    what: int


@dataclass(frozen=True)
class SharedRank:
    """A rank of the group.

    Attributes:
        rank: global rank.
        process: process id.
        memory: the rank's heap.
        first: index of the rank's `sleeps` word; its posts and acknowledgements follow.
    """

    rank: int
    process: int
    memory: Mapped
    first: int


@dataclass(frozen=True)
class AwaitedWord:
    """A word to wait for: the word of `member` at `index` must be at least `number`."""

    member: SharedRank
    index: int
    number: int

    def is_met(self) -> bool:
        """Return whether the word has reached `number`."""
        return self.member.memory.words[self.index] >= self.number


def num_words(num_ranks: int) -> int:
    """Return the number of words that each rank of a group needs."""
    return 1 + SLOTS * (_POST_WORDS * (1 + num_ranks) + 2 * num_ranks) + NUM_BUFFERS


class Channels:
    """The words of a group, as this rank writes and reads them.

    A channel is None for calls to all ranks, or the group rank of the receiver of a message.
    """

    def __init__(
        self, members: Sequence[SharedRank], coord: int, timeout_s: Callable[[], float]
    ) -> None:
        """Use the words of `members`, which must all be zero, as group rank `coord`.

        A wait for another rank times out after `timeout_s()` seconds.
        """
        self.members = list(members)
        self.coord = coord
        self._me = members[coord]
        self._timeout_s = timeout_s
        self._acks = 1 + _POST_WORDS * SLOTS * (1 + len(members))
        self._free = self._acks + 2 * SLOTS * len(members)
        self._fence = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _post_index(self, member: SharedRank, channel: int | None, number: int) -> int:
        row = 0 if channel is None else 1 + channel
        return member.first + 1 + _POST_WORDS * (SLOTS * row + number % SLOTS)

    def _ack_index(self, member: SharedRank, of: int, channel: int | None, number: int) -> int:
        row = 2 * of + (channel is not None)
        return member.first + self._acks + SLOTS * row + number % SLOTS

    def post(self, channel: int | None, number: int, post: Post) -> None:
        """Announce where this rank's data for a call is stored, and wake sleeping readers."""
        words, index = self._me.memory.words, self._post_index(self._me, channel, number)
        # The number last: a reader that sees the number must also see the three words it announces.
        words[index + 1], words[index + 2], words[index + 3] = post
        words[index] = number
        self._wake(index, self.members)

    def ack(self, of: int, channel: int | None, number: int) -> None:
        """Acknowledge that this rank has read, or written to, the data of a call by rank `of`."""
        index = self._ack_index(self._me, of, channel, number)
        self._me.memory.words[index] = number
        self._wake(index, [self.members[of]])

    def release(self, buffer: int, number: int) -> None:
        """Announce that this rank uses a buffer no more for calls up to `number`."""
        self._me.memory.words[self._me.first + self._free + buffer] = number

    def is_released(self, buffer: int, number: int) -> bool:
        """Return whether all ranks have released a buffer for calls up to `number`."""
        at = self._free + buffer
        return all(each.memory.words[each.first + at] >= number for each in self.members)

    def posted(self, by: int, channel: int | None, number: int) -> AwaitedWord:
        """Return the word to wait for until rank `by` has posted a call."""
        member = self.members[by]
        return AwaitedWord(member, self._post_index(member, channel, number), number)

    def acked(self, by: int, channel: int | None, number: int) -> AwaitedWord:
        """Return the word to wait for until rank `by` has acknowledged a call of this rank."""
        member = self.members[by]
        return AwaitedWord(member, self._ack_index(member, self.coord, channel, number), number)

    def is_own(self, word: AwaitedWord) -> bool:
        """Return whether this rank itself writes the word."""
        return word.member is self._me

    def read(self, by: int, channel: int | None, number: int) -> Post:
        """Return a call that rank `by` has posted."""
        member = self.members[by]
        index = self._post_index(member, channel, number)
        return Post(*member.memory.words[index + 1 : index + _POST_WORDS])

    def _wake(self, index: int, readers: Sequence[SharedRank]) -> None:
        """Wake the sleeping readers of a word of this rank."""
        #   writer                           sleeper
        #   1 writes the word                1 sets `sleeps`
        #   2 barrier: acquires a lock       2 the kernel compares the word, sleeps if unchanged
        #   3 reads `sleeps`, wakes if 1
        #
        # If 3 reads 0, then 1 of the sleeper comes later than 1 of the writer, and 2 sees the new
        # word. Without the barrier the processor may run 3 before 1, and the sleeper would miss the
        # write.
        with self._fence:
            pass
        if any(reader.memory.words[reader.first] for reader in readers):
            address, all_of_them = _address(self._me, index), len(self.members)
            self._libc.syscall(_FUTEX, address, _WAKE, all_of_them, None, None, 0)

    def sleep(self, need: AwaitedWord, begun_s: float, limit_s: float = TICK_S) -> None:
        """Return when the awaited word is written, or after `limit_s`.

        Raises:
            PeerLost: the process has ended, or the timeout has passed since `begun_s`.
        """
        until_s = time.monotonic() + SPIN_S
        while time.monotonic() < until_s:
            if need.is_met():
                return
        words, index = need.member.memory.words, need.index
        seen = words[index]
        if seen >= need.number:
            return
        # A futex is 32 bits wide: the low half of the word, which comes first on x86-64.
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
            member, waited_s = need.member, time.monotonic() - begun_s
            who = f"{named([member.rank])} (process {member.process})"
            vain = f"{named([self._me.rank])} has waited in vain for another rank"
            # A peer may write the word and then end, so the word is read once more after its end is
            # seen.
            if has_ended(member.process) and not need.is_met():
                raise PeerLost(f"{who} has ended; {vain}")
            if waited_s > self._timeout_s():
                raise PeerLost(f"{who} has not answered for {waited_s:.0f} s; {vain}")


def _address(member: SharedRank, index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(member.memory.address + 8 * index)


def has_ended(process: int) -> bool:
    """Return whether a process of this host has ended, including a zombie."""
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:  # a sandbox may forbid pidfd_open
        return False
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(file)


def reserve(heap: Heap, num_ranks: int) -> tuple[int, object]:
    """Allocate a rank's zeroed words; return the index of the first, and the block to keep."""
    block = heap.block(8 * num_words(num_ranks))
    block[:] = 0
    return (block.ctypes.data - heap.address) // 8, block
