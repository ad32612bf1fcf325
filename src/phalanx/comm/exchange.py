"""All-gather and reduce-scatter for gloo by direct exchange: each rank sends to each other at once.

    all_gather       rank r sends its shard to all others                 (N-1)/N of the full tensor
    reduce_scatter   rank r sends shard s to rank s, which adds up what it receives, rank by rank

Both send as few bytes as a ring (Patarasuk and Yuan, 2009) in one round instead of N - 1, and no
rank waits for a neighbour that waits for its own. gloo's own two take two to three times as
long, see docs/log.md. They are ops of the dispatcher, so that the ledger counts each as the
one collective that it is. NCCL needs neither: FSDP2's defaults stand there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from phalanx.comm.calls import group_named
from phalanx.comm.waits import waiting

_LIBRARY = torch.library.Library("phalanx_comm", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) output, Tensor input, str group_name) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) output, Tensor input, str group_name) -> ()")


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `output`, N shards long, with the `shard` of every rank of a gloo group, in their order.

    Both are one-dimensional and contiguous; `shard` may be this rank's own slice of `output`.
    """
    torch.ops.phalanx_comm.all_gather(output, shard, group.group_name)


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Set `output` to the sum over the ranks of a gloo group of this rank's N-th of `full`.

    Both are one-dimensional and contiguous.
    """
    torch.ops.phalanx_comm.reduce_scatter(output, full, group.group_name)


def _all_gather(output: torch.Tensor, shard: torch.Tensor, group_name: str) -> None:
    group = group_named(group_name)
    num_ranks, coord = group.size(), group.rank()
    shards = output.view(num_ranks, -1)
    if shards[coord].data_ptr() != shard.data_ptr():
        shards[coord].copy_(shard)
    _exchange([shard] * num_ranks, list(shards), group)


def _reduce_scatter(output: torch.Tensor, full: torch.Tensor, group_name: str) -> None:
    group = group_named(group_name)
    num_ranks, coord = group.size(), group.rank()
    mine = list(full.view(num_ranks, -1))
    received = [mine[coord] if s == coord else torch.empty_like(output) for s in range(num_ranks)]
    _exchange(mine, received, group)
    # In the order of the ranks, so that the sum does not depend on who makes it.
    torch.add(received[0], received[1], out=output) if num_ranks > 1 else output.copy_(received[0])
    for term in received[2:]:
        output.add_(term)


for _name, _function in (("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter)):
    _LIBRARY.impl(_name, _function, "CPU")


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Send outgoing[s] to rank s and receive incoming[s] from it, for all others s at once."""
    num_ranks, coord = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for distance in range(1, num_ranks):
        source, target = (coord - distance) % num_ranks, (coord + distance) % num_ranks
        works.append(dist.irecv(incoming[source], group=group, group_src=source))
        works.append(dist.isend(outgoing[target], group=group, group_dst=target))
    with waiting():
        for work in works:
            assert work is not None  # None is for ranks outside the group
            work.wait()


class _Allocates:
    """Buffers of FSDP2 from PyTorch's own allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeAllGather(_Allocates, AllGather):
    """`all_gather` as FSDP2 asks for it."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather, and return when it is done, whatever `async_op` says."""
        all_gather(output_tensor, input_tensor, group)


class ExchangeReduceScatter(_Allocates, ReduceScatter):
    """`reduce_scatter` as FSDP2 asks for it; only sums."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce, and return when it is done, whatever `async_op` says."""
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce_scatter by exchange only sums; asked for {op}")
        reduce_scatter(output_tensor, input_tensor, group)
