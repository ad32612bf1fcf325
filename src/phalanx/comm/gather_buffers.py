"""Outputs of all-gathers that the ranks of a group have in common, so that nothing is copied.

The buffer is on the heap of the group's first rank, and all ranks map it. Each rank writes its
input into its slice, which is the same memory in the output of every rank:

    output of every rank     | input of rank 0 | input of rank 1 | input of rank 2 |
                                  written by rank 0   by rank 1         by rank 2

Gathers use two buffers in turn: FSDP2 has one gather under way while it frees the output of the one
before. Each buffer is as large as its largest output so far, and is freed with the group.

A buffer is used again after all ranks have freed their outputs of its last call. A rank to which it
is not free yet, by its own output or by a slower rank's, takes memory of its own instead, and
copies: then its own output counts as one in the buffer, because it still reads there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from phalanx.comm.channels import NUM_BUFFERS, Channels
from phalanx.comm.heap import Block, Heap


@dataclass
class _Buffer:
    """A buffer.

    Attributes:
        index: number of the buffer in its group.
        num_bytes: size of the buffer.
        offset: offset in the first rank's heap.
        kept: the block, on the first rank.
        last: number of the last call that was due to use it; 0 before the first.
        calls: numbers of the calls whose outputs this rank has not freed.
    """

    index: int
    num_bytes: int = 0
    offset: int = 0
    kept: Block | None = None
    last: int = 0
    calls: set[int] = field(default_factory=set[int])


class GatherBuffers:
    """The buffers of a group, as one of its ranks uses them."""

    def __init__(self, channels: Channels, heap: Heap) -> None:
        """Use no memory yet."""
        self._channels, self._heap = channels, heap
        self._memory = channels.members[0].memory
        self._buffers = [_Buffer(index) for index in range(NUM_BUFFERS)]
        self._num_calls = 0
        self._freed = deque[tuple[_Buffer, int]]()  # filled by any thread

    def take(self, num_bytes: int, share: Callable[[int], int]) -> Block:
        """Return memory for an all-gather's output: a buffer, or this rank's own if it is not free.

        Every rank calls this before each gather into such an output, in the same order. `share`
        returns the first rank's value on all ranks; it is called if the buffer is too small.

        Raises:
            OSError: the host does not have enough memory.
        """
        self.publish_freed()
        self._num_calls += 1
        #   call      1    2    3                  4
        #   buffer    1    0    1, if all ranks    0, if all ranks
        #                       have freed 1       have freed 2
        buffer = self._buffers[self._num_calls % NUM_BUFFERS]
        is_free = self._channels.is_released(buffer.index, buffer.last)
        if buffer.num_bytes < num_bytes:
            # The first rank decides for all, so that all agree where the buffer is. The buffer
            # stays as it is while a rank still uses it, or if the first rank has no memory.
            offset = -1
            if self._channels.coord == 0 and is_free:
                with suppress(OSError):
                    buffer.kept = self._heap.block(num_bytes)
                    offset = buffer.kept.ctypes.data - self._memory.address
            if (offset := share(offset)) >= 0:
                buffer.num_bytes, buffer.offset = num_bytes, offset
        if is_free and buffer.num_bytes >= num_bytes:
            block = np.frombuffer(self._memory.map, np.uint8, num_bytes, buffer.offset)
        else:
            block = self._heap.block(num_bytes)
        buffer.last = self._num_calls
        buffer.calls.add(self._num_calls)
        freed = buffer, self._num_calls
        weakref.finalize(block, self._freed.append, freed).atexit = False
        return block

    def publish_freed(self) -> None:
        """Let the other ranks know which outputs this rank has freed."""
        while self._freed:
            buffer, call = self._freed.popleft()
            buffer.calls.remove(call)
            # The word is a single number, so it stops below the oldest output that is still in use,
            # also when later ones have been freed first.
            self._channels.release(buffer.index, min(buffer.calls, default=buffer.last + 1) - 1)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor from `take`, or a slice of one, is in a buffer."""
        offset = tensor.untyped_storage().data_ptr() - self._memory.address
        return any(buffer.num_bytes and buffer.offset == offset for buffer in self._buffers)
