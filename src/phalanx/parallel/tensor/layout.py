"""What a layout of tensor parallelism is: which rank holds which part of what.

An activation x[B, T, D] is split by rows (samples), places (positions in a row) or features, each
over sub-axes of tp. It lies in one of two ways:

    residual   along the residual stream: norms, dropout, additions
    inner      between a column and a row product: attention by heads, the MLP's activation, logits

and a weight [out, in] takes it from one to the other: a *column* weight from residual to inner (the
queries; up), a *row* weight back (the projection of attention; down). Tables of the vocabulary are
column weights, [V, D]. A vector (norm, bias) is split as the features it meets.

Rows and places are padded at the edge, so that each rank has as many; what is added counts nowhere:
it has no label, and attention cuts padded places off.

Every rank of tp computes other rows, places or features than the others. A gradient is therefore
partial over every axis of tp on which its parameter is replicated, and `replicas` sums it there.
Where the residual is split over nothing (`megatron`), all ranks compute the same along it. There
the first rank alone gives the gradients and the others give zeros, so the sum stays right.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.comm.primitives import Reduction, all_gather, all_reduce
from phalanx.parallel.tensor import products
from phalanx.parallel.tensor.products import first_order


@dataclass(frozen=True)
class Spread:
    """How an activation [B, T, D] lies over the sub-axes of tp.

    Attributes:
        rows: the axes that split B, outer first.
        places: the axis that splits T, or None.
        features: the axis that splits D, or None.
    """

    rows: tuple[str, ...] = ()
    places: str | None = None
    features: str | None = None


@dataclass(frozen=True)
class Matrix:
    """How a weight [out, in] lies over the sub-axes of tp: what splits each, outer first."""

    out: tuple[str, ...]
    inner: tuple[str, ...]


@dataclass(frozen=True)
class Extent:
    """Rows and places of a whole microbatch, [B, T]."""

    num_rows: int
    length: int


@dataclass(frozen=True)
class Move:
    """A collective of one phase, or several alike.

    Attributes:
        phase: "forward" or "backward".
        axis: the sub-axis; "tp" is all ranks.
        op: its name in the ledger.
        calls: how many.
        elements: of the whole tensors, all calls together.
        is_master: they are of the data type of the masters, not of the arithmetic.
    """

    phase: str
    axis: str
    op: str
    calls: int
    elements: int
    is_master: bool = False


class Layout(ABC):
    """One layout on the ranks of a job. A file of this folder each.

    Attributes:
        residual, inner: how activations lie.
        entry: how ids lie when they are looked up in a table of the vocabulary.
        column, row: how weights lie.
        sizes: size of each sub-axis, in the order of the mesh.
        extent: of the microbatch at work; the embedding sets it, and backward sets it back. So a
            forward is of one sequence of ids.
        key: the number by which operators know this layout.
    """

    residual: ClassVar[Spread]
    inner: ClassVar[Spread]
    entry: ClassVar[Spread] = Spread()
    column: ClassVar[Matrix]
    row: ClassVar[Matrix]

    def __init__(self, sizes: Mapping[str, int], mesh: DeviceMesh | None = None) -> None:
        self.sizes = dict(sizes)
        self._mesh = mesh
        self.extent = Extent(0, 0)
        self.key = products.register(self)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the job; a layout without one only says what would be."""
        assert self._mesh is not None
        return self._mesh

    # What a layout file supplies.

    @abstractmethod
    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Multiply residual x by column weights, see `products.columns`."""

    @abstractmethod
    def columns_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of x and of each weight, in their data types."""

    @abstractmethod
    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply inner x by a row weight, see `products.back`."""

    @abstractmethod
    def back_backward(self, x: Tensor, weight: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight, in their data types."""

    @abstractmethod
    def enter(self, partial: Tensor) -> Tensor:
        """Bring what was looked up in this rank's part of a table to the residual.

        Args:
            partial: [B, T, in of this rank's column weight], rows as `entry` says; zero where the
                id is not in this rank's part of the vocabulary.
        """

    @abstractmethod
    def enter_backward(self, d_x: Tensor) -> Tensor:
        """Return the gradient of `partial`."""

    @abstractmethod
    def columns_moves(self, num_in: int, nums_out: Sequence[int]) -> list[Move]:
        """Return what the column products of one branch move, for the extent at work.

        Args:
            num_in: features of the residual, D.
            nums_out: features of each product.
        """

    @abstractmethod
    def back_moves(self, num_in: int, num_out: int) -> list[Move]:
        """Return what a row product of F to D features moves, for the extent at work."""

    @abstractmethod
    def enter_moves(self, num_features: int) -> list[Move]:
        """Return what an embedding of D features moves, for the extent at work."""

    # What follows from it.

    def placements(self, matrix: Matrix) -> tuple[Placement, ...]:
        """Return where the parts of a weight [out, in] lie, one placement a sub-axis."""
        return tuple(
            Shard(0) if axis in matrix.out else Shard(1) if axis in matrix.inner else Replicate()
            for axis in self.sizes
        )

    def along(self, axes: Sequence[str], dim: int = 0) -> tuple[Placement, ...]:
        """Return the placements of a tensor whose dimension `dim` is split over `axes`."""
        return tuple(Shard(dim) if axis in axes else Replicate() for axis in self.sizes)

    def transposed(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Return the placements of a matrix that is stored the other way round."""
        return tuple(Shard(1 - p.dim) if isinstance(p, Shard) else p for p in placements)

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each sub-axis; those of the first rank without a mesh."""
        if self._mesh is None:
            return dict.fromkeys(self.sizes, 0)
        return {axis: self._mesh.get_local_rank(axis) for axis in self.sizes}

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of tp."""
        return not any(self.coords.values())

    @property
    def is_residual_whole(self) -> bool:
        """Whether every rank computes the same along the residual stream."""
        return self.residual == Spread()

    def num_parts(self, axes: Sequence[str]) -> int:
        """Return the number of parts over `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def place(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this rank's number among the parts over `axes`, outer first, and their number."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self.coords[axis]
        return number, self.num_parts(axes)

    def elements(self, spread: Spread, num_features: int) -> int:
        """Return the elements of this rank's part of an activation of the extent at work."""
        num_rows = self.padded_rows // self.num_parts(spread.rows)
        num_places, num_part = (
            self.place_range(spread)[1],
            self.feature_range(spread, num_features)[1],
        )
        return num_rows * num_places * num_part

    @property
    def padded_rows(self) -> int:
        """Rows of the microbatch, padded to a multiple of the parts."""
        return _up(self.extent.num_rows, self.num_parts(self.residual.rows))

    @property
    def padded_length(self) -> int:
        """Places of a row, padded to a multiple of the parts."""
        places = self.residual.places
        return _up(self.extent.length, self.sizes[places] if places else 1)

    def rows_of(self, tensor: Tensor, spread: Spread) -> Tensor:
        """Return this rank's rows of a tensor [B, ...]; of [1, ...], which stands for all, itself.

        Padded rows repeat the last.
        """
        if len(tensor) == 1 and self.extent.num_rows > 1:
            return tensor
        number, count = self.place(spread.rows)
        size = self.padded_rows // count
        first = number * size
        if first + size <= len(tensor):
            return tensor[first : first + size]
        rows = torch.arange(first, first + size, device=tensor.device)
        return tensor[rows.clamp_(max=len(tensor) - 1)]

    def labels_of(self, labels: Tensor, ignore: int) -> Tensor:
        """Return this rank's inner rows of labels[B, T]; padded rows are all `ignore`."""
        missing = self.padded_rows - len(labels)
        if missing:
            labels = torch.cat((labels, labels.new_full((missing, labels.shape[1]), ignore)))
        return self.rows_of(labels, self.inner)

    def places_of(self, tensor: Tensor, spread: Spread, dim: int) -> Tensor:
        """Return this rank's places of a tensor that has all T along `dim`, padded by repeating."""
        first, size = self.place_range(spread)
        if size == tensor.shape[dim]:
            return tensor
        places = torch.arange(first, first + size, device=tensor.device)
        return tensor.index_select(dim, places.clamp_(max=tensor.shape[dim] - 1))

    def place_range(self, spread: Spread) -> tuple[int, int]:
        """Return the first of this rank's places of a row, and their number."""
        if spread.places is None:
            return 0, self.extent.length
        size = self.padded_length // self.sizes[spread.places]
        return self.coords[spread.places] * size, size

    def feature_range(self, spread: Spread, num_features: int) -> tuple[int, int]:
        """Return the first of this rank's features, and their number; last parts may be short."""
        if spread.features is None:
            return 0, num_features
        size = -(-num_features // self.sizes[spread.features])
        first = min(num_features, self.coords[spread.features] * size)
        return first, min(size, num_features - first)

    def sum_features(self, tensor: Tensor, spread: Spread) -> Tensor:
        """Sum in place over the ranks that hold other features of the same rows and places."""
        return tensor if spread.features is None else self.reduce(tensor, spread.features)

    def reduce(self, tensor: Tensor, axis: str, reduction: Reduction = "sum") -> Tensor:
        """Reduce in place over one sub-axis."""
        return all_reduce(tensor, self.mesh, axis, reduction)

    def sum_rows(self, tensor: Tensor, spread: Spread) -> Tensor:
        """Sum in place over the ranks that hold other rows."""
        for axis in spread.rows:
            all_reduce(tensor, self.mesh, axis)
        return tensor

    def whole(self, x: Tensor, spread: Spread, num_features: int) -> Tensor:
        """Gather x[B, T, D], whole on every rank; its gradient must be the same on all of them.

        Args:
            x: this rank's part.
            spread: how it lies.
            num_features: D.
        """
        return cast(Tensor, _Whole.apply(x, self, spread, num_features))

    def cut(self, x: Tensor, spread: Spread) -> Tensor:
        """Return this rank's part of x[B, T, D], the same on every rank; so is its gradient."""
        return cast(Tensor, _Cut.apply(x, self, spread))

    def whole_moves(self, spread: Spread, num_features: int) -> list[Move]:
        """Return what `whole` moves, for the extent at work."""
        moves: list[Move] = []
        size = self.feature_range(spread, num_features)[1]
        num_tokens = self.elements(spread, num_features) // size
        if spread.features is not None:
            # The last part may be short, and is padded on its way; then the padding is cut off.
            elements = num_tokens * size * self.sizes[spread.features]
            moves.append(Move("forward", spread.features, "all_gather", 1, elements))
        for axis in filter(None, [spread.places, *reversed(spread.rows)]):
            num_tokens *= self.sizes[axis]
            moves.append(Move("forward", axis, "all_gather", 1, num_tokens * num_features))
        return moves


class _Whole(Function):
    """Gather; backward takes this rank's part, for every rank computes the same with the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, spread: Spread, num_features: int) -> Tensor:
        ctx.layout, ctx.spread, ctx.extent = layout, spread, layout.extent
        return _gathered(x, layout, spread, num_features)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layout.extent = ctx.extent
        return _part(grad_outputs[0], ctx.layout, ctx.spread), None, None, None


class _Cut(Function):
    """Take this rank's part; backward gathers, so that every rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, spread: Spread) -> Tensor:
        ctx.layout, ctx.spread, ctx.extent = layout, spread, layout.extent
        ctx.num_features = x.shape[2]
        return _part(x, layout, spread)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layout.extent = ctx.extent
        whole = _gathered(grad_outputs[0], ctx.layout, ctx.spread, ctx.num_features)
        return whole, None, None


def _gathered(x: Tensor, layout: Layout, spread: Spread, num_features: int) -> Tensor:
    """Return x[B, T, D] of this rank's part."""
    mesh = layout.mesh
    if spread.features is not None:
        size = -(-num_features // layout.sizes[spread.features])
        x = torch.nn.functional.pad(x, (0, size - x.shape[2]))
        x = all_gather(x, mesh, spread.features, 2)[:, :, :num_features]
    if spread.places is not None:
        x = all_gather(x, mesh, spread.places, 1)
    for axis in reversed(spread.rows):
        x = all_gather(x, mesh, axis, 0)
    return x[: layout.extent.num_rows, : layout.extent.length].contiguous()


def _part(x: Tensor, layout: Layout, spread: Spread) -> Tensor:
    """Return this rank's part of x[B, T, D]; padded rows and places are zeros."""
    number, count = layout.place(spread.rows)
    num_rows = layout.padded_rows // count
    first_place, num_places = layout.place_range(spread)
    first, size = layout.feature_range(spread, x.shape[2])
    out = x.new_zeros(num_rows, num_places, size)
    part = x[
        number * num_rows : (number + 1) * num_rows,
        first_place : first_place + num_places,
        first : first + size,
    ]
    out[: part.shape[0], : part.shape[1]] = part
    return out


def weight_gradient(d_y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d_y^T x, [out, in], summed over rows and places, in the data type of the masters."""
    return (d_y.flatten(0, 1).T @ x.flatten(0, 1)).to(dtype)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one tensor or more."""
    return functools.reduce(torch.add, tensors)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
