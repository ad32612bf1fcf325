"""Reduce tensors that this process sees, in the order that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 512 << 10
"""Bytes that are reduced at a time: two terms of this size stay in the cache of a core."""

REDUCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""Name of a reduction -> what combines two terms."""


def reduce_into(reduction: str, terms: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Fill each of `outs` with the reduction of the terms, in their order; chunk by chunk.

    All are one-dimensional and of one size. The first out is perhaps the first term itself, and no
    other term; the others may be any.
    """
    combine, size = REDUCTIONS[reduction], max(1, CHUNK_BYTES // outs[0].itemsize)
    chunks = zip(*(tensor.split(size) for tensor in (*terms, *outs)), strict=True)
    for parts in chunks:
        (first, second, *others), (total, *copies) = parts[: len(terms)], parts[len(terms) :]
        combine(first, second, out=total)
        for term in others:
            combine(total, term, out=total)
        for copy in copies:
            copy.copy_(total)
