"""All-gather and reduce-scatter for gloo by direct exchange: each rank sends to each other at once.

    all_gather       rank r sends its shard to all others                 (N-1)/N of the full tensor
    reduce_scatter   rank r sends shard s to rank s, which adds up what it receives, rank by rank

Both send as few bytes as a ring (Patarasuk and Yuan, 2009) in one round instead of N - 1, and no
rank waits for a neighbour that waits for its own. gloo's own two take two to three times as
long, see benchmarks/data_parallel. They are ops of the dispatcher, so that the ledger counts each
as the one collective that it is. NCCL needs neither: FSDP2's defaults stand there.

Those named `_start` return at once, and gloo's own thread sends and receives until they are waited
for. So FSDP2 gathers the next block while this one computes (parallel/overlap.py):

    this thread    begin 1 |     forward 0     | wait 1 | begin 2 |     forward 1     | wait 2 ...
    gloo's thread           ---- gather 1 ----                     ---- gather 2 ----
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from typing_extensions import override

from phalanx.comm.calls import group_named
from phalanx.comm.ranges import named
from phalanx.comm.waits import waiting

_LIBRARY = torch.library.Library("phalanx_comm", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) output, Tensor input, str group_name) -> int")
_LIBRARY.define("reduce_scatter(Tensor(a!) output, Tensor input, str group_name) -> int")


class Transfer(dist.Work):
    """An exchange under way; its tensors must be left alone until `wait`.

    Attributes:
        is_waited_for: whether `wait` has returned.
    """

    def __init__(
        self, works: Sequence[dist.Work | None], complete: Callable[[], None] | None = None
    ) -> None:
        """Take over sends and receives that have begun.

        Args:
            works: of gloo.
            complete: called once all has been sent and received.
        """
        super().__init__()
        self.is_waited_for = False
        self._works = list(works)
        self._complete = complete

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the output is there; gloo's own timeout holds."""
        works, self._works = self._works, []
        if works:
            with named("wait exchange"), waiting():
                for work in works:
                    assert work is not None  # None is for ranks outside the group
                    work.wait()
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        self.is_waited_for = True
        return True


_BEGUN: dict[int, Transfer] = {}
"""What the ops of the dispatcher have begun, by the number that they return."""

_NUMBERS = itertools.count()


def all_gather_start(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
) -> Transfer:
    """Begin to fill `output`, N shards long, with the `shard` of every rank, in their order.

    Both are one-dimensional and contiguous; `shard` may be this rank's own slice of `output`. The
    group is one of gloo.
    """
    return _BEGUN.pop(torch.ops.phalanx_comm.all_gather(output, shard, group.group_name))


def reduce_scatter_start(
    output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup
) -> Transfer:
    """Begin to set `output` to the sum over the ranks of this rank's N-th of `full`.

    Both are one-dimensional and contiguous. The group is one of gloo.
    """
    return _BEGUN.pop(torch.ops.phalanx_comm.reduce_scatter(output, full, group.group_name))


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Do what `all_gather_start` begins."""
    all_gather_start(output, shard, group).wait()


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Do what `reduce_scatter_start` begins."""
    reduce_scatter_start(output, full, group).wait()


def _all_gather(output: torch.Tensor, shard: torch.Tensor, group_name: str) -> int:
    group = group_named(group_name)
    num_ranks, coord = group.size(), group.rank()
    shards = output.view(num_ranks, -1)
    if shards[coord].data_ptr() != shard.data_ptr():
        shards[coord].copy_(shard)
    return _begun(Transfer(_exchange([shard] * num_ranks, list(shards), group)))


def _reduce_scatter(output: torch.Tensor, full: torch.Tensor, group_name: str) -> int:
    group = group_named(group_name)
    num_ranks, coord = group.size(), group.rank()
    mine = list(full.view(num_ranks, -1))
    received = [mine[coord] if s == coord else torch.empty_like(output) for s in range(num_ranks)]

    def add_up() -> None:
        # In the order of the ranks, so that the sum does not depend on who makes it.
        if num_ranks > 1:
            torch.add(received[0], received[1], out=output)
        else:
            output.copy_(received[0])
        for term in received[2:]:
            output.add_(term)

    return _begun(Transfer(_exchange(mine, received, group), add_up))


def _begun(transfer: Transfer) -> int:
    number = next(_NUMBERS)
    _BEGUN[number] = transfer
    return number


for _name, _function in (("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter)):
    _LIBRARY.impl(_name, _function, "CPU")


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Begin to send outgoing[s] to rank s and to receive incoming[s] from it, for all others s."""
    num_ranks, coord = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for distance in range(1, num_ranks):
        source, target = (coord - distance) % num_ranks, (coord + distance) % num_ranks
        works.append(dist.irecv(incoming[source], group=group, group_src=source))
        works.append(dist.isend(outgoing[target], group=group, group_dst=target))
    return works


class _Allocates:
    """Buffers of FSDP2 from PyTorch's own allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeAllGather(_Allocates, AllGather):
    """`all_gather` as FSDP2 asks for it, for one group of parameters.

    Attributes:
        transfer: the latest that is to be waited for.
    """

    def __init__(self) -> None:
        self.transfer: Transfer | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for the latest."""
        return self.transfer is not None and not self.transfer.is_waited_for

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Transfer | None:
        """Gather; with `async_op` only begin to, and return what to wait for."""
        with named("all_gather fsdp"):
            transfer = all_gather_start(output_tensor, input_tensor, group)
        if async_op:
            self.transfer = transfer
            return transfer
        transfer.wait()
        return None


class LastReduction:
    """The reduction that a backward has left under way; at most one."""

    def __init__(self) -> None:
        self._transfer: Transfer | None = None

    def leave(self, transfer: Transfer) -> None:
        """Let a reduction run until `end`, which comes by itself when this backward ends."""
        self.end()
        self._transfer = transfer
        # Private, and the only way to know that backward ends; tests/parallel/test_overlap.py
        # pins it. FSDP2 does the same.
        engine: Any = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
        engine.queue_callback(self.end)

    def end(self) -> None:
        """Return when the output of the reduction is there."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class ExchangeReduceScatter(_Allocates, ReduceScatter):
    """`reduce_scatter` as FSDP2 asks for it; only sums.

    FSDP2 never waits for a reduction: on a GPU the order of a stream does. Here one runs while
    backward computes the block before, unless FSDP2 reads its output at once. It has ended when the
    buffers of the next are made, or else when backward ends.
    """

    def __init__(
        self,
        last: LastReduction | None = None,
        is_read_at_once: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reduce for one group of parameters, or for any.

        Args:
            last: of all groups of the model.
            is_read_at_once: returns, as a reduction begins, whether its output is read right after.
        """
        self._last = last or LastReduction()
        self._is_read_at_once = is_read_at_once

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor, in the place of what the reduction before has needed."""
        self._last.end()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Transfer | None:
        """Reduce, or begin to; with `async_op` return what to wait for."""
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce_scatter by exchange only sums; asked for {op}")
        with named("reduce_scatter fsdp"):
            transfer = reduce_scatter_start(output_tensor, input_tensor, group)
        if async_op:
            return transfer
        if self._is_read_at_once():
            transfer.wait()
        else:
            self._last.leave(transfer)
        return None
