"""Who writes which shard of a checkpoint, and who reads which part of it: pure functions.

Nothing here needs a process group. A tensor's `Sharding` says how it lies over the ranks of a job,
so every rank knows by itself what each other one holds, and works out the same plan:

    shardings -> writers     each shard is written once, replicas share the work by bytes
    shardings -> layout      which shard of the full tensor each of those ranks has
    layout, box -> reads     which parts of which saved shards make up a box of the full tensor
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

# Private, and PyTorch's one account of what a rank holds that needs no process group;
# tests/checkpoint/test_sharding.py pins it.
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
)

from phalanx.checkpoint.tensor_file import SUFFIX, TensorInfo, in_order
from phalanx.errors import CheckpointError


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in it; 0 for a shard without rows."""
        return math.prod(self.sizes)


class ShardedAxis(NamedTuple):
    """A mesh axis that a tensor is split over; rank r has coordinate `r // stride % size` on it."""

    placement: Any
    size: int
    stride: int


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies over the ranks of a job; on all other axes they hold replicas.

    Attributes:
        shape: of the full tensor.
        dtype: of its elements.
        axes: that it is split over, in the order of the splits; none if each rank holds it whole.
        ranks: that hold it, the ranks of a stage of a pipeline; all if None.
        is_buffer: whether a forward may change it by the rows of a rank, so that it is no replica
            of what other ranks hold.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[ShardedAxis, ...] = ()
    ranks: range | None = None
    is_buffer: bool = False

    def box(self, rank: int) -> Box:
        """Return the shard that a rank holds."""
        coordinates = [rank // axis.stride % axis.size for axis in self.axes]
        return _box(self.shape, self.axes, tuple(coordinates))

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard, of the largest if they are uneven: nearly."""
        num_shards = math.prod(axis.size for axis in self.axes)
        return -(-math.prod(self.shape) // num_shards) * self.dtype.itemsize


@functools.lru_cache(1 << 16)
def _box(
    shape: tuple[int, ...], axes: tuple[ShardedAxis, ...], coordinates: tuple[int, ...]
) -> Box:
    if not axes:
        return Box((0,) * len(shape), shape)
    sizes, offsets = _compute_local_shape_and_global_offset(
        shape,
        [axis.size for axis in axes],
        list(coordinates),
        [axis.placement for axis in axes],
    )
    return Box(tuple(offsets), tuple(sizes))


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Return how a tensor lies over the ranks; a tensor that is no DTensor is whole on each.

    Raises:
        CheckpointError: the ranks hold terms of a sum.
    """
    axes: list[ShardedAxis] = []
    if isinstance(tensor, DTensor):
        ranks = tensor.device_mesh.mesh
        for number, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise CheckpointError(f"a tensor to be saved is a sum to come: {placement}")
            if not placement.is_replicate() and (size := ranks.size(number)) > 1:
                first, second = ranks.movedim(number, 0).reshape(size, -1)[:2, 0].tolist()
                axes.append(ShardedAxis(placement, size, second - first))
    return Sharding(tuple(tensor.shape), tensor.dtype, tuple(axes))


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}{SUFFIX}"


class WritePlan:
    """Who writes which shard; the same on every rank.

    The tensors are dealt out by falling size, each shard to the rank among its holders that has the
    fewest bytes so far. The first holder writes a shard of a buffer: buffers that belong together,
    as sums and counts do, then come from one rank.
    """

    def __init__(self, shardings: Mapping[str, Sharding], num_ranks: int) -> None:
        self.shardings = dict(shardings)
        self.num_ranks = num_ranks
        self._writers = _dealt(self.shardings, num_ranks)

    def writes_of(self, rank: int) -> dict[str, TensorInfo]:
        """Return what a rank writes, in the order of its file."""
        return in_order(
            {
                name: TensorInfo(self.shardings[name].dtype, box.sizes)
                for name, writers in self._writers.items()
                if rank in writers and (box := self.shardings[name].box(rank)).num_elements
            }
        )

    def layouts(self) -> Mapping[str, ShardLayout]:
        """Return which file holds which shard, by tensor; equal layouts are one object."""
        made: dict[Any, ShardLayout] = {}
        layouts: dict[str, ShardLayout] = {}
        for name, sharding in self.shardings.items():
            writers = self._writers[name]
            key = (sharding.shape, sharding.axes, id(writers))
            if key not in made:
                boxes = [(rank, sharding.box(rank)) for rank in sorted(writers)]
                shards = [
                    SavedShard(*box, file_of(rank)) for rank, box in boxes if box.num_elements
                ]
                made[key] = ShardLayout(sharding.shape, tuple(shards))
            layouts[name] = made[key]
        return layouts


