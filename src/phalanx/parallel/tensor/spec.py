"""Sharding of a tensor over the sub-axes of tp: arithmetic only, without process groups or tensors.

A `Spec` is written as in the docstrings of the layout files, with the axes in brackets after each
dimension, outer axis first:

    Spec("B[depth row] T D[col]")    rows over tp_depth and then tp_row, features over tp_col
    Spec("F[tp] D")                  the first dimension over the one axis tp, the second full

B is the rows (samples) of a batch and T the positions in a row; the other letters are features. A
dimension is cut over one axis after another, as `torch.chunk` and DTensor cut it: the last shards
may be short or empty. Rows and positions are first padded to a multiple of the number of shards
(`Layout.padded`), so that every rank has the same number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.comm import Comm


@dataclass(frozen=True, init=False)
class Spec:
    """Axes that split each dimension of a tensor; see the module docstring.

    Attributes:
        axes: for each dimension, the axes that split it, outer first.
    """

    axes: tuple[tuple[str, ...], ...]

    def __init__(self, text: str) -> None:
        dims = re.findall(r"[A-Z](?:\[[a-z]+(?: [a-z]+)*\])?", text)
        if " ".join(dims) != text:
            raise ValueError(f"a spec is '{text}'; expected one such as 'B[depth row] T D[col]'")
        axes = tuple(
            tuple(name if name == "tp" else f"tp_{name}" for name in dim[2:-1].split())
            for dim in dims
        )
        object.__setattr__(self, "axes", axes)

    @classmethod
    def of(cls, *axes: tuple[str, ...]) -> Spec:
        """Return the spec of a tensor; `axes` has one tuple for each dimension."""
        spec = cls("")
        object.__setattr__(spec, "axes", axes)
        return spec

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes that split the rows of an activation [B, T, D]."""
        return self.axes[0]

    @property
    def positions(self) -> str | None:
        """Axis that splits the positions of an activation."""
        return next(iter(self.axes[1]), None)

    @property
    def features(self) -> str | None:
        """Axis that splits the features of an activation."""
        return next(iter(self.axes[2]), None)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full tensor."""
        return not any(self.axes)

    def num_shards(self, dim: int, comm: Comm) -> int:
        """Return the number of shards of a dimension."""
        return math.prod(comm.size(axis) for axis in self.axes[dim])

    def shard(self, dim: int, size: int, comm: Comm) -> range:
        """Return the indices that this rank holds along dimension `dim`, of full length `size`."""
        # 8 features as D[z x] on 2 x 2, at z = 1, x = 0:  0 to 7  ->  4 to 7  ->  4 5.
        held = range(size)
        for axis in self.axes[dim]:
            size = -(-len(held) // comm.size(axis))
            first = comm.coord(axis) * size
            held = held[first : first + size]
        return held

    def shard_shape(self, shape: Sequence[int], comm: Comm) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a tensor of `shape`."""
        return tuple(len(self.shard(dim, size, comm)) for dim, size in enumerate(shape))

    def placements(self, axes: Iterable[str]) -> tuple[Placement, ...]:
        """Return the DTensor placements of this spec on a device mesh of `axes`.

        DTensor splits a dimension over mesh axes in mesh order, so the spec must list the axes of
        each dimension in mesh order too.
        """
        dims = {axis: dim for dim, names in enumerate(self.axes) for axis in names}
        return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in axes)


def pad_to(size: int, multiple: int) -> int:
    """Return `size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
