"""Outputs of all-gathers that the ranks of a group have in common, so that nothing is copied.

The buffer is on the heap of the group's first rank, and all ranks map it. Each rank writes its
input into its slice, which is the same memory in the output of every rank:

    output of every rank     | input of rank 0 | input of rank 1 | input of rank 2 |
                                  written by rank 0   by rank 1         by rank 2

A buffer is used again after all ranks have freed their outputs of its last call. The ranks choose a
buffer by the sequence of their calls alone, so that all choose the same one. A rank to which it is
not free yet, by its own outputs or by a slower rank's, takes memory of its own instead, and
copies: then its own output counts as one in the buffer, because it still reads there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from phalanx.comm.channels import MOST_BUFFERS, Channels
from phalanx.comm.heap import Block, Heap

CALLS_APART = 2
"""Calls after which a buffer is chosen again: FSDP2 has one gather under way while it frees the
output of the one before."""


@dataclass
class _Buffer:
    """A buffer.

    Attributes:
        index: number of the buffer in its group.
        offset: offset in the first rank's heap; -1 if that rank had no memory for it.
        kept: the block on the first rank, which is freed with the group.
        last: number of the last call for which it was chosen; 0 before the first.
        calls: numbers of the calls whose outputs this rank has not freed.
    """

    index: int
    offset: int
    kept: Block | None
    last: int = 0
    calls: set[int] = field(default_factory=set[int])


class GatherBuffers:
    """The buffers of a group, as one of its ranks uses them."""

    def __init__(self, channels: Channels, heap: Heap) -> None:
        """Use no memory yet."""
        self._channels, self._heap = channels, heap
        self._memory = channels.members[0].memory
        self._of_size: dict[int, list[_Buffer]] = {}
        self._addresses = set[int]()
        self._num_calls = 0
        self._freed = deque[tuple[_Buffer, int]]()  # filled by any thread

    def take(self, num_bytes: int, share: Callable[[int], int]) -> Block:
        """Return memory for an all-gather's output: a buffer, or this rank's own if it is not free.

        Every rank calls this before each gather into such an output, in the same order. `share`
        returns the first rank's value on all ranks; it is called for a new buffer.

        Raises:
            OSError: the host does not have enough memory.
        """
        self.publish_freed()
        self._num_calls += 1
        buffer = self._choose(num_bytes, share)
        if buffer is None or buffer.offset < 0:
            return self._heap.block(num_bytes)
        before, buffer.last = buffer.last, self._num_calls
        if self._channels.is_released(buffer.index, before):
            block = np.frombuffer(self._memory.map, np.uint8, num_bytes, buffer.offset)
        else:
            block = self._heap.block(num_bytes)
        buffer.calls.add(self._num_calls)
        freed = buffer, self._num_calls
        weakref.finalize(block, self._freed.append, freed).atexit = False
        return block

    def publish_freed(self) -> None:
        """Let the other ranks know which outputs this rank has freed."""
        while self._freed:
            buffer, call = self._freed.popleft()
            buffer.calls.remove(call)
            self._channels.release(buffer.index, min(buffer.calls, default=buffer.last + 1) - 1)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in a buffer."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def _choose(self, num_bytes: int, share: Callable[[int], int]) -> _Buffer | None:
        """Return the first buffer of this size that is due, else a new one; None if too many."""
        buffers = self._of_size.setdefault(num_bytes, [])
        for buffer in buffers:
            if self._num_calls - buffer.last >= CALLS_APART:
                return buffer
        index = sum(map(len, self._of_size.values()))
        if index == MOST_BUFFERS:
            return None
        kept, offset = None, -1
        if self._channels.coord == 0:
            try:
                kept = self._heap.block(num_bytes)
                offset = kept.ctypes.data - self._memory.address
            except OSError:  # then every rank takes memory of its own
                offset = -1
        buffer = _Buffer(index, share(offset), kept)
        buffers.append(buffer)
        self._addresses.add(self._memory.address + buffer.offset)
        return buffer