def _dealt(shardings: Mapping[str, Sharding], num_ranks: int) -> dict[str, frozenset[int]]:
    """Return the ranks that write each tensor; equal sets are one object."""
    loads = np.zeros(num_ranks, np.int64)
    ranks = np.arange(num_ranks)
    numbers = functools.cache(functools.partial(_shard_numbers, num_ranks=num_ranks))
    interned: dict[bytes, frozenset[int]] = {}
    dealt: dict[str, frozenset[int]] = {}
    by_size = sorted(shardings.items(), key=lambda item: (-item[1].shard_bytes, item[0]))
    for name, sharding in by_size:
        here = ranks if sharding.ranks is None else np.array(sharding.ranks)
        if not sharding.axes:  # a reader wants all scalars, so one file has them
            is_dealt = sharding.shape and not sharding.is_buffer
            first = int(loads[here].argmin()) if is_dealt else 0
            chosen = here[first : first + 1]
        else:
            number = numbers(tuple((axis.size, axis.stride) for axis in sharding.axes))[here]
            load = np.zeros_like(here) if sharding.is_buffer else loads[here]
            order = np.lexsort((here, load, number))  # by shard, then load, then rank
            _, firsts = np.unique(number[order], return_index=True)
            chosen = np.sort(here[order[firsts]])
        loads[chosen] += sharding.shard_bytes
        dealt[name] = interned.setdefault(chosen.tobytes(), frozenset(map(int, chosen)))
    return dealt


def _shard_numbers(axes: tuple[tuple[int, int], ...], num_ranks: int) -> Any:
    """Return the number of the shard that each rank holds."""
    ranks, number = np.arange(num_ranks), np.zeros(num_ranks, np.int64)
    for size, stride in axes:
        number = number * size + ranks // stride % size
    return number


class SavedShard(NamedTuple):
    """A shard in a file, under the name of its tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ShardLayout:
    """The shape of a saved tensor, and the shards that cover it, each part once."""

    shape: tuple[int, ...]
    shards: tuple[SavedShard, ...]


class Read(NamedTuple):
    """A part of a saved shard, and where it belongs in the box to read."""

    shard: SavedShard
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def reads_of(layout: ShardLayout, box: Box) -> list[Read]:
    """Return the parts of saved shards that make up a box of the full tensor."""
    reads: list[Read] = []
    for shard in layout.shards if box.num_elements else ():
        sources: list[slice] = []
        targets: list[slice] = []
        for start, size, at, length in zip(*shard[:2], *box, strict=True):
            begin, end = max(start, at), min(start + size, at + length)
            if begin >= end:
                break
            sources.append(slice(begin - start, end - start))
            targets.append(slice(begin - at, end - at))
        else:
            reads.append(Read(shard, tuple(sources), tuple(targets)))
    return reads


def plan_reads(
    layouts: Mapping[str, ShardLayout], wanted: Mapping[str, Box]
) -> dict[str, list[tuple[str, Read]]]:
    """Return what to read from which file for a box of each tensor: its name, and the part."""
    known: dict[tuple[int, Box], list[Read]] = {}
    by_file: dict[str, list[tuple[str, Read]]] = defaultdict(list)
    for name, box in wanted.items():
        key = (id(layouts[name]), box)  # most tensors lie as others do
        if key not in known:
            known[key] = reads_of(layouts[name], box)
        for read in known[key]:
            by_file[read.shard.file].append((name, read))
    return by_file


def check_cover(layout: ShardLayout) -> str | None:
    """Say how shards fail to make up a tensor: they must be cuts along each dimension, crossed."""
    shape, shards = layout.shape, layout.shards
    if any(not len(shard.offsets) == len(shard.sizes) == len(shape) for shard in shards):
        return "a shard has more or fewer offsets or sizes than that"
    if len({shard.file for shard in shards}) != len(shards):
        return "a file is named twice"
    if len({shard.offsets for shard in shards}) != len(shards):
        return "shards overlap"
    num_cells = 1
    for dim, length in enumerate(shape):
        cuts = sorted({(shard.offsets[dim], shard.sizes[dim]) for shard in shards})
        end = 0
        for begin, size in cuts:
            if begin != end or size < 1:
                return f"shards overlap or leave gaps in dimension {dim}"
            end = begin + size
        if end != length and math.prod(shape):
            return f"shards cover {end} of {length} in dimension {dim}"
        num_cells *= len(cuts)
    if math.prod(shape) and num_cells != len(shards):
        return f"there are {len(shards)} shards, expected {num_cells}"
    if not math.prod(shape) and shards:
        return "there are shards of nothing"
    return None
