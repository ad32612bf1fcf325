"""All-gather and reduce-scatter for gloo by direct exchange between all pairs of ranks at once.

    all_gather       rank r sends its shard to all others                 (N-1)/N of the full tensor
    reduce_scatter   rank r sends shard s to rank s, which adds received shards in rank order

Both send as few bytes as a ring (Patarasuk and Yuan, 2009) in one round instead of N - 1, without
chains of waiting neighbors. gloo's built-in versions take two to three times as long, see
benchmarks/data_parallel. Each is one `call` for watches, so that the ledger counts one collective
instead of its messages. With NCCL neither is used: FSDP2 has its default collectives there.

Functions named `_start` return at once, and gloo's thread sends and receives in the background
until `wait`. So FSDP2 gathers the next block while this one computes (parallel/overlap.py):

    this thread    start 1 |     forward 0     | wait 1 | start 2 |     forward 1     | wait 2 ...
    gloo's thread           ---- gather 1 ----                     ---- gather 2 ----
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from phalanx.comm.calls import Call
from phalanx.comm.transfer import CommEngine, Transfer
from phalanx.comm.watch import allocated, call


def all_gather_start(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start to fill `output`, N shards long, with the `shard` of every rank, in rank order.

    Both are one-dimensional and contiguous; `shard` may be this rank's slice of `output`. The
    group's backend is gloo.
    """

    def run() -> Transfer:
        num_ranks, coord = group.size(), group.rank()
        shards = output.view(num_ranks, -1)
        if shards[coord].data_ptr() != shard.data_ptr():
            shards[coord].copy_(shard)
        return Transfer(_exchange([shard] * num_ranks, list(shards), group))

    return call(Call("all_gather", group, {"output": output, "input": shard}), run)


def reduce_scatter_start(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start to set `output` to this rank's shard, 1/N, of the sum of `full` over the ranks.

    Both are one-dimensional and contiguous. The group's backend is gloo.
    """

    def run() -> Transfer:
        num_ranks, coord = group.size(), group.rank()
        mine = list(full.view(num_ranks, -1))
        received = [
            mine[coord] if s == coord else allocated(torch.empty_like(output))
            for s in range(num_ranks)
        ]

        def add_up() -> None:
            # In rank order, so that the sum does not depend on the rank that computes it.
            if num_ranks > 1:
                torch.add(received[0], received[1], out=output)
            else:
                output.copy_(received[0])
            for term in received[2:]:
                output.add_(term)

        return Transfer(_exchange(mine, received, group), add_up)

    return call(Call("reduce_scatter", group, {"output": output, "input": full}), run)


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Run `all_gather_start`, and wait for its end."""
    all_gather_start(output, shard, group).wait()


def reduce_scatter(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    """Run `reduce_scatter_start`, and wait for its end."""
    reduce_scatter_start(output, full, group).wait()


def _exchange(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Start to send outgoing[s] to rank s and receive incoming[s] from it, for every other s."""
    num_ranks, coord = group.size(), group.rank()
    works: list[dist.Work | None] = []
    # In turn d, rank r sends to r + d and receives from r - d: each rank is the target of one
    # other. If all began with rank 0, its link would carry N - 1 messages while the others were
    # idle.
    for distance in range(1, num_ranks):
        source, target = (coord - distance) % num_ranks, (coord + distance) % num_ranks
        works.append(dist.irecv(incoming[source], group=group, group_src=source))
        works.append(dist.isend(outgoing[target], group=group, group_dst=target))
    return works


_REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_any_dist: Any = dist
# PyTorch 2.13 renamed these two functions; 2.11 and 2.12 have only the old names.
_gather_single = getattr(_any_dist, "all_gather_single", None) or _any_dist.all_gather_into_tensor
_scatter_single = (
    getattr(_any_dist, "reduce_scatter_single", None) or _any_dist.reduce_scatter_tensor
)


class ProcessGroupEngine(CommEngine):
    """An engine that runs collectives over a torch process group, gloo or NCCL."""

    @override
    def begin(
        self, op: str, out: Tensor, given: Tensor, option: Any = None, *, is_spent: bool = False
    ) -> dist.Work | None:
        group = self.group
        match op:
            case "all_reduce" if not out.is_contiguous():  # gloo refuses a strided vector
                total = out.contiguous()
                if (work := self.begin(op, total, total, option)) is not None:
                    work.wait()
                out.copy_(total)
                return None
            case "all_reduce":
                return dist.all_reduce(out, _REDUCTIONS[option], group=group, async_op=True)
            case "broadcast":
                return dist.broadcast(out, group=group, group_src=option, async_op=True)
            case "reduce":
                return dist.reduce(out, group=group, group_dst=option, async_op=True)
            case "send":
                return dist.isend(given, group=group, group_dst=option)
            case "recv":
                return dist.irecv(out, group=group, group_src=option)
            case "all_to_all" if option is None:
                return dist.all_to_all_single(out, given, group=group, async_op=True)
            case "all_to_all" | "swap":
                if op == "swap":
                    out, given = out.view(-1), given.view(-1)
                called = self.described(op, out, given, option)
                sizes = [called.arguments[f"{end}_split_sizes"] for end in ("output", "input")]
                run = dist.all_to_all_single
                return call(
                    called,
                    lambda: Transfer([run(out, given, *sizes, group=group, async_op=True)]),
                )
            case "all_gather" if not out.is_contiguous():
                pieces = torch.empty_like(out, memory_format=torch.contiguous_format)
                if (work := self.begin(op, pieces, given)) is not None:
                    work.wait()
                out.copy_(pieces)
                return None
            case "all_gather" if out.is_cuda:
                return _gather_single(out, given, group=group)
            case "all_gather":
                return all_gather_start(out.view(-1), given.view(-1), group)
            case "reduce_scatter" if not given.is_contiguous():
                return self.begin(op, out, given.contiguous())
            case "reduce_scatter" if out.is_cuda:
                return _scatter_single(out, given, group=group)
            case _:
                assert op == "reduce_scatter", f"there is no collective {op}"
                return reduce_scatter_start(out.view(-1), given.view(-1), group)
