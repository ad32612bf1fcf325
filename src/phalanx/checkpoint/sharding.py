"""Plan which rank writes which shard of a checkpoint, and which saved shards each rank reads.

The functions are pure and need no process group. The `Sharding` of a tensor determines the shard
of every rank, so all ranks compute the same plan without communication:

    shardings -> writers     each shard is written once; bytes are balanced over its replicas
    shardings -> layout      offsets and sizes of the shard that each writer stores
    layout, box -> reads     slices of saved shards that together cover a box of the full tensor
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

# Private, but PyTorch's only function that computes a rank's shard without a process group;
# tests/checkpoint/test_sharding.py pins its behavior.
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
)

from phalanx.checkpoint.tensor_file import SUFFIX, TensorInfo, in_order
from phalanx.errors import CheckpointError


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 for an empty shard."""
        return math.prod(self.sizes)


class ShardedAxis(NamedTuple):
    """A mesh axis that shards a tensor; rank r has coordinate `r // stride % size` on the axis."""

    placement: Any
    size: int
    stride: int


@dataclass(frozen=True)
class Sharding:
    """How a tensor is sharded over the ranks of a job; it is replicated on all other axes.

    Attributes:
        shape: shape of the full tensor.
        dtype: dtype of the tensor.
        axes: mesh axes that shard the tensor, in the order of the splits; empty if replicated.
        ranks: ranks of the pipeline stage that holds the tensor; None if all ranks hold it.
        is_buffer: whether a forward may update the tensor from a rank's own samples, so that
            replicas on different ranks may differ.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[ShardedAxis, ...] = ()
    ranks: range | None = None
    is_buffer: bool = False

    def box(self, rank: int) -> Box:
        """Return the box of the full tensor that `rank` stores."""
        coordinates = [rank // axis.stride % axis.size for axis in self.axes]
        return _box(self.shape, self.axes, tuple(coordinates))

    @property
    def shard_bytes(self) -> int:
        """Approximate bytes of the largest shard: the full size over the shards, rounded up."""
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
    """Return the sharding of a tensor; a tensor that is not a DTensor counts as replicated.

    Raises:
        CheckpointError: the DTensor has a Partial placement.
    """
    axes: list[ShardedAxis] = []
    if isinstance(tensor, DTensor):
        ranks = tensor.device_mesh.mesh
        for number, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise CheckpointError(f"a tensor to be saved is a partial sum: {placement}")
            if not placement.is_replicate() and (size := ranks.size(number)) > 1:
                first, second = ranks.movedim(number, 0).reshape(size, -1)[:2, 0].tolist()
                axes.append(ShardedAxis(placement, size, second - first))
    return Sharding(tuple(tensor.shape), tensor.dtype, tuple(axes))


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}{SUFFIX}"


class WritePlan:
    """The assignment of shards to writing ranks, equal on every rank.

    Tensors are assigned in order of falling size; each shard goes to the rank with the fewest bytes
    so far among the ranks that hold the shard. Exceptions: the first such rank writes replicated
    scalars, and shards of buffers, so that related buffers, such as a sum and its count, come from
    the same rank.
    """

    def __init__(self, shardings: Mapping[str, Sharding], num_ranks: int) -> None:
        self.shardings = dict(shardings)
        self.num_ranks = num_ranks
        # A tensor that fsdp2 shards and dp2 replicates, on ranks 0 .. 3:
        #
        #     rank             0    1    2    3
        #     shard            0    1    0    1
        #     bytes so far     5    9    7    2
        #     writes           0              1        of each shard the rank with the fewest bytes
        loads = np.zeros(num_ranks, np.int64)
        ranks = np.arange(num_ranks)

        @functools.cache
        def shard_numbers(axes: tuple[tuple[int, int], ...]) -> Any:
            """Return, for each rank, the index of the shard that the rank holds."""
            number = np.zeros(num_ranks, np.int64)
            for size, stride in axes:
                number = number * size + ranks // stride % size
            return number

        interned: dict[bytes, frozenset[int]] = {}
        dealt: dict[str, frozenset[int]] = {}
        by_size = sorted(self.shardings.items(), key=lambda item: (-item[1].shard_bytes, item[0]))
        for name, sharding in by_size:
            holders = ranks if sharding.ranks is None else np.array(sharding.ranks)
            if not sharding.axes:  # a reader needs all scalars: one file for all
                is_dealt = sharding.shape and not sharding.is_buffer
                first = int(loads[holders].argmin()) if is_dealt else 0
                chosen = holders[first : first + 1]
            else:
                axes = tuple((axis.size, axis.stride) for axis in sharding.axes)
                number = shard_numbers(axes)[holders]
                load = np.zeros_like(holders) if sharding.is_buffer else loads[holders]
                order = np.lexsort((holders, load, number))  # by shard, then load, then rank
                _, firsts = np.unique(number[order], return_index=True)
                chosen = np.sort(holders[order[firsts]])
            loads[chosen] += sharding.shard_bytes
            dealt[name] = interned.setdefault(chosen.tobytes(), frozenset(map(int, chosen)))
        self._writers = dealt

    def writes_of(self, rank: int) -> dict[str, TensorInfo]:
        """Return the tensors that `rank` writes, by name, in the order of its file."""
        return in_order(
            {
                name: TensorInfo(self.shardings[name].dtype, box.sizes)
                for name, writers in self._writers.items()
                if rank in writers and (box := self.shardings[name].box(rank)).num_elements
            }
        )

    def layouts(self) -> Mapping[str, ShardLayout]:
        """Return the saved shards and their files by tensor name; equal layouts are one object."""
        distinct: dict[Any, ShardLayout] = {}
        layouts: dict[str, ShardLayout] = {}
        for name, sharding in self.shardings.items():
            writers = self._writers[name]
            key = (sharding.shape, sharding.axes, id(writers))
            if key not in distinct:
                boxes = [(rank, sharding.box(rank)) for rank in sorted(writers)]
                shards = [
                    SavedShard(*box, file_of(rank)) for rank, box in boxes if box.num_elements
                ]
                distinct[key] = ShardLayout(sharding.shape, tuple(shards))
            layouts[name] = distinct[key]
        return layouts


class SavedShard(NamedTuple):
    """Offsets and sizes of a saved shard, and its file, where it has the tensor's name."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ShardLayout:
    """The shape of a saved tensor, and shards that cover it without overlap."""

    shape: tuple[int, ...]
    shards: tuple[SavedShard, ...]


