"""What attention sends under context parallelism, said before any process starts.

As that of tp (parallel/tensor/account.py) it is counted by running attention, forward and backward,
on tensors of the meta device over a communicator that counts.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from phalanx.comm.comm import Counting
from phalanx.comm.ledger import Entry, sent_bytes
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.context.ulysses import Ulysses
from phalanx.parallel.split import Target

Shape = tuple[int, int, int, int, int]
"""Rows, positions, query heads, key heads and their width, of one rank."""


def traffic(
    target: Target, attention: Ring | Ulysses, microbatches: Sequence[tuple[int, int]]
) -> list[Entry]:
    """Return what the first rank of cp sends over it in one step."""
    strategy, skeleton = target.strategy, target.skeleton
    num_ranks = strategy.cp.degree
    num_blocks = sum(len(names) for names in skeleton.blocks.values())
    dtype = target.compute_dtype
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for (num_rows, length), times in Counter(microbatches).items():
        shape = _of_attention(target, num_rows, attention.order.held(length))
        for entry in _entries(type(attention), num_ranks, shape, dtype):
            for phase in _phases(entry.phase, strategy.recompute.kind, attention):
                pair = sums[phase, entry.op]
                pair[0] += times * num_blocks * entry.calls
                pair[1] += times * num_blocks * entry.payload_bytes
    return [
        Entry(phase, "cp", op, calls, payload, sent_bytes(op, payload, num_ranks))
        for (phase, op), (calls, payload) in sums.items()
    ]


def _of_attention(target: Target, num_rows: int, num_held: int) -> Shape:
    """Return what a rank has of a microbatch where it attends: tp splits it too."""
    shape = target.skeleton.shape
    assert shape is not None, "cp splits a decoder"
    (rows, positions, num_heads), (_, _, num_groups) = (
        target.left_by_later("heads", (num_rows, num_held, number))
        for number in (shape.num_heads, shape.num_kv_heads)
    )
    return rows, positions, num_heads, num_groups, shape.head_dim


def _phases(phase: str, recompute: str, attention: Ring | Ulysses) -> tuple[str, ...]:
    """Return the phases of a step in which a collective of `phase` runs."""
    # `selective` keeps what attention gives, and a ring is inside of that.
    kept = ("none", "selective") if isinstance(attention, Ring) else ("none",)
    is_again = phase == "forward" and recompute not in kept
    return ("forward", "backward") if is_again else (phase,)


@functools.lru_cache(maxsize=1 << 12)
def _entries(
    kind: type[Ring] | type[Ulysses], num_ranks: int, shape: Shape, dtype: torch.dtype
) -> list[Entry]:
    """Return what attention sends of one microbatch."""
    comm = Counting({"cp": num_ranks})
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
