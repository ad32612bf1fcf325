"""Predicted communication of attention under context parallelism.

As for tp (parallel/tensor/account.py), attention runs forward and backward on meta tensors over a
communicator that counts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch

from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.context.ulysses import Ulysses
from phalanx.parallel.split import Target, entries_of, phases_of

Shape = tuple[int, int, int, int, int]
"""Numbers of rows, positions, query heads and key heads of one rank, and the width of a head."""


def traffic(
    target: Target, attention: Ring | Ulysses, microbatches: Sequence[tuple[int, int]]
) -> list[Entry]:
    """Return the communication of the first rank of cp over cp in one step."""
    strategy, skeleton = target.strategy, target.skeleton
    num_ranks = strategy.cp.degree
    num_blocks = sum(len(names) for names in skeleton.blocks.values())
    shape = skeleton.shape
    assert shape is not None, "cp splits a decoder"
    counts: list[tuple[str, str, str, int, int]] = []
    for (num_rows, length), number in Counter(microbatches).items():
        # One rank's queries and keys in attention, after the split by tp.
        held = attention.order.num_held(length)
        (rows, positions, num_heads), (_, _, num_groups) = (
            target.shard_shape_after_later("heads", (num_rows, held, heads))
            for heads in (shape.num_heads, shape.num_kv_heads)
        )
        # One row of two positions, one in each chunk, makes the same number of calls, with
        # 1 / scale of the bytes: so few shapes are counted, whatever the rows and lengths.
        scale = 1 if positions % 2 else rows * positions // 2
        rows, positions = (rows, positions) if positions % 2 else (1, 2)
        of_rank = rows, positions, num_heads, num_groups, shape.head_dim
        for entry in _entries(type(attention), num_ranks, of_rank, target.compute_dtype):
            times, is_kept = number * num_blocks, isinstance(attention, Ring)
            counts += [
                (phase, "cp", entry.op, times * entry.calls, times * scale * entry.payload_bytes)
                for phase in phases_of(entry.phase, strategy.recompute.kind, is_kept)
            ]
        if shape.experts is not None and shape.experts.capacity is not None:
            # The selections of all positions, int32, in each block with experts.
            blocks = (int(n.split(".")[1]) for names in skeleton.blocks.values() for n in names)
            times = number * sum(shape.experts_of(block) is not None for block in blocks)
            num_bytes = times * num_ranks * num_rows * held * shape.experts.top_k * 4
            counts += [
                (phase, "cp", "all_gather", times, num_bytes)
                for phase in phases_of("forward", strategy.recompute.kind, False)
            ]
    return entries_of(counts, lambda _: num_ranks)


@functools.lru_cache(maxsize=1 << 12)
def _entries(
    kind: type[Ring] | type[Ulysses], num_ranks: int, shape: Shape, dtype: torch.dtype
) -> list[Entry]:
    """Return the communication of attention in one block for one microbatch."""
    comm = CountingComm({"cp": num_ranks})
    rows, positions, num_heads, num_groups, width = shape
    q_BTHK, k_BTGK, v_BTGK = (
        torch.empty(rows, positions, heads, width, dtype=dtype, device="meta", requires_grad=True)
        for heads in (num_heads, num_groups, num_groups)
    )
    with comm.phase("forward"):
        mixed_BTHK = kind(comm)(q_BTHK, k_BTGK, v_BTGK)
    with comm.phase("backward"):
        mixed_BTHK.backward(torch.empty_like(mixed_BTHK))
    return comm.entries()
