"""Autograd functions over a layout: its products, each one a `Composite`, and its gathers.

Products save only this rank's shards for backward, which communicates them again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.composite import Composite, mapped, once_differentiable
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.spec import Spec


def column_parallel_linear(
    layout: Layout, x: Tensor, weights: Sequence[Tensor], length: int
) -> tuple[Tensor, ...]:
    """Multiply residual x by several column weights at once: x[B, T, D] -> inner y[B, T, out].

    All tensors are this rank's shards. Weights are cast to the dtype of x. `length` is the number
    of positions in a row without padding.
    """
    x = _autocast(x)
    return cast(tuple[Tensor, ...], _ColumnParallelLinear.apply(layout, length, x, *weights))


def row_parallel_linear(layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply inner x by a row weight: x[B, T, F] -> residual y[B, T, D]."""
    return cast(Tensor, _RowParallelLinear.apply(layout, _autocast(x), weight))


def _autocast(x: Tensor) -> Tensor:
    """Cast a factor as `torch.autocast` does for a product on one device."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    is_cast = is_cast and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def reduce_embedding(layout: Layout, partial: Tensor) -> Tensor:
    """Sum the ranks' partial embedding lookups; see `Layout.reduce_embedding`."""
    back = functools.partial(layout.reduce_embedding_backward, length=partial.shape[1])
    return mapped(partial, layout.reduce_embedding, back)


def gather_terms(layout: Layout, x: Tensor, length: int) -> Tensor:
    """Gather the positions of x[B, T_tp, D] for arithmetic whose gradients are terms of a sum."""
    gather = functools.partial(layout.reduce_embedding_backward, length=length)
    return mapped(x, gather, layout.reduce_embedding)


def sum_terms(layout: Layout, terms: Tensor) -> Tensor:
    """Sum y[B, T, D]{sum tp} to the residual y[B, T_tp, D], also when backward runs it again."""
    return cast(Tensor, _SumTerms.apply(layout, terms))


def unshard(layout: Layout, x: Tensor, spec: Spec, shape: BatchShape, num_features: int) -> Tensor:
    """All-gather x[B, T, D], full on every rank.

    Every rank must compute the same values from the result. The gradient is then the same on all
    ranks, and backward returns this rank's shard of the gradient without communication.
    """
    return mapped(
        x,
        lambda x: layout.unshard(x, spec, shape, num_features),
        lambda d_x: layout.shard(d_x, spec),
    )


def shard(layout: Layout, x: Tensor, spec: Spec) -> Tensor:
    """Return this rank's shard of x[B, T, D], equal on every rank; backward all-gathers."""
    shape, num_features = BatchShape(*x.shape[:2]), x.shape[2]
    return mapped(
        x,
        lambda x: layout.shard(x, spec),
        lambda d_x: layout.unshard(d_x, spec, shape, num_features),
    )


def gather_features(layout: Layout, x: Tensor, axis: str) -> Tensor:
    """All-gather features over `axis` for rank-specific use; backward reduce-scatters."""
    comm = layout.comm
    return mapped(
        x, lambda x: comm.all_gather(x, axis, 2), lambda d_x: comm.reduce_scatter(d_x, axis, 2)
    )


def look_up(ids_BT: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
    """Return rows of this rank's shard of a table, and zeros where the id is not in the shard.

    Ids, and `padding`, count from the first id of this shard; the row of `padding` gets no
    gradient.
    """
    return cast(Tensor, _LookUp.apply(ids_BT, weight_VD, padding))


def without_gradient(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` whose gradient is zero, because another rank contributes it."""
    return mapped(tensor, lambda x: x.view_as(x), torch.zeros_like)


def _column_flops(
    _: Any,
    weight_shapes: Sequence[Sequence[int]],
    length: int,
    num_inner: int,
    out_shape: Any = None,
    **__: Any,
) -> int:
    # y[.., out / shards] from a weight shard [out / shards, in / num_inner]: 2 y (in / num_inner)
    # num_inner, because every rank multiplies by all panels of the full input width.
    pairs = zip(out_shape, weight_shapes, strict=True)
    return sum(2 * math.prod(y_shape) * shape[1] * num_inner for y_shape, shape in pairs)


def _row_flops(
    _: Any, weight_shape: Sequence[int], num_inner: int, out_shape: Any = None, **__: Any
) -> int:
    return 2 * math.prod(out_shape) * weight_shape[1] * num_inner


_COLUMN: Composite[Layout] = Composite(
    "column_parallel_linear(Tensor x, Tensor[] weights, int length, int num_inner) -> Tensor[]",
    _column_flops,
)
_ROW: Composite[Layout] = Composite(
    "row_parallel_linear(Tensor x, Tensor weight, int num_inner) -> Tensor", _row_flops
)


class _ColumnParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, layout: Layout, length: int, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layout = layout
        ctx.save_for_backward(x, *weights)
        # Saved: this rank's shards alone; backward gathers or broadcasts them once more.
        num_inner = layout.column.num_shards(1, layout.comm)
        return tuple(_COLUMN(layout, x, weights, length, num_inner))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_x, d_weights = ctx.layout.column_parallel_linear_backward(x, weights, d_ys)
        return None, None, d_x, *d_weights


class _RowParallelLinear(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, weight)
        comm = layout.comm
        num_residuals = math.prod(layout.residual.num_shards(dim, comm) for dim in range(3))
        # Each of the ranks that hold the same shard of the residual computes one term of its sum.
        num_inner = layout.row.num_shards(1, comm) * num_residuals // comm.size("tp")
        return _ROW(layout, x, weight, num_inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return None, *ctx.layout.row_parallel_linear_backward(x, weight, grad_outputs[0])


class _SumTerms(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, terms: Tensor) -> Tensor:
        ctx.layout, ctx.length = layout, terms.shape[1]
        total = layout.reduce_embedding(terms)
        # Recomputation ends with the last tensor that is saved. Without this one it would end
        # before the sum of the last block of a segment, and run the sums of the others.
        ctx.save_for_backward(terms.new_empty(0))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.layout.reduce_embedding_backward(grad_outputs[0], ctx.length)


class _LookUp(Function):
    @staticmethod
    def forward(ctx: Any, ids_BT: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
        # Ids count from this shard's first id. 8 ids on two ranks, tokens 1 6 3:
        #
        #   rank 0   row 1   0       row 3        rank 1   0   row 6   0        the sum has all rows
        is_mine_BT = (ids_BT >= 0) & (ids_BT < len(weight_VD))
        has_grad_BT = is_mine_BT if padding is None else is_mine_BT & (ids_BT != padding)
        rows_BT = ids_BT.where(is_mine_BT, 0)
        ctx.save_for_backward(rows_BT, has_grad_BT)
        ctx.shape = weight_VD.shape
        if not len(weight_VD):  # a vocabulary of fewer ids than ranks
            return weight_VD.new_zeros(*ids_BT.shape, weight_VD.shape[1])
        return F.embedding(rows_BT, weight_VD).masked_fill_(~is_mine_BT[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows_BT, has_grad_BT = ctx.saved_tensors
        grad_BTD = grad_outputs[0].masked_fill(~has_grad_BT[..., None], 0)
        d_weight_VD = grad_BTD.new_zeros(ctx.shape)
        if len(d_weight_VD):
            d_weight_VD.index_add_(0, rows_BT.flatten(), grad_BTD.flatten(0, 1))
        return None, d_weight_VD, None
