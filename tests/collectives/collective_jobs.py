"""What ranks do in the tests of phalanx.collectives; torch's own calls are the reference."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nccl_trace import traced
from phalanx import collectives
from phalanx.comm.algorithms.catalogue import algorithms_of
from phalanx.comm.algorithms.running import REDUCTIONS
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger

BITS = ("and", "or", "xor")


def named(collective: str) -> list[str]:
    """Return the algorithms of a collective, the hierarchical one for hosts of two ranks."""
    return [
        "hierarchical/2" if name == "hierarchical" else name for name in algorithms_of(collective)
    ]


def rows_of(num_ranks: int, size: int, dtype: torch.dtype, salt: int) -> Tensor:
    """Return what each rank gives: integers of which sums and products are exact in bfloat16."""
    draw = torch.Generator().manual_seed(1000 * salt + size)
    high = 3 if num_ranks < 6 else 2
    return torch.randint(1, high, (num_ranks, size), generator=draw, device="cpu").to(dtype)


def reduced(rows: Tensor, op: str) -> Tensor:
    """Return the reduction, in float64 of what is floating."""
    wide = rows.double() if rows.is_floating_point() else rows
    if op in BITS:
        combine: Callable[[Tensor, Tensor], Tensor] = getattr(torch, f"bitwise_{op}")
        total = wide[0].clone()
        for row in wide[1:]:
            total = combine(total, row)
        return total
    if op == "avg":
        mode = None if rows.is_floating_point() else "trunc"
        return torch.div(wide.sum(0), len(rows), rounding_mode=mode).to(rows.dtype)
    return getattr(wide, {"product": "prod", "min": "amin", "max": "amax"}.get(op, op))(0).to(
        rows.dtype
    )


def reduces(sizes: list[int], dtypes: list[torch.dtype], ops: list[str]) -> str:
    """All-reduce by every algorithm, with each size, type and reduction; return a hash of all."""
    rank, num_ranks, seen = dist.get_rank(), dist.get_world_size(), hashlib.blake2b()
    for size, dtype, op in itertools.product(sizes, dtypes, ops):
        if op in BITS and dtype.is_floating_point:
            continue
        rows = rows_of(num_ranks, size, dtype, 1)
        for algorithm in named("all-reduce"):
            mine = rows[rank].clone()
            collectives.all_reduce(mine, op, algorithm=algorithm)
            assert torch.equal(mine, reduced(rows, op)), (algorithm, size, dtype, op)
            noise = rows * (0.1 + rank) if dtype.is_floating_point else rows
            summed = noise[0].clone()
            collectives.all_reduce(summed, op, algorithm=algorithm)
            seen.update(summed.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def all_collectives(size: int, dtype: torch.dtype, group_size: int) -> None:
    """Call every collective by every algorithm in groups of `group_size` consecutive ranks."""
    world, num_groups = dist.get_world_size(), dist.get_world_size() // group_size
    parts = [[*range(at * group_size, (at + 1) * group_size)] for at in range(num_groups)]
    groups = [dist.new_group(part) for part in parts]
    at = dist.get_rank() // group_size
    group = groups[at] if group_size < world else dist.group.WORLD
    rank = dist.get_rank() % group_size
    for other in groups:
        if not isinstance(other, dist.ProcessGroup):
            assert collectives.all_reduce(torch.zeros(1), group=other) is None
    full = rows_of(group_size, group_size * size, dtype, at)
    chunks = full.view(group_size, group_size, size)
    root = group_size // 2
    for algorithm in named("broadcast"):
        x = full[rank].clone()
        collectives.broadcast(x, root, algorithm=algorithm, group=group)
        assert torch.equal(x, full[root])
    for algorithm in named("reduce"):
        x = full[rank].clone()
        collectives.reduce(x, "max", root, algorithm=algorithm, group=group)
        assert rank != root or torch.equal(x, full.amax(0))
    for algorithm in named("all-gather"):
        whole = torch.empty_like(full[0])
        collectives.all_gather(whole, chunks[rank, 0].clone(), algorithm=algorithm, group=group)
        assert torch.equal(whole, chunks[:, 0].reshape(-1))
    for algorithm in named("reduce-scatter"):
        part = torch.empty(size, dtype=dtype, device="cpu")
        collectives.reduce_scatter(part, full[rank], "sum", algorithm=algorithm, group=group)
        assert torch.equal(part, reduced(full, "sum").view(group_size, size)[rank])
    for algorithm in named("gather"):
        whole = torch.empty_like(full[0]) if rank == root else None
        collectives.gather(whole, chunks[rank, 0].clone(), root, algorithm=algorithm, group=group)
        assert whole is None or torch.equal(whole, chunks[:, 0].reshape(-1))
    for algorithm in named("scatter"):
        part = torch.empty(size, dtype=dtype, device="cpu")
        given = full[root] if rank == root else None
        collectives.scatter(part, given, root, algorithm=algorithm, group=group)
        assert torch.equal(part, chunks[root, rank])
    for algorithm in named("all-to-all"):
        output = torch.empty_like(chunks[rank])
        collectives.all_to_all(output, chunks[rank], algorithm=algorithm, group=group)
        assert torch.equal(output, chunks[:, rank])
    for algorithm in named("barrier"):
        collectives.barrier(algorithm=algorithm, group=group)


def back_to_back(times: int) -> str:
    """Begin collectives of two groups without waiting, and wait for them in another order."""
    rank, num_ranks, seen = dist.get_rank(), dist.get_world_size(), hashlib.blake2b()
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    algorithms = named("all-reduce")
    for number in range(0, times, 4):
        given = rows_of(num_ranks, 37, torch.float32, number) * 0.1
        mine = [given[rank].clone() for _ in range(4)]
        works = [
            collectives.all_reduce(
                x,
                algorithm=algorithms[(number + at) % len(algorithms)],
                group=pair if at % 2 else None,
                async_op=True,
            )
            for at, x in enumerate(mine)
        ]
        order = [3, 0, 2, 1] if rank % 2 else [2, 3, 1, 0]
        for at in order:
            work = works[at]
            assert work is not None
            work.wait()
            assert work.is_completed()
        both = given[rank // 2 * 2] + given[rank // 2 * 2 + 1]
        assert torch.equal(mine[1], both) and torch.equal(mine[3], both)
        assert torch.allclose(mine[0].double(), given.double().sum(0), rtol=1e-6)
        seen.update(mine[0].numpy().tobytes() + mine[2].numpy().tobytes())
    return seen.hexdigest()


def messages() -> list[float]:
    """Send round a ring, by tags in reverse, and behind a collective that nobody has waited for."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    x, y = torch.zeros(1), torch.zeros(1)
    first = collectives.isend(torch.tensor([float(rank)]), after, tag=1)
    second = collectives.isend(torch.tensor([10.0 * rank]), after, tag=2)
    collectives.recv(y, before, tag=2)
    collectives.recv(x, before, tag=1)
    first.wait()
    second.wait()
    total = torch.ones(num_ranks)
    work = collectives.all_reduce(total, async_op=True)
    if rank == 0:
        collectives.send(total, 1)
    elif rank == 1:
        collectives.recv(total, 0)
    assert work is not None
    work.wait()
    return [float(x), float(y), float(total.sum())]


def counted(size: int, algorithm: str) -> list[Entry]:
    """Return what the ledger counts of an all-reduce of `size` numbers of float32."""
    comm = Ranks({"dp": dist.get_world_size()})
    collectives.barrier()  # which connects the ranks
    with Ledger(comm) as ledger:
        collectives.all_reduce(torch.ones(size), algorithm=algorithm)
    return ledger.entries()


def everything(sizes: list[int]) -> str:
    """Do all of it, held against the rules of NCCL where that takes little time."""
    num_ranks = dist.get_world_size()
    traced(all_collectives, 3, torch.float32, num_ranks)
    traced(all_collectives, 3, torch.int64, 2)
    traced(reduces, [num_ranks + 1], [torch.bfloat16], ["avg"])
    return all_sums(sizes)


def all_sums(sizes: list[int]) -> str:
    """Reduce by all algorithms, and without waiting; return a digest of the results."""
    types = [torch.bfloat16, torch.int64]
    return reduces(sizes, types, list(REDUCTIONS)) + back_to_back(40)
