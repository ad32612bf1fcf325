"""Attention of one rank of a ring on a CPU, beside attention to the full row / ranks.

python benchmarks/context/ring.py

6 heads of 64, forward and backward, one thread, without messages; medians of 5 rounds in turns.
All ranks do equal work; this is rank 0. The planner slows attention by these factors
(`ring_slowdown` in planner/parts.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from phalanx.models.attention import attend
from phalanx.parallel.context.partial import AttentionMask, BackwardState, Chunk, PartialAttention
from phalanx.planner.parts import ring_slowdown
from phalanx.strategy import Strategy

SIZES = ((256, 8), (1024, 2), (4096, 1))
ROUNDS = 5


def ring_step(tensors: tuple[torch.Tensor, ...], num_ranks: int) -> Callable[[], None]:
    """Return what attends as rank 0 does, to the keys of all ranks, forward and backward.

    Every rank has the keys and values of rank 0.
    """
    size = tensors[0].shape[1] // (2 * num_ranks)
    q, k, v, do = (x[:, : 2 * size].detach() for x in tensors)

    def chunks(rank: int) -> list[Chunk]:
        numbers = enumerate((rank, 2 * num_ranks - 1 - rank))
        return [Chunk(slice(i * size, (i + 1) * size), n * size) for i, n in numbers]

    pairs = [
        (queries, keys)
        for rank in range(num_ranks)
        for queries in chunks(0)
        for keys in chunks(rank)
        if keys.first <= queries.first
    ]

    def step() -> None:
        mixed, sight = PartialAttention(q), AttentionMask()
        for pair in pairs:
            mixed.add(q, k, v, *pair, sight)
        state = BackwardState.of(q, mixed.o_BTHK.to(q.dtype), mixed.lse_BTH, do)
        dk, dv = torch.zeros(2, *k.shape, dtype=mixed.o_BTHK.dtype)
        for pair in pairs:
            state.add(k, v, dk, dv, *pair, sight)

    return step


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| precision | positions | rows | ranks | full row / ranks, ms | ring, ms | x | planner |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for precision in ("float32", "bfloat16"):
        for length, num_rows in SIZES:
            for num_ranks in (2, 4):
                generator = torch.Generator().manual_seed(0)
                shape = num_rows, length, 6, 64
                q, k, v, do = (
                    torch.randn(shape, generator=generator).to(getattr(torch, precision))
                    for _ in range(4)
                )
                for each in (q, k, v):
                    each.requires_grad_()
                ways = {
                    "row": lambda q=q, k=k, v=v, do=do: attend(q, k, v).backward(do),
                    "ring": ring_step((q, k, v, do), num_ranks),
                }
                times_s: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(ROUNDS + 1):
                    for name, way in ways.items():
                        begun_s = time.perf_counter()
                        way()
                        times_s[name].append(time.perf_counter() - begun_s)
                row_s, ring_s = (statistics.median(each[1:]) for each in times_s.values())
                slowdown = ring_slowdown(Strategy.parse(f"cp{num_ranks}"), length, precision)
                print(
                    f"| {precision} | {length:,} | {num_rows} | {num_ranks} "
                    f"| {1e3 * row_s / num_ranks:.1f} | {1e3 * ring_s:.1f} "
                    f"| {ring_s * num_ranks / row_s:.2f} | {slowdown:.2f} |"
                )


if __name__ == "__main__":
    main()
