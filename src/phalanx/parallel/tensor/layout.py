"""The interface of a tensor-parallel layout: which rank holds which shard of each tensor.

An activation x[B, T, D] is split by rows (samples), positions in a row or features, each over
sub-axes of tp. It has one of two shardings:

    residual   along the residual stream: norms, dropout, additions
    inner      between a column and a row product: attention by heads, the MLP's activation, logits

A weight [out, in] maps one sharding to the other: a *column* weight maps residual to inner (the
query projection; up), a *row* weight maps inner to residual (the output projection of attention;
down). Vocabulary tables are column weights, [V, D]. A vector (norm, bias) is split like the
features that it is applied to.

Rows and positions are padded at the end, so that every rank has the same number. Padding does not
affect results: it has no label, and attention cuts padded positions off.

Every rank of tp computes different rows, positions or features. A gradient is therefore partial
over every axis of tp on which its parameter is replicated, and `ReplicaReducer`
(parallel/reduce.py) sums it over those axes. If the residual is not split (`megatron`), all ranks
compute the same values along it. Then only the first rank contributes gradients and the others
contribute zeros, so that the sum stays correct.

A layout is immutable and stores no microbatch: methods that depend on the microbatch take its
`BatchShape`.
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
    """A tensor-parallel layout on the ranks of a job; each subclass has its own file.

    Attributes:
        residual, inner: sharding of activations.
        ids: sharding of token ids when they are looked up in a vocabulary table.
        column, row: sharding of weights.
        comm: communicator of the job, or a counting one; it has this rank's coordinates.
    """

    residual: ClassVar[Spec]
    inner: ClassVar[Spec]
    ids: ClassVar[Spec] = Spec("B T")
    column: ClassVar[Spec]
    row: ClassVar[Spec]

    # Abstract methods, which each layout file implements.

    @abstractmethod
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        """Multiply residual x by column weights; see `operators.column_parallel_linear`."""

    @abstractmethod
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the gradients of x and of each weight, each in the dtype of its tensor.

        The gradient of a frozen weight may be None.
        """

    @abstractmethod
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply inner x by a row weight; see `operators.row_parallel_linear`."""

    @abstractmethod
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and of the weight, as `column_parallel_linear_backward`."""

    @abstractmethod
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        """Sum the ranks' partial embedding lookups, and return this rank's shard of the residual.

        Args:
            partial: [B, T, in-features of this rank's column weight], rows split as `ids`; zero
                where the id is not in this rank's shard of the vocabulary.
        """

    @abstractmethod
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        """Return the gradient of `partial`, given the gradient of the residual shard."""

    # Methods that all layouts have in common.

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def axes(self) -> tuple[str, ...]:
        """Sub-axes of tp, in mesh order."""
        return self.comm.axes_of("tp")

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of tp."""
        return self.comm.coord("tp") == 0

    def padded(self, shape: BatchShape) -> BatchShape:
        """Return `shape` with rows and positions rounded up to multiples of their shard counts."""
        rows, positions = (self.residual.num_shards(dim, self.comm) for dim in (0, 1))
        return BatchShape(pad_to(shape.num_rows, rows), pad_to(shape.length, positions))

    def rows(self, spec: Spec, shape: BatchShape) -> range:
        """Return the rows of the padded batch that this rank holds."""
        return spec.shard(0, self.padded(shape).num_rows, self.comm)

    def positions(self, spec: Spec, shape: BatchShape) -> range:
        """Return the positions that this rank holds, with padding only if positions are split."""
        length = shape.length if spec.positions is None else self.padded(shape).length
        return spec.shard(1, length, self.comm)

    def features(self, spec: Spec, num_features: int) -> range:
        """Return the features that this rank holds; the last shards may be short or empty."""
        return spec.shard(2, num_features, self.comm)

    def shard_ranges(
        self, spec: Spec, shape: BatchShape, num_features: int
    ) -> tuple[range, range, range]:
        """Return the rows, positions and features of an activation that this rank holds."""
        return (
            self.rows(spec, shape),
            self.positions(spec, shape),
            self.features(spec, num_features),
        )

    def rows_of(self, tensor: Tensor, spec: Spec, shape: BatchShape) -> Tensor:
        """Return this rank's rows of a tensor [B, ...], or a tensor [1, ...] unchanged.

        A tensor [1, ...] broadcasts over all rows. Padded rows repeat the last row.
        """
        if len(tensor) == 1 and shape.num_rows > 1:
            return tensor
        return _repeated(tensor, self.rows(spec, shape), 0)

    def positions_of(self, tensor: Tensor, spec: Spec, dim: int) -> Tensor:
        """Return this rank's positions of a tensor that has all T positions along `dim`.

        Padded positions repeat the last position.
        """
        return _repeated(tensor, self.positions(spec, BatchShape(1, tensor.shape[dim])), dim)

    def labels_of(self, labels: Tensor, ignore: int) -> Tensor:
        """Return this rank's rows of labels[B, T], split as `inner`; padded rows get `ignore`."""
        # Five rows on two shards: rows 0 1 2, and 3 4 with one row of `ignore`.
        rows = self.rows(self.inner, BatchShape(*labels.shape))
        labels = labels[rows.start : rows.stop]
        missing = labels.new_full((len(rows) - len(labels), labels.shape[1]), ignore)
        return torch.cat((labels, missing)) if len(missing) else labels

    def all_reduce_features(self, tensor: Tensor, spec: Spec) -> Tensor:
        """All-reduce in place over ranks with different features of the same rows and positions."""
        return tensor if spec.features is None else self.comm.all_reduce(tensor, spec.features)

    def all_reduce_rows(self, tensor: Tensor, spec: Spec) -> Tensor:
        """All-reduce in place over the ranks that hold different rows."""
        for axis in spec.rows:
            self.comm.all_reduce(tensor, axis)
        return tensor

    def unshard(self, x: Tensor, spec: Spec, shape: BatchShape, num_features: int) -> Tensor:
        """All-gather shards x into the full [B, T, D], without padding, on every rank."""
        if spec.features is not None:
            # The last shard may be short: pad it for the all-gather, then cut the padding off.
            widest = -(-num_features // self.comm.size(spec.features))
            x = F.pad(x, (0, widest - x.shape[2]))
            x = self.comm.all_gather(x, spec.features, 2)[:, :, :num_features]
        if spec.positions is not None:
            x = self.comm.all_gather(x, spec.positions, 1)
        # Rows over (depth, row) are cut by depth first, so they are put together by row first.
        for axis in reversed(spec.rows):
            x = self.comm.all_gather(x, axis, 0)
        return x[: shape.num_rows, : shape.length].contiguous()

    def shard(self, x: Tensor, spec: Spec) -> Tensor:
        """Return this rank's shard of x[B, T, D]; padded rows and positions are zeros."""
        held = self.shard_ranges(spec, BatchShape(*x.shape[:2]), x.shape[2])
        out = x.new_zeros([len(indices) for indices in held])
        shard = x[tuple(slice(indices.start, indices.stop) for indices in held)]
        out[: shard.shape[0], : shard.shape[1]] = shard
        return out


def _repeated(tensor: Tensor, held: range, dim: int) -> Tensor:
    """Return the `held` indices along `dim`; indices past the end repeat the last element."""
    size = tensor.shape[dim]
    if held.stop <= size:
        return tensor.narrow(dim, held.start, len(held))
    indices = torch.arange(held.start, held.stop, device=tensor.device)
    return tensor.index_select(dim, indices.clamp_(max=size - 1))


def weight_gradient(d_y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return d_y^T x, [out, in], summed over rows and positions, in the master weight's `dtype`."""
    return (d_y.flatten(0, 1).T @ x.flatten(0, 1)).to(dtype)


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    return functools.reduce(torch.add, tensors)
