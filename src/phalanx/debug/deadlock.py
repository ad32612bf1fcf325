"""Find deadlocks: ranks that wait for each other in a cycle, and so will never continue.

A rank that waits for long says so in the store: for whom, and what to look at to know whether the
other is still to come. Whoever waits follows these from rank to rank, and looks whether they lead
back to itself (wait-for graph; Coffman et al., System Deadlocks, 1971).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist


class Edge(NamedTuple):
    """What a rank that waits needs of another.

    Attributes:
        rank: the other.
        key: of the store.
        is_there: whether the other is still to come while the key is there, or while it is not.
    """

    rank: int
    key: str
    is_there: bool


class WaitGraph:
    """What the ranks of a job wait for, as this rank says and sees it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._num_waits = 0
        self._is_known = False

    def begin(self) -> None:
        """Begin another wait of this rank."""
        self._num_waits += 1

    def end(self) -> None:
        """End the wait."""
        if self._is_known:  # set and not deleted: another rank may be about to get it
            self._store.set(f"waits/{self._rank}", "")
            self._is_known = False

    def cycle(self, edges: Sequence[Edge], words: str) -> dict[int, str]:
        """Say that this rank waits, and return the cycle that it waits in, if there is one.

        What a rank waits for is open until it comes, and never again in the same wait. So where
        waits are open twice, and are the same, all were open at a time in between.

        Returns:
            Ranks, from this one on, each of which waits for the next and the last for this one,
            and their waits in words; empty without a cycle.
        """
        self._is_known = True
        self._store.set(f"waits/{self._rank}", json.dumps([self._num_waits, words, edges]))
        ranks = self._follow(edges)
        if not ranks:
            return {}
        waits = [self._read(rank) for rank in ranks]
        own = next(edge for edge in edges if edge.rank == ranks[1])
        is_open = all(waits) and self._is_open(own) and ranks == self._follow(edges)
        if not is_open or waits != [self._read(rank) for rank in ranks]:
            return {}
        return {rank: json.loads(text)[1] for rank, text in zip(ranks, waits, strict=True)}

    def _follow(self, edges: Sequence[Edge]) -> list[int]:
        """Return ranks from this one, which has `edges`, each of which waits for the next.

        The last waits for this one. Where a rank waits for this one among many, no other is asked
        for.
        """
        came_from = {edge.rank: self._rank for edge in edges}
        found = list(came_from)
        while found and self._rank not in came_from:
            rank = found.pop(0)
            text = self._read(rank)
            theirs = [Edge(*edge) for edge in json.loads(text)[2]] if text else []
            for edge in sorted(theirs, key=lambda edge: edge.rank != self._rank):
                if edge.rank not in came_from and self._is_open(edge):
                    came_from[edge.rank] = rank
                    found.append(edge.rank)
                if self._rank in came_from:
                    break
        if self._rank not in came_from:
            return []
        ranks = [came_from[self._rank]]
        while ranks[-1] != self._rank:
            ranks.append(came_from[ranks[-1]])
        return ranks[::-1]

    def _is_open(self, edge: Edge) -> bool:
        """Return whether what a rank needs of another is still to come."""
        return self._store.check([edge.key]) == edge.is_there

    def _read(self, rank: int) -> str:
        key = f"waits/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