class Read(NamedTuple):
    """A slice `source` of a saved shard, and the slice `target` of the box it is copied to."""

    shard: SavedShard
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def reads_of(layout: ShardLayout, box: Box) -> list[Read]:
    """Return the slices of saved shards that together cover a box of the full tensor."""
    # One dimension of a saved tensor in 3 shards, read by one of 2 ranks:
    #
    #     saved     [0 .. 4) [4 .. 8) [8 .. 12)
    #     box                    [6 ....... 12)
    #     reads               [6, 8) as 2:4 of shard 1 to 0:2    [8, 12) as 0:4 of shard 2 to 2:6
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
    """Return, for each file, the (tensor name, read) pairs that fill the `wanted` boxes."""
    known: dict[tuple[int, Box], list[Read]] = {}
    by_file: dict[str, list[tuple[str, Read]]] = defaultdict(list)
    for name, box in wanted.items():
        key = (id(layouts[name]), box)  # most tensors have the same layout as another
        if key not in known:
            known[key] = reads_of(layouts[name], box)
        for read in known[key]:
            by_file[read.shard.file].append((name, read))
    return by_file


def check_cover(layout: ShardLayout) -> str | None:
    """Return why the shards are not a complete grid of cuts of the tensor; None if they are."""
    shape, shards = layout.shape, layout.shards
    if any(not len(shard.offsets) == len(shard.sizes) == len(shape) for shard in shards):
        return "a shard does not have one offset and one size per dimension"
    if len({shard.file for shard in shards}) != len(shards):
        return "two shards are in one file"
    if len({shard.offsets for shard in shards}) != len(shards):
        return "shards overlap"
    # Shards that cover the tensor are the cells of a grid: the cuts of each dimension follow one
    # another, and there are as many shards as cells. So no pair of shards has to be compared.
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
        return "an empty tensor has shards"
    return None
