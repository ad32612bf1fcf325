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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

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
    chunks: list[WeightRange] = []
    for group, size in enumerate(sizes):
        width = (widths or {}).get(group)
        most = max(1, chunk_bytes // (itemsize * (width or 1)))
        if width is not None:
            most = min(most, CHUNK_ROWS) * width
        chunks += [WeightRange(group, at, min(at + most, size)) for at in range(0, size, most)]
    return chunks


def ranked(key: str, weights: Mapping[str, float]) -> list[str]:
    """Return the servers for a key in order of preference: each is used if the ones before fail."""

    def order(name: str) -> tuple[float, str]:
        digest = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
        share = (int.from_bytes(digest) + 0.5) / 2**64
        return weights[name] / math.log(share), name

    return sorted(weights, key=order)


def place(
    chunks: Sequence[WeightRange], weights: Mapping[str, float]
) -> dict[str, list[WeightRange]]:
    """Return server name -> its chunks, in the order of `chunks`."""
    placed: dict[str, list[WeightRange]] = {name: [] for name in weights}
    for number, chunk in enumerate(chunks):
        placed[ranked(f"chunk {number}", weights)[0]].append(chunk)
    return placed


class PlacedWeights:
    """The placement of weights, which are flat groups of elements and tables, on shards.

    Attributes:
        tables: shape of each table; tables are the last groups.
        num_flat: number of groups that are not tables.
        numels: number of elements of each group.
        places: placement of the rows of each table.
        num_shards: number of shards.
    """

    def __init__(
        self, sizes: Sequence[int], tables: Sequence[Sequence[int]], itemsize: int,
        chunk_bytes: int, homes: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Place groups with `sizes` elements, and tables, on servers; `homes` is name -> weight."""
        self.tables, self.num_flat, self.num_shards = tables, len(sizes), len(homes)
        self.numels = [*sizes, *(rows * width for rows, width in tables)]
        widths = {len(sizes) + number: width for number, (_, width) in enumerate(tables)}
        placed = place(chunks_of(self.numels, itemsize, chunk_bytes, widths), homes)
        self._chunks: list[list[list[WeightRange]]] = [
            [[chunk for chunk in placed[name] if chunk.group == g] for g in range(len(self.numels))]
            for name in sorted(placed)
        ]
        self.places = [
            RowPlaces.of([each[group] for each in self._chunks], width)
            for group, width in widths.items()
        ]

    def sizes(self, shard: int) -> list[int]:
        """Return the number of elements of each group on a shard."""
        return [sum(c.end - c.begin for c in chunks) for chunks in self._chunks[shard]]

    def parts(self, shard: int, flats: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return views of a shard's chunks of a flat tensor per group, without tables."""
        assert len(flats) == self.num_flat
        return [self.pieces(shard, group, flat) for group, flat in enumerate(flats)]

    def pieces(self, shard: int, group: int, flat: Tensor) -> list[Tensor]:
        """Return views of a shard's chunks of a group's flat tensor, or of one element per row."""
        unit = self.numels[group] // max(1, flat.numel())
        chunks = self._chunks[shard][group]
        return [flat[chunk.begin // unit : chunk.end // unit] for chunk in chunks]

    def cut(self, shard: int, group: int, flat: Tensor) -> Tensor:
        """Return `pieces` concatenated."""
        return torch.cat(self.pieces(shard, group, flat) or [flat[:0]])

    def of_shards(self, table: int, grad: Tensor) -> list[list[Tensor]]:
        """Return each shard's rows and values of a table's sparse gradient, see table.py."""
        rows, values = grad.indices()[0], grad.values()
        parts = [[rows[:0], values[:0].view(-1)] for _ in range(self.num_shards)]
        for shard, which, there in self.places[table].deal(rows):
            parts[shard] = [there, values[which].view(-1)]
        return parts


@dataclass(frozen=True)
class RowPlaces:
    """The placement of the rows of a table, which is cut into chunks of equally many rows.

    Attributes:
        chunk_rows: rows per chunk; the last chunk may have fewer.
        shards: shard of each chunk.
        begins: index, on its shard, of each chunk's first row.
    """

    chunk_rows: int
    shards: Tensor
    begins: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Sequence[WeightRange]], width: int) -> RowPlaces:
        """Create from the table's chunks on each shard; a row has `width` elements."""
        # A table of 5 chunks of 256 rows, on two servers, each of which stores its chunks end to
        # end:
        #
        #     row        0    256    512    768    1024
        #     shard      1      0      0      1       0
        #     begins     0      0    256    256     512        row 800 is 256 + 800 % 256 on shard 1
        placed: list[tuple[int, int, int]] = []  # first row, shard, and first row on the shard
        num_rows = 0
        for shard, each in enumerate(chunks):
            at = 0
            for chunk in each:
                placed.append((chunk.begin // width, shard, at))
                at += (chunk.end - chunk.begin) // width
            num_rows += at
        begins, shards, theirs = torch.tensor(sorted(placed)).view(-1, 3).T
        chunk_rows = int(begins[1]) if len(begins) > 1 else max(1, num_rows)
        return cls(chunk_rows, shards, theirs)

    def deal(self, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (shard, positions in `rows`, indices on the shard) per shard with any of `rows`."""
        chunks = rows // self.chunk_rows
        shards, there = self.shards[chunks], self.begins[chunks] + rows % self.chunk_rows
        for shard in shards.unique().tolist():
            which = (shards == shard).nonzero()[:, 0]
            yield shard, which, there[which]
