"""Which positions of a row each rank of cp holds.

A row is cut into equal chunks, and a rank holds some of them:

    in line    rank r holds chunk r of N
    zig-zag    rank r holds chunks r and 2N - 1 - r of 2N: one that sees little under a causal mask
               and one that sees much, so that all ranks have the same to compute

A row whose length the chunks do not divide is padded at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionOrder:
    """Which chunks of a row each rank holds.

    Attributes:
        chunks: of each rank, in the order of the row; as many for each.
    """

    chunks: tuple[tuple[int, ...], ...]

    @property
    def num_chunks(self) -> int:
        """Chunks in a row."""
        return sum(map(len, self.chunks))

    def padded(self, length: int) -> int:
        """Return the least length, no less than `length`, that the chunks divide."""
        return -(-length // self.num_chunks) * self.num_chunks

    def held(self, length: int) -> int:
        """Return how many positions of a row of `length` each rank holds, padding included."""
        return self.padded(length) // len(self.chunks)

    def positions(self, rank: int, num_held: int, device: torch.device | None = None) -> Tensor:
        """Return which positions of the padded row a rank holds that holds `num_held`, [T]."""
        size = num_held // len(self.chunks[rank])
        parts = [
            torch.arange(chunk * size, (chunk + 1) * size, device=device)
            for chunk in self.chunks[rank]
        ]
        return torch.cat(parts)

    def places(self, num_held: int, device: torch.device | None = None) -> Tensor:
        """Return the index of each position of the padded row in all ranks' positions in turn."""
        ranks = range(len(self.chunks))
        return torch.cat([self.positions(rank, num_held, device) for rank in ranks]).argsort()


def in_line(num_ranks: int) -> PositionOrder:
    """Return the order in which rank r holds the r-th part of a row."""
    return PositionOrder(tuple((rank,) for rank in range(num_ranks)))


def zig_zag(num_ranks: int) -> PositionOrder:
    """Return the order in which rank r holds chunks r and 2N - 1 - r of 2N."""
    return PositionOrder(tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)))
