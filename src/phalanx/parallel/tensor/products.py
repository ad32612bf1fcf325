"""The products of a layout under autograd, each one operator to PyTorch.

A product is made of panels, collectives and sums. As one operator `phalanx_tensor::...` its result
is kept by `recompute:selective` as that of any matrix product is, and neither the multiplications
nor the communication run again. Ledgers see its inside ([Note: Composites] in comm/watch.py).

Only this rank's parts of the factors are kept for backward, which moves them again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from phalanx.comm.watch import COMPOSITE_NAMESPACE, register_composite

if TYPE_CHECKING:
    from phalanx.parallel.tensor.layout import Layout

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def first_order(backward: _Backward) -> _Backward:
    """Have autograd raise where the gradient of a gradient is asked for: it would be wrong."""
    return cast(_Backward, once_differentiable(backward))


_LIBRARY = torch.library.Library(COMPOSITE_NAMESPACE, "FRAGMENT")
_LIBRARY.define("columns(Tensor x, Tensor[] weights, int layout) -> Tensor[]")
_LIBRARY.define("back(Tensor x, Tensor weight, int layout) -> Tensor")

_LAYOUTS: WeakValueDictionary[int, Layout] = WeakValueDictionary()
_KEYS = itertools.count()


def register(layout: Layout) -> int:
    """Return the number by which the operators know `layout`, as long as it lives."""
    key = next(_KEYS)
    _LAYOUTS[key] = layout
    return key


def columns(layout: Layout, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Multiply residual x by column weights, all at once: x[B, T, D] -> inner y[B, T, out].

    Args:
        layout: how everything lies.
        x: this rank's part.
        weights: this rank's parts, in their own data type; cast to that of x.
    """
    return cast(tuple[Tensor, ...], _Columns.apply(layout, x, *weights))


def back(layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply inner x by a row weight: x[B, T, F] -> residual y[B, T, D]; see `columns`."""
    return cast(Tensor, _Back.apply(layout, x, weight))


def enter(layout: Layout, partial: Tensor) -> Tensor:
    """Bring what was looked up in this rank's part of a table to the residual; `Layout.enter`."""
    return cast(Tensor, _Enter.apply(layout, partial))


def _columns(x: Tensor, weights: Sequence[Tensor], key: int) -> list[Tensor]:
    return _LAYOUTS[key].columns(x, weights)


def _back(x: Tensor, weight: Tensor, key: int) -> Tensor:
    return _LAYOUTS[key].back(x, weight)


for _name, _function in (("columns", _columns), ("back", _back)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _packet = getattr(torch.ops.phalanx_tensor, _name)
    register_composite(_packet.default, _function)


@register_flop_formula(torch.ops.phalanx_tensor.columns)
def _columns_flops(
    _: Any, weight_shapes: Sequence[Sequence[int]], key: int, out_shape: Any = None, **__: Any
) -> int:
    inner = _LAYOUTS[key].num_parts(_LAYOUTS[key].column.inner)
    return sum(
        2 * math.prod(y_shape) * weight_shape[1] * inner
        for y_shape, weight_shape in zip(out_shape, weight_shapes, strict=True)
    )


@register_flop_formula(torch.ops.phalanx_tensor.back)
def _back_flops(
    _: Any, weight_shape: Sequence[int], key: int, out_shape: Any = None, **__: Any
) -> int:
    inner = _LAYOUTS[key].num_parts(_LAYOUTS[key].row.inner)
    return 2 * math.prod(out_shape) * weight_shape[1] * inner


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.extent = layout, layout.extent
        ctx.save_for_backward(x, *weights)
        return tuple(torch.ops.phalanx_tensor.columns(x, weights, layout.key))

    @staticmethod
    @first_order
    def backward(ctx: Any, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        ctx.layout.extent = ctx.extent
        d_x, d_weights = ctx.layout.columns_backward(x, weights, d_ys)
        return None, d_x, *d_weights


class _Back(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
        ctx.layout, ctx.extent = layout, layout.extent
        ctx.save_for_backward(x, weight)
        return torch.ops.phalanx_tensor.back(x, weight, layout.key)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.layout.extent = ctx.extent
        return None, *ctx.layout.back_backward(x, weight, grad_outputs[0])


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, partial: Tensor) -> Tensor:
        ctx.layout, ctx.extent = layout, layout.extent
        return layout.enter(partial)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layout.extent = ctx.extent
        return None, ctx.layout.enter_backward(grad_outputs[0])
