"""The calls of a group whose ranks share memory: a rank posts tensors, which its peers read."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.comm.call_number import describe, dtype_of, mismatch, number_of
from phalanx.comm.channels import SLOTS, AwaitedWord, Channels, Post
from phalanx.comm.gather_buffers import GatherBuffers
from phalanx.comm.heap import Block, Heap, errors_if_full
from phalanx.comm.shared_transfer import Steps


class PostedCall(NamedTuple):
    """A call's channel and number, and `what` and `num_bytes`, which must be equal on all ranks."""

    channel: int | None
    number: int
    what: int
    num_bytes: int


class PostedCalls:
    """The calls of a group, as one of its ranks makes them.

    Attributes:
        numbers: channel -> number of the latest call.
    """

    def __init__(self, channels: Channels, heap: Heap, gather_buffers: GatherBuffers) -> None:
        """Post on the heap of this rank, or in `gather_buffers`."""
        self.numbers: dict[int | None, int] = {}
        self._channels, self._heap, self._gather_buffers = channels, heap, gather_buffers
        self._coord, self._size = channels.coord, len(channels.members)
        self._others = [(self._coord + n) % self._size for n in range(1, self._size)]
        self._held: dict[tuple[int | None, int], tuple[Block | None, Sequence[int]]] = {}
        self._in_slot: dict[tuple[int | None, int], int] = {}

    def call(
        self, op: str, tensor: Tensor, option: Any = None, channel: int | None = None
    ) -> PostedCall:
        """Return this rank's next call of a channel."""
        self.numbers[channel] = number = self.numbers.get(channel, 0) + 1
        return PostedCall(channel, number, number_of(op, tensor.dtype, option), tensor.nbytes)

    def post(
        self, call: PostedCall, tensor: Tensor, readers: Sequence[int] | None = None, *,
        copies: bool = False,
    ) -> Generator[AwaitedWord, None, Tensor]:  # fmt: skip
        """Post a tensor for `readers`, all other ranks if None; return the tensor that they read.

        It is `tensor` itself if that is on the heap and not `copies`, else a copy on the heap.
        """
        # 1. Wait until all readers have acknowledged the call that was in this slot, SLOTS calls
        #    ago.
        # 2. Find where the peers read: in place on the heap or in a common buffer, else in a new
        #    copy.
        # 3. Drop the blocks that all readers of earlier calls have acknowledged.
        # 4. Write the words of the call; from here on peers may read.
        key, slot = (call.channel, call.number), (call.channel, call.number % SLOTS)
        before, self._in_slot[slot] = self._in_slot.get(slot), call.number
        if before is not None:  # it may wait for the slot itself
            yield self._channels.posted(self._coord, call.channel, before)
            yield from self.await_read(call._replace(number=before))
        block, seen = None if copies else self._heap.block_of(tensor), tensor
        is_common = block is None and not copies and self._gather_buffers.holds(tensor)
        if block is None and not is_common:
            with errors_if_full():
                block = self._heap.block(call.num_bytes)
            # A view that keeps the block: peers may all have read it before this rank uses it.
            seen = torch.from_numpy(block).view(tensor.dtype)
            seen = seen.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        for held in [*self._held]:
            if self._unacknowledged(held) is None:
                del self._held[held]
        self._gather_buffers.publish_freed()  # before peers see this call
        self._held[key] = block, self._others if readers is None else readers
        home = self._channels.members[0].memory if is_common else self._heap
        offset = seen.data_ptr() - home.address
        # In the first rank's heap, offset n is posted as -1 - n.
        self._channels.post(*key, Post(~offset if is_common else offset, call.num_bytes, call.what))
        return seen

    def _unacknowledged(self, key: tuple[int | None, int]) -> AwaitedWord | None:
        """Return the word of a reader that has not acknowledged a call of this rank, or None."""
        readers = self._held[key][1] if key in self._held else ()
        needs = (self._channels.acked(reader, *key) for reader in readers)
        return next((need for need in needs if not need.is_met()), None)

    def await_read(self, call: PostedCall, given: Tensor | None = None) -> Steps:
        """Wait until all readers have read this call; not if a heap copy of `given` was posted."""
        if given is None or self._heap.block_of(given) is not None:
            while (need := self._unacknowledged((call.channel, call.number))) is not None:
                yield need

    def read(self, call: PostedCall, peer: int) -> Generator[AwaitedWord, None, Tensor]:
        """Wait for the tensor that rank `peer` posts for this call, and return it.

        Raises:
            CollectiveMismatch: the rank has posted another call.
        """
        yield self._channels.posted(peer, call.channel, call.number)
        post = self._channels.read(peer, call.channel, call.number)
        if (post.num_bytes, post.what) != (call.num_bytes, call.what):
            ranks = [self._channels.members[coord].rank for coord in (self._coord, peer)]
            words = describe(call.what, call.num_bytes), describe(post.what, post.num_bytes)
            raise mismatch({words[0]: ranks[:1], words[1]: ranks[1:]})
        is_common = post.offset < 0
        memory = self._channels.members[0 if is_common else peer].memory
        offset = ~post.offset if is_common else post.offset
        return memory.tensor(offset, post.num_bytes, dtype_of(call.what))

    def read_all(
        self, call: PostedCall, mine: Tensor
    ) -> Generator[AwaitedWord, None, list[Tensor]]:
        """Wait for the tensors of all ranks, and return them in rank order."""
        terms = {self._coord: mine}
        for peer in self._others:
            terms[peer] = yield from self.read(call, peer)
        return [terms[coord] for coord in range(self._size)]

    def ack(self, call: PostedCall, peer: int) -> None:
        """Acknowledge that this rank has read the tensor of rank `peer`."""
        self._channels.ack(peer, call.channel, call.number)

    def ack_all(self, call: PostedCall) -> None:
        """Acknowledge that this rank has read the tensors of all other ranks."""
        for peer in self._others:
            self.ack(call, peer)
