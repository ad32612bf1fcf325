"""Tensor parallelism in one dimension, with sequence parallelism.

Idea      Two products in a row, the first split by columns, the second by rows, need one sum
          between ranks (Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3). That sum
          is scattered over places and gathered before the next product, so that norms, dropout and
          residuals are split too (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
Layout    residual x[B, T_tp, D]    inner y[B, T, F_tp]    column W[F_tp, D]    row W[D, F_tp]
Forward   column  x[T_tp] -> all_gather -> x;  y[F_tp] = x W^T
          row     z{sum tp} = y[F_tp] W^T -> reduce_scatter -> z[T_tp]
Backward  column  all_gather x again, for only its part was kept;  dW[F_tp] = dy^T x;
                  dx{sum tp} = dy W -> reduce_scatter -> dx[T_tp]
          row     dz[T_tp] -> all_gather -> dz;  dy[F_tp] = dz W;  dW[F_tp] = dz^T y
Cost      A rank sends (N-1)/N of B T D elements five times for a column and a row product: twice
          forward, three times backward, whatever F is. The embedding: once each way. T is padded to
          a multiple of N. Logits are never gathered.
Limits    N divides heads, key-value heads and F. D, T and V may be any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.primitives import all_gather, reduce_scatter
from phalanx.parallel.tensor.layout import Layout, Matrix, Spread, weight_gradient


class OneD(Layout):
    """Megatron's layout; see the head of this file."""

    residual = Spread(places="tp")
    inner = Spread(features="tp")
    column = Matrix(out=("tp",), inner=())
    row = Matrix(out=(), inner=("tp",))

    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], _Columns.apply(self, x, *weights))

    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, _Back.apply(self, x, weight))

    def enter(self, partial: Tensor) -> Tensor:
        return cast(Tensor, _Enter.apply(self, partial))

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Gather the places of x[B, T_tp, D], and cut padding off."""
        return all_gather(x, self.mesh, "tp", 1)[:, :length]

    def scatter(self, x: Tensor) -> Tensor:
        """Sum x[B, T, D]{sum tp}, and keep this rank's places, padded."""
        missing = -x.shape[1] % self.sizes["tp"]
        return reduce_scatter(F.pad(x, (0, 0, 0, missing)), self.mesh, "tp", 1)


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, layout: OneD, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.length = layout, layout.extent.length
        ctx.save_for_backward(x, *weights)
        whole = layout.gather(x, ctx.length)
        return tuple(F.linear(whole, weight.to(x.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        layout: OneD = ctx.layout
        d_x = sum(d_y @ w.to(x.dtype) for d_y, w in zip(d_ys, weights, strict=True))
        d_part = layout.scatter(cast(Tensor, d_x))
        whole = layout.gather(x, ctx.length)
        d_weights = (
            weight_gradient(d_y, whole, w.dtype) for d_y, w in zip(d_ys, weights, strict=True)
        )
        return None, d_part, *d_weights


class _Back(Function):
    @staticmethod
    def forward(ctx: Any, layout: OneD, x: Tensor, weight: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, weight)
        return layout.scatter(F.linear(x, weight.to(x.dtype)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_y = ctx.layout.gather(grad_outputs[0], x.shape[1])
        return None, d_y @ weight.to(x.dtype), weight_gradient(d_y, x, weight.dtype)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, layout: OneD, partial: Tensor) -> Tensor:
        ctx.layout, ctx.length = layout, partial.shape[1]
        return layout.scatter(partial)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.layout.gather(grad_outputs[0], ctx.length)
