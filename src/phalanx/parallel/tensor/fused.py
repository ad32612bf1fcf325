"""Sharding of a weight that fuses several maps along one dimension, such as q, k and v.

Each map is split separately, so that a rank holds its heads of every map:

    parts 2+1+1 on two ranks    q0 q1 q2 q3 | k0 k1 | v0 v1
    rank 0                      q0 q1       | k0    | v0
    rank 1                      q2 q3       | k1    | v1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override


def maps_of(tensor: Tensor, parts: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    """Split `tensor` along `dim` into its fused maps, whose sizes have the proportions `parts`."""
    unit = tensor.shape[dim] // sum(parts)
    return tensor.split([unit * part for part in parts], dim)


def interleaved(full: Tensor, parts: Sequence[int], dim: int, num_ranks: int) -> Tensor:
    """Reorder fused maps along `dim` so that a contiguous shard has a shard of each map."""
    return torch.cat(_shards(full, parts, dim, num_ranks), dim)


def placement_of(parts: Sequence[int], dim: int) -> _StridedShard:
    """Return the placement with which DTensor reassembles the full tensor from fused shards.

    `_StridedShard` is private in PyTorch; tests/parallel/tensor/test_roles.py checks its behavior.
    """
    if len(set(parts)) == 1:
        return _StridedShard(dim, split_factor=len(parts))
    return _UnevenShard(parts, dim)


class _UnevenShard(_StridedShard):
    """A `_StridedShard` for fused maps of different sizes.

    `_StridedShard` decides which rank owns an element only in `_split_tensor`, overridden here. An
    `_UnevenShard` equals no placement of PyTorch, so that an operator that would convert one into a
    PyTorch placement raises.
    """

    def __init__(self, parts: Sequence[int], dim: int) -> None:
        super().__init__(dim, split_factor=sum(parts))  # gives shards the right sizes
        self.parts = tuple(parts)

    @override
    def __eq__(self, other: object) -> bool:
        same_kind = isinstance(other, _UnevenShard)
        return same_kind and (self.dim, self.parts) == (other.dim, other.parts)

    @override
    def __hash__(self) -> int:
        return hash((self.dim, self.parts))

    @override
    def _split_tensor(
        self,
        tensor: Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[Tensor], list[int]]:
        shards = _shards(tensor, self.parts, self.dim, num_chunks)
        return shards, [0] * num_chunks if with_padding else []


def _shards(full: Tensor, parts: Sequence[int], dim: int, num_ranks: int) -> list[Tensor]:
    chunks = [each.chunk(num_ranks, dim) for each in maps_of(full, parts, dim)]
    return [torch.cat(of_rank, dim) for of_rank in zip(*chunks, strict=True)]
