"""The sizes of an uneven all-to-all, in which each pair of ranks exchanges its own number of rows.

                 to rank 0  1  2
    from rank 0          2  0  3      rank 0 sends     |0 0|2 2 2|        5 rows, sorted by target
         rank 1          4  1  0      rank 0 receives  |0 0|1 1 1 1|      6 rows, sorted by source
         rank 2          0  0  0      rank 2 sends nothing, and takes part

All ranks know the full matrix: of routed rows each gathers it once from all others, and of matrices
that move to their owners each computes it. So what one rank sends and what another expects cannot
differ, a reader of shared memory finds its rows in the memory of a peer, and the transposed matrix
has the sizes of the way back.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows that the ranks of an axis send each other, equal on all of them.

    Attributes:
        groups: for each rank, the rows that it sends of each group; the number of ranks N divides
            the number of groups, and rank r receives the r-th part of the groups, as of experts.
    """

    groups: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """The rows that each rank, the first index, sends to each rank, the second."""
        size = len(self.groups[0]) // len(self.groups)
        return tuple(
            tuple(sum(row[at : at + size]) for at in range(0, len(row), size))
            for row in self.groups
        )

    @functools.cached_property
    def reversed(self) -> RowCounts:
        """The counts that return every row to the rank from which it came."""
        return RowCounts(tuple(zip(*self.matrix, strict=True)))

    def sent(self, coord: int) -> list[int]:
        """Return the rows that the rank at `coord` sends to each rank."""
        return list(self.matrix[coord])

    def received(self, coord: int) -> list[int]:
        """Return the rows that the rank at `coord` receives from each rank."""
        return [row[coord] for row in self.matrix]

    def received_groups(self, coord: int) -> list[Sequence[int]]:
        """Return, for each source, the rows of each group of the rank at `coord`."""
        size = len(self.groups[0]) // len(self.groups)
        return [row[coord * size : (coord + 1) * size] for row in self.groups]

    @staticmethod
    def even(num_ranks: int, num_groups: int, num_rows: int) -> RowCounts:
        """Return the counts of ranks that each spread `num_rows` rows evenly over the groups."""
        each, left = divmod(num_rows, num_groups)
        return RowCounts((tuple(each + (at < left) for at in range(num_groups)),) * num_ranks)


_NOTED: Final[ContextVar[list[RowCounts] | None]] = ContextVar("noted counts", default=None)


@contextmanager
def noted() -> Generator[list[RowCounts]]:
    """Yield a list to which `Comm.gather_counts` adds the counts of each call inside the block.

    Only calls count that a backward follows, and no calls of recomputation.
    """
    counts = list[RowCounts]()
    token = _NOTED.set(counts)
    try:
        yield counts
    finally:
        _NOTED.reset(token)


def note(counts: RowCounts) -> RowCounts:
    """Add `counts` to the list of `noted`, if any, and return them."""
    # Private: -1 outside of backward; tests/comm/test_row_counts.py pins it.
    is_recomputed = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
    seen = _NOTED.get()
    if seen is not None and torch.is_grad_enabled() and not is_recomputed:
        seen.append(counts)
    return counts
