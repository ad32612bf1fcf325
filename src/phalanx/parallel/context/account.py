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
    rows = (
        (phase, "cp", entry.op, times * entry.calls, times * scale * entry.payload_bytes)
        for (num_rows, length), number in Counter(microbatches).items()
        for times in (number * num_blocks,)
        for shape in (_of_attention(target, num_rows, attention.order.num_held(length)),)
        for one, scale in (_of_two_positions(shape),)
        for entry in _entries(type(attention), num_ranks, one, target.compute_dtype)
        for phase in phases_of(entry.phase, strategy.recompute.kind, isinstance(attention, Ring))
    )
    return entries_of(rows, lambda _: num_ranks)


def _of_attention(target: Target, num_rows: int, num_held: int) -> Shape:
    """Return the shape of one rank's queries and keys in attention, after the split by tp."""
    shape = target.skeleton.shape
    assert shape is not None, "cp splits a decoder"
    (rows, positions, num_heads), (_, _, num_groups) = (
        target.shard_shape_after_later("heads", (num_rows, num_held, number))
        for number in (shape.num_heads, shape.num_kv_heads)
    )
    return rows, positions, num_heads, num_groups, shape.head_dim


def _of_two_positions(shape: Shape) -> tuple[Shape, int]:
    """Return the shape of one row of two positions, one in each chunk, and a factor for bytes.

    Attention on `shape` makes the same number of calls, with that factor times the bytes.
    """
    rows, positions, heads, groups, width = shape
    if positions % 2:
        return shape, 1
    return (1, 2, heads, groups, width), rows * positions // 2


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
