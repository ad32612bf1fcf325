"""Collectives between the ranks on one host through shared memory, without sending messages.

A rank posts the location of its tensor in its heap, and the other ranks read it (channels.py):

    all_gather, all_to_all    copy a piece from each rank's heap; all_gather copies nothing into an
                              output that the ranks have in common (gather_buffers.py)
    reduce_scatter, reduce    add a piece of each rank's heap, in rank order
    broadcast, swap, message  copy
    all_reduce, small         each rank adds all tensors, and waits for each peer once
    all_reduce, large         rank r adds slice r of all tensors, and writes the sum to all:

                rank 0's heap     rank 1's heap                rank 0's heap     rank 1's heap
    bucket      | a0    | b0  |   | a1    | b1  |     ->       | a0+a1 | b0+b1 | | a0+a1 | b0+b1 |
                  by rank 0 <-------'        '-----> by rank 1

The terms of each element are added in rank order, whichever rank adds them and however the tensor
is cut: the sum is bitwise equal on all ranks and in every run.

A tensor above `SMALL_BYTES` from `empty` is on the heap; any other is copied there first. A block
stays allocated until all ranks have read it, even if its tensor is freed earlier. So a rank does
not wait for the readers of a tensor that `is_spent`, and continues while its peers are busy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm.call_number import number_of
from phalanx.comm.channels import Channels
from phalanx.comm.gather_buffers import GatherBuffers
from phalanx.comm.heap import Heap, errors_if_full, own_heap
from phalanx.comm.posted_calls import PostedCall, PostedCalls
from phalanx.comm.reductions import reduce_into
from phalanx.comm.row_counts import RowCounts
from phalanx.comm.shared_transfer import SharedTransfer, Steps
from phalanx.comm.transfer import CommEngine, Transfer
from phalanx.comm.watch import allocated, call, unwatched

SMALL_BYTES: Final = 32 << 10
"""Most bytes of an all_reduce in which each rank adds the full tensors: a second wait is slower."""


def _and_copied(steps: Steps, flat: Tensor, out: Tensor) -> Steps:
    """Run the steps of a collective that fills `flat`, then copy `flat` to `out`."""
    yield from steps
    out.copy_(flat.view_as(out))


class SharedMemory(CommEngine):
    """The engine of a group whose ranks share memory."""

    def __init__(
        self, group: dist.ProcessGroup, channels: Channels, heap: Heap, kept: object
    ) -> None:
        """Use fresh `channels`; keep a reference to `kept` so that their memory is not freed."""
        super().__init__(group)
        self._kept = kept
        self._channels = channels
        self._coord, self._size = channels.coord, len(channels.members)
        self._others = [(self._coord + n) % self._size for n in range(1, self._size)]
        self._received: dict[int, int] = {}
        self._gather_buffers = GatherBuffers(channels, heap)
        self._calls = PostedCalls(channels, heap, self._gather_buffers)

    @override
    def empty(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        is_small = math.prod(size) * dtype.itemsize <= SMALL_BYTES  # cheaper to copy
        if is_small or device.type != "cpu":  # a dry run allocates on the meta device
            return super().empty(size, dtype, device)
        with errors_if_full(), unwatched():
            tensor = own_heap().empty(size, dtype)
        return allocated(tensor)

    @override
    def gather_output(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if math.prod(size) * dtype.itemsize <= SMALL_BYTES or device.type != "cpu":
            return self.empty(size, dtype, device)
        with errors_if_full(), unwatched():
            block = self._gather_buffers.take(math.prod(size) * dtype.itemsize, self._share)
            tensor = torch.from_numpy(block).view(dtype).view(*size)
        return allocated(tensor)

    def _share(self, value: int) -> int:
        """Return the first rank's value on all ranks."""
        shared = torch.tensor([value])
        SharedTransfer(self._broadcast(shared, shared, 0, False), self._channels).wait()
        return int(shared)

    @override
    def begin(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, *, is_spent: bool = False
    ) -> Transfer:
        out, given = out.detach(), given.detach()
        if op == "swap":
            out, given = out.view(-1), given.view(-1)
        called = self.described(op, out, given, option)
        # Watches of NCCL's rules see by "engine" that this engine sends a tensor of any strides.
        called = dataclasses.replace(called, arguments={"engine": self} | dict(called.arguments))
        return call(called, functools.partial(self.run, op, out, given, option, is_spent))

    def run(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, is_spent: bool = False
    ) -> Transfer:
        """Start a collective that `begin` has reported to the watches."""
        steps: Steps
        if op == "all_to_all" and option is not None:
            steps = self._exchange_rows(out, given, option, is_spent)
            return SharedTransfer(steps, self._channels)
        if op in ("all_gather", "reduce_scatter"):
            steps = getattr(self, f"_{op}")(out, given, is_spent)
            return SharedTransfer(steps, self._channels)
        flat, sent = out.contiguous().view(-1), given.contiguous().view(-1)
        steps = getattr(self, f"_{op}")(flat, sent, option, is_spent)
        if not out.is_contiguous():
            steps = _and_copied(steps, flat, out)
        return SharedTransfer(steps, self._channels)

    # Collectives. All ranks call them in one order, which gives each call its number.

    def _all_reduce(self, out: Tensor, _given: Tensor, reduction: str, _is_spent: bool) -> Steps:
        call = self._calls.call("all_reduce", out, reduction)
        is_small = out.nbytes <= SMALL_BYTES
        mine = yield from self._calls.post(call, out, copies=is_small)
        terms = yield from self._calls.read_all(call, mine)
        if is_small:
            # Every rank adds all tensors itself. It writes `out`, so peers read the copy that was
            # posted, and this rank need not wait until they have.
            reduce_into(reduction, terms, [out])
            self._calls.ack_all(call)
            return
        # Rank r reads part r of all tensors, and writes the sum into part r of all tensors. N = 3:
        #
        #   tensor of rank 0   | part 0 | part 1 | part 2 |
        #   tensor of rank 1   | part 0 | part 1 | part 2 |
        #   tensor of rank 2   | part 0 | part 1 | part 2 |
        #                        rank 0   rank 1   rank 2     adds up, in rank order, and writes
        #
        # An acknowledgement says that a peer has written here; so the tensor is complete only when
        # all peers have acknowledged. No two ranks write the same bytes.
        size = -(-out.numel() // self._size)
        parts = [term[self._coord * size :][:size] for term in terms]
        reduce_into(reduction, parts, parts)
        self._calls.ack_all(call)
        yield from self._calls.await_read(call)
        if mine.data_ptr() != out.data_ptr():
            out.copy_(mine)

    def _all_gather(self, out: Tensor, given: Tensor, is_spent: bool) -> Steps:
        call, pieces = self._calls.call("all_gather", given), out.view(self._size, *given.shape)
        yield from self._calls.post(call, given.view(-1))
        if pieces[self._coord].data_ptr() != given.data_ptr():
            pieces[self._coord].copy_(given)
        for peer in self._others:
            theirs = yield from self._calls.read(call, peer)
            if pieces[peer].data_ptr() != theirs.data_ptr():  # else in a common buffer
                pieces[peer].copy_(theirs.view_as(given))
            self._calls.ack(call, peer)
        # Peers may still read `given`, if it was posted in place; the caller may overwrite it after
        # this.
        if not is_spent:
            yield from self._calls.await_read(call, given)

    def _reduce_scatter(self, out: Tensor, given: Tensor, is_spent: bool) -> Steps:
        call, given = self._calls.call("reduce_scatter", given), given.view(self._size, *out.shape)
        mine = yield from self._calls.post(call, given)
        terms = yield from self._calls.read_all(call, mine)
        # A posted tensor is the bytes of a peer's memory; the strides are equal on all ranks.
        alike = [term.as_strided(given.shape, given.stride()) for term in terms]
        reduce_into("sum", [term[self._coord] for term in alike], [out])
        self._calls.ack_all(call)
        if not is_spent:
            yield from self._calls.await_read(call, given)

    def _all_to_all(self, out: Tensor, given: Tensor, _option: None, is_spent: bool) -> Steps:
        out, given = out.view(self._size, -1), given.view(self._size, -1)
        equal = RowCounts.even(self._size, self._size, self._size)
        return self._exchange_rows(out, given, equal, is_spent)

    def _exchange_rows(
        self, out: Tensor, given: Tensor, counts: RowCounts, is_spent: bool
    ) -> Steps:
        call = self._calls.call("all_to_all", given)
        mine = yield from self._calls.post(call, given)
        row = math.prod(given.shape[1:])
        pieces = out.split(counts.received(self._coord))
        for peer in (self._coord, *self._others):
            # The tensor of a peer:  | rows for rank 0 | rows for rank 1 | ...  from `first` on mine
            sent = counts.sent(peer)
            first, number = row * sum(sent[: self._coord]), row * sent[self._coord]
            if peer == self._coord:
                pieces[peer].view(-1).copy_(mine.view(-1)[first : first + number])
                continue
            num_bytes = row * sum(sent) * given.itemsize
            theirs = yield from self._calls.read(call._replace(num_bytes=num_bytes), peer)
            pieces[peer].view(-1).copy_(theirs[first : first + number])
            self._calls.ack(call, peer)
        if not is_spent:
            yield from self._calls.await_read(call, given)

    def _swap(self, out: Tensor, given: Tensor, partner: int, _is_spent: bool) -> Steps:
        call = self._calls.call("swap", given)
        if partner == self._coord:
            out.copy_(given)
            return
        yield from self._calls.post(call, given, [partner])
        theirs = yield from self._calls.read(call, partner)
        out.copy_(theirs)
        self._calls.ack(call, partner)
        yield from self._calls.await_read(call, given)

    def _broadcast(self, out: Tensor, _given: Tensor, source: int, _is_spent: bool) -> Steps:
        call = self._calls.call("broadcast", out, source)
        if source == self._coord:
            yield from self._calls.post(call, out)
            yield from self._calls.await_read(call, out)
            return
        theirs = yield from self._calls.read(call, source)
        out.copy_(theirs)
        self._calls.ack(call, source)

    def _reduce(self, out: Tensor, _given: Tensor, target: int, _is_spent: bool) -> Steps:
        call = self._calls.call("reduce", out, target)
        if target != self._coord:
            yield from self._calls.post(call, out, [target])
            yield from self._calls.await_read(call, out)
            return
        terms = yield from self._calls.read_all(call, out.clone())
        reduce_into("sum", terms, [out])
        self._calls.ack_all(call)

    def _barrier(self, out: Tensor, _given: Tensor, _option: int, _is_spent: bool) -> Steps:
        call = self._calls.call("barrier", out)
        yield from self._calls.post(call, out)
        yield from self._calls.read_all(call, out)
        self._calls.ack_all(call)

    def _send(self, _out: Tensor, given: Tensor, target: int, _is_spent: bool) -> Steps:
        call = self._calls.call("message", given, channel=target)
        yield from self._calls.post(call, given, [target])
        yield from self._calls.await_read(call, given)

    def _recv(self, out: Tensor, _given: Tensor, source: int, _is_spent: bool) -> Steps:
        self._received[source] = number = self._received.get(source, 0) + 1
        call = PostedCall(self._coord, number, number_of("message", out.dtype), out.nbytes)
        theirs = yield from self._calls.read(call, source)
        out.copy_(theirs)
        self._calls.ack(call, source)
