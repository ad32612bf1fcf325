"""The placement of weights on servers by weighted rendezvous hashing of chunks.

Each chunk is placed on the server with the highest score, -w / ln h(server, chunk), with a hash h
in (0, 1) and the server's weight w: servers get chunks in proportion to their weights, and if a
server joins or leaves, only the chunks that it gets or had move (Thaler and Ravishankar, Using
name-based mappings to increase hit rates, 1998; Schindelhauer and Schomaker, Weighted distributed
hash tables, 2005). Every process with the list of servers computes the same placement, so it is
never sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a full chunk."""

CHUNK_ROWS: Final = 256
"""Most rows in a chunk of a table: ids are often sorted by frequency, and small chunks distribute
the most used rows over all servers."""


@dataclass(frozen=True)
class WeightRange:
    """A range of the elements of a group of parameters, which are concatenated."""

    group: int
    begin: int
    end: int


def chunks_of(
    sizes: Sequence[int], itemsize: int, chunk_bytes: int = CHUNK_BYTES,
    widths: Mapping[int, int] | None = None,
) -> list[WeightRange]:  # fmt: skip
    """Cut groups with `sizes` elements into chunks; only the last of each group may be smaller.

    A group in `widths` is a table with rows of that width, and is cut between rows.
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
    """Return the servers for a key in order of preference: each is used if the ones before fail."""
    return sorted(weights, key=lambda name: (-_score(key, name, weights[name]), name))


def _score(key: str, name: str, weight: float) -> float:
    digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 0.5) / 2**64
    return -weight / math.log(share)


def place(
    chunks: Sequence[WeightRange], weights: Mapping[str, float]
) -> dict[str, list[WeightRange]]:
    """Return server name -> its chunks, in the order of `chunks`."""
    placed: dict[str, list[WeightRange]] = {name: [] for name in weights}
    for number, chunk in enumerate(chunks):
        placed[ranked(f"chunk {number}", weights)[0]].append(chunk)
    return placed
