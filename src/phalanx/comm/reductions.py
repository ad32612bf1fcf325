"""Reduce tensors in this process's memory, in a fixed order of terms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 512 << 10
"""Bytes per chunk of a reduction that rereads partial sums: two chunks fit in a core's cache."""

_PIECE: Final = 1 << 14
"""Elements per norm on a CPU, whose kernel adds sequentially in 32 bits: a norm of 38 million
elements is 0.3 % too small with p = 2 and 10 % with p = 1. In 64 bits it takes several times as
long."""

REDUCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""Name of a reduction -> function that combines two terms."""


def reduce_into(reduction: str, terms: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Fill each of `outs` with the reduction of `terms`, combined in their order.

    All tensors have one shape. The first out may be the first term, but no other term; the other
    outs may be any terms.
    """
    combine, size = REDUCTIONS[reduction], max(1, CHUNK_BYTES // max(1, outs[0][:1].nbytes))
    if len(terms) == 2 and len(outs) == 1:  # no partial sum is read again
        combine(*terms, out=outs[0])
        return
    # Chunk by chunk, not term by term: the partial sum is read again for each term, and stays in
    # the cache. The order of terms is the same for each element, so chunks change no bit.
    chunks = zip(*(tensor.split(size) for tensor in (*terms, *outs)), strict=True)
    for parts in chunks:
        (first, second, *others), (total, *copies) = parts[: len(terms)], parts[len(terms) :]
        combine(first, second, out=total)
        for term in others:
            combine(total, term, out=total)
        for copy in copies:
            copy.copy_(total)


def power_sum(shards: Sequence[Tensor], p: float) -> Tensor:
    """Return sum |x|^p over all elements of `shards`, or max |x| for p = inf, as float64.

    `shards` has at least one tensor. Without elements the result is 0.
    """
    total = torch.zeros((), dtype=torch.float64, device=shards[0].device)
    flats: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for shard in shards:
        if shard.numel():  # an uneven shard may be empty
            flats[shard.dtype].append(shard.reshape(-1))
    for dtype, each in flats.items():
        # The norm of each flat tensor, on a CPU of each of its pieces, in their order:
        #
        #   flat     | piece 0 | piece 1 | piece 2 | rest |
        #              one kernel for rows [3, _PIECE]   one kernel for the rests of all tensors
        #
        # A call for each piece would take longer. On a GPU a whole tensor is its rest.
        wide = torch.promote_types(dtype, torch.float32)
        rows: list[Tensor | None] = []
        rests: list[Tensor] = []
        for flat in each:
            num = flat.numel() // _PIECE if flat.device.type == "cpu" else 0
            if num:
                whole = flat[: num * _PIECE].view(num, _PIECE)
                rows.append(torch.linalg.vector_norm(whole, p, dim=1, dtype=wide))
            if len(rest := flat[num * _PIECE :]):
                rows.append(None)
                rests.append(rest)
        of_rests = iter(torch._foreach_norm(rests, p, wide) if rests else ())  # pyright: ignore[reportPrivateUsage]
        norms = torch.cat([next(of_rests).view(1) if row is None else row for row in rows]).double()
        total = total.maximum(norms.max()) if math.isinf(p) else total + norms.pow(p).sum()
    return total
