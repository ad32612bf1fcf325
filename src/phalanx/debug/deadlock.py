"""Find deadlocks: ranks that wait for each other in a cycle, and so will never continue.

A rank that waits for long writes the edges of a wait-for graph to the store: the ranks for which
it waits, and for each a store key that shows whether the wait continues. Each waiting rank follows
the edges from rank to rank, to find a path back to itself (Coffman et al., System Deadlocks, 1971).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist


class Edge(NamedTuple):
    """An edge of the wait-for graph: a waiting rank needs an action of another rank.

    Attributes:
        rank: the rank that is waited for.
        key: store key that the other rank sets or deletes.
        waits_while_set: True if the wait lasts while the key exists, False if until it exists.
    """

    rank: int
    key: str
    waits_while_set: bool


class WaitGraph:
    """The wait-for graph of a job in its store, with the waits of this rank."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._num_waits = 0
        self._is_known = False

    def begin(self) -> None:
        """Start a new wait of this rank."""
        self._num_waits += 1

    def end(self) -> None:
        """End the wait, and remove its edges."""
        if self._is_known:  # not deleted, because `get` of a deleted key would block another rank
            self._store.set(f"waits/{self._rank}", "")
            self._is_known = False

    def cycle(self, edges: Sequence[Edge], description: str) -> dict[int, str]:
        """Store the `edges` of this rank's wait, and return the cycle of waits that contains it.

        Within one wait, an edge that has closed never reopens. So if the edges of a cycle are open
        in two successive reads of the same waits, all were open at one time between the reads.

        Returns:
            Rank -> description of its wait, in the order of the cycle from this rank on: each rank
            waits for the next, the last for this rank. Empty without a cycle.
        """
        self._is_known = True
        self._store.set(f"waits/{self._rank}", json.dumps([self._num_waits, description, edges]))
        ranks = self._follow(edges)
        if not ranks:
            return {}
        waits = [self._read(rank) for rank in ranks]
        first = next(edge for edge in edges if edge.rank == ranks[1])
        is_open = all(waits) and self._is_open(first) and ranks == self._follow(edges)
        if not is_open or waits != [self._read(rank) for rank in ranks]:
            return {}
        return {rank: json.loads(text)[1] for rank, text in zip(ranks, waits, strict=True)}

    def _follow(self, edges: Sequence[Edge]) -> list[int]:
        """Return a cycle of ranks, from this rank on, each waiting for the next; empty without one.

        `edges` are the edges of this rank. The search is breadth-first, and checks an edge to this
        rank before a rank's other edges.
        """
        # rank 0 waits for 1, 1 for 2 and 3, 2 for 0
        #
        # queue     1        2, 3        came_from[0] = 2: a path back
        # cycle     0 <- 2 <- 1 <- 0, read backward: 0, 1, 2
        came_from = {edge.rank: self._rank for edge in edges}
        queue = list(came_from)
        while queue and self._rank not in came_from:
            rank = queue.pop(0)
            text = self._read(rank)
            theirs = [Edge(*edge) for edge in json.loads(text)[2]] if text else []
            for edge in sorted(theirs, key=lambda edge: edge.rank != self._rank):
                if edge.rank not in came_from and self._is_open(edge):
                    came_from[edge.rank] = rank
                    queue.append(edge.rank)
                if self._rank in came_from:
                    break
        if self._rank not in came_from:
            return []
        ranks = [came_from[self._rank]]
        while ranks[-1] != self._rank:
            ranks.append(came_from[ranks[-1]])
        return ranks[::-1]

    def _is_open(self, edge: Edge) -> bool:
        """Return whether the wait of an edge continues."""
        return self._store.check([edge.key]) == edge.waits_while_set

    def _read(self, rank: int) -> str:
        key = f"waits/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
