"""Which server holds which part of the weights: weighted rendezvous hashing of chunks.

Every chunk goes to the server with the highest score, -w / ln h(server, chunk), of a hash h in
(0, 1) and the server's weight w: servers get chunks in proportion to their weights, and where one
comes or goes, only the chunks that it gets or had move (Thaler and Ravishankar, Using name-based
mappings to increase hit rates, 1998; Schindelhauer and Schomaker, Weighted distributed hash tables,
2005). All who know the servers compute the same placement, and none is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a whole chunk."""

CHUNK_ROWS: Final = 256
"""Rows of a chunk of a table, at most: ids often lie in the order of their frequency, and the rows
that most samples look up are to be on all servers."""


@dataclass(frozen=True)
class WeightRange:
    """A range of the elements of a group of parameters, which lie one after the other."""

    group: int
    begin: int
    end: int


def chunks_of(
    sizes: Sequence[int], itemsize: int, chunk_bytes: int = CHUNK_BYTES,
    widths: Mapping[int, int] | None = None,
) -> list[WeightRange]:  # fmt: skip
    """Cut groups of these numbers of elements; only the last chunk of each may be smaller.

    A group that has a width is a table, and cut between rows.
    """
    found: list[WeightRange] = []
    for group, size in enumerate(sizes):
        width = (widths or {}).get(group)
        most = max(1, chunk_bytes // (itemsize * (width or 1)))
        if width is not None:
            most = min(most, CHUNK_ROWS) * width
        found += [WeightRange(group, at, min(at + most, size)) for at in range(0, size, most)]
    return found


def ranked(key: str, weights: Mapping[str, float]) -> list[str]:
    """Return the servers, the one that a key goes to first, and who follows where it is lost."""
    return sorted(weights, key=lambda name: (-_score(key, name, weights[name]), name))


def _score(key: str, name: str, weight: float) -> float:
    digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 0.5) / 2**64
    return -weight / math.log(share)


def place(
    chunks: Sequence[WeightRange], weights: Mapping[str, float]
) -> dict[str, list[WeightRange]]:
    """Return the chunks of each server, in their order."""
    placed: dict[str, list[WeightRange]] = {name: [] for name in weights}
    for number, chunk in enumerate(chunks):
        placed[ranked(f"chunk {number}", weights)[0]].append(chunk)
    return placed
