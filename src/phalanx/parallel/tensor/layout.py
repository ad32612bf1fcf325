"""What a layout of tensor parallelism is: which rank holds which shard of what.

An activation x[B, T, D] is split by rows (samples), positions in a row or features, each over
sub-axes of tp. It lies in one of two ways:

    residual   along the residual stream: norms, dropout, additions
    inner      between a column and a row product: attention by heads, the MLP's activation, logits

and a weight [out, in] takes it from one to the other: a *column* weight from residual to inner (the
queries; up), a *row* weight back (the projection of attention; down). Tables of the vocabulary are
column weights, [V, D]. A vector (norm, bias) is split as the features it meets.

Rows and positions are padded at the edge, so that each rank has as many; the padding counts
nowhere: it has no label, and attention cuts padded positions off.

Every rank of tp computes other rows, positions or features than the others. A gradient is therefore
partial over every axis of tp on which its parameter is replicated, and `replicas` sums it there.
Where the residual is split over nothing (`megatron`), all ranks compute the same along it. There
the first rank alone gives the gradients and the others give zeros, so the sum stays right.

A layout is immutable, and knows no microbatch: what depends on one is given its `BatchShape`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.tensor.spec import Spec, pad_to


class Layout(ABC):
    """One layout on the ranks of a job. A file of this folder each.

    Attributes:
        residual, inner: how activations lie.
        entry: how ids lie when they are looked up in a table of the vocabulary.
        column, row: how weights lie.
        comm: of the job, or one that counts; it says where this rank stands.
    """

    residual: ClassVar[Spec]
    inner: ClassVar[Spec]
    entry: ClassVar[Spec] = Spec("B T")
    column: ClassVar[Spec]
    row: ClassVar[Spec]

    # What a layout file supplies.

    @abstractmethod
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        """Multiply residual x by column weights, see `operators.column_parallel_linear`."""

    @abstractmethod
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of x and of each weight, in their data types."""

    @abstractmethod
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply inner x by a row weight, see `operators.row_parallel_linear`."""

    @abstractmethod
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight, in their data types."""

    @abstractmethod
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        """Sum what each rank looked up in its shard of a table, as the residual lies.

        Args:
            partial: [B, T, in of this rank's column weight], rows as `entry` says; zero where the
                id is not in this rank's shard of the vocabulary.
        """

    @abstractmethod
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        """Return the gradient of `partial`."""

    # What follows from it.

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def axes(self) -> tuple[str, ...]:
        """The sub-axes of tp, in the order of the mesh."""
        return self.comm.axes_of("tp")

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of tp."""
        return self.comm.coord("tp") == 0

    def padded(self, shape: BatchShape) -> BatchShape:
        """Return the shape with rows and positions padded to multiples of their shards."""
        rows, positions = (self.residual.num_shards(dim, self.comm) for dim in (0, 1))
        return BatchShape(pad_to(shape.num_rows, rows), pad_to(shape.length, positions))

    def rows(self, spec: Spec, shape: BatchShape) -> range:
        """Return which rows of the padded batch this rank holds."""
        return spec.shard(0, self.padded(shape).num_rows, self.comm)

    def positions(self, spec: Spec, shape: BatchShape) -> range:
        """Return which positions this rank holds; of padded rows, if they are split."""
        length = shape.length if spec.positions is None else self.padded(shape).length
        return spec.shard(1, length, self.comm)

    def features(self, spec: Spec, num_features: int) -> range:
        """Return which features this rank holds; the last shards may be short, or empty."""
        return spec.shard(2, num_features, self.comm)

    def held(self, spec: Spec, shape: BatchShape, num_features: int) -> tuple[range, range, range]:
        """Return which rows, positions and features this rank holds of an activation."""
        return (
            self.rows(spec, shape),
            self.positions(spec, shape),
            self.features(spec, num_features),
        )

    def rows_of(self, tensor: Tensor, spec: Spec, shape: BatchShape) -> Tensor:
        """Return this rank's rows of a tensor [B, ...]; of [1, ...], which stands for all, itself.

        Padded rows repeat the last.
        """
        if len(tensor) == 1 and shape.num_rows > 1:
            return tensor
        return _repeated(tensor, self.rows(spec, shape), 0)

    def positions_of(self, tensor: Tensor, spec: Spec, dim: int) -> Tensor:
        """Return this rank's positions of a tensor that has all T along `dim`.

        Padded positions repeat the last.
        """
        return _repeated(tensor, self.positions(spec, BatchShape(1, tensor.shape[dim])), dim)

    def labels_of(self, labels: Tensor, ignore: int) -> Tensor:
        """Return this rank's inner rows of labels[B, T]; padded rows are all `ignore`."""
        rows = self.rows(self.inner, BatchShape(*labels.shape))
        labels = labels[rows.start : rows.stop]
        missing = labels.new_full((len(rows) - len(labels), labels.shape[1]), ignore)
        return torch.cat((labels, missing)) if len(missing) else labels

    def sum_features(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Sum in place over the ranks that hold other features of the same rows and positions."""
        return tensor if spec.features is None else self.comm.all_reduce(tensor, spec.features)

    def sum_rows(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Sum in place over the ranks that hold other rows."""
        for axis in spec.rows:
            self.comm.all_reduce(tensor, axis)
        return tensor

    def unshard(self, x: Tensor, spec: Spec, shape: BatchShape, num_features: int) -> Tensor:
        """Return x[B, T, D], full on every rank, of this rank's shard."""
        if spec.features is not None:
            # The last shard may be short, and is padded on its way; then the padding is cut off.
            widest = -(-num_features // self.comm.size(spec.features))
            x = F.pad(x, (0, widest - x.shape[2]))
            x = self.comm.all_gather(x, spec.features, 2)[:, :, :num_features]
        if spec.positions is not None:
            x = self.comm.all_gather(x, spec.positions, 1)
        for axis in reversed(spec.rows):
            x = self.comm.all_gather(x, axis, 0)
        return x[: shape.num_rows, : shape.length].contiguous()

    def shard(self, x: Tensor, spec: Spec) -> Tensor:
        """Return this rank's shard of x[B, T, D]; padded rows and positions are zeros."""
        held = self.held(spec, BatchShape(*x.shape[:2]), x.shape[2])
        out = x.new_zeros([len(indices) for indices in held])
        shard = x[tuple(slice(indices.start, indices.stop) for indices in held)]
        out[: shard.shape[0], : shard.shape[1]] = shard
        return out


def _repeated(tensor: Tensor, held: range, dim: int) -> Tensor:
    """Return the held indices along `dim`; indices behind its end repeat the last."""
    size = tensor.shape[dim]
    if held.stop <= size:
        return tensor.narrow(dim, held.start, len(held))
    indices = torch.arange(held.start, held.stop, device=tensor.device)
    return tensor.index_select(dim, indices.clamp_(max=size - 1))


def weight_gradient(d_y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d_y^T x, [out, in], summed over rows and positions, in the masters' data type."""
    return (d_y.flatten(0, 1).T @ x.flatten(0, 1)).to(dtype)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one tensor or more."""
    return functools.reduce(torch.add, tensors)
