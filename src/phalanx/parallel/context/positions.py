"""Assignment of the positions of a row to the ranks of cp.

A row is cut into equal chunks, and each rank holds some of them:

    contiguous rank r holds chunk r of N
    zig-zag    rank r holds chunks r and 2N - 1 - r of 2N: under a causal mask one attends to few
               keys and the other to many, so that all ranks have the same amount of work

A row is padded at its end to a multiple of the number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionOrder:
    """Assignment of the chunks of a row to ranks.

    Attributes:
        chunks: chunk numbers of each rank, in row order; every rank has the same number of chunks.
    """

    chunks: tuple[tuple[int, ...], ...]

    @property
    def num_chunks(self) -> int:
        """Number of chunks in a row."""
        return sum(map(len, self.chunks))

    def padded(self, length: int) -> int:
        """Return `length` rounded up to a multiple of the number of chunks."""
        return -(-length // self.num_chunks) * self.num_chunks

    def num_held(self, length: int) -> int:
        """Return the number of positions of a row that each rank holds, with padding."""
        return self.padded(length) // len(self.chunks)

    def positions(self, rank: int, num_held: int, device: torch.device | None = None) -> Tensor:
        """Return the `num_held` positions of the padded row that a rank holds, int64 [T]."""
        size = num_held // len(self.chunks[rank])
        parts = [
            torch.arange(chunk * size, (chunk + 1) * size, device=device)
            for chunk in self.chunks[rank]
        ]
        return torch.cat(parts)

    def gathered_index(self, num_held: int, device: torch.device | None = None) -> Tensor:
        """Return the index of each position of the padded row in the all-gathered positions."""
        # Zig-zag, N = 2, one position a chunk: gathered 0 3 | 1 2, so the index is 0 2 3 1.
        ranks = range(len(self.chunks))
        return torch.cat([self.positions(rank, num_held, device) for rank in ranks]).argsort()


def contiguous(num_ranks: int) -> PositionOrder:
    """Return the order in which rank r holds chunk r of N."""
    return PositionOrder(tuple((rank,) for rank in range(num_ranks)))


def zig_zag(num_ranks: int) -> PositionOrder:
    """Return the order in which rank r holds chunks r and 2N - 1 - r of 2N."""
    return PositionOrder(tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)))
