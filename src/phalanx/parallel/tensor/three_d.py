"""Tensor parallelism in three dimensions: a q x q x q cube.

Idea      A product of I x K by K x J numbers is a cube of I J K multiplications; each rank computes
          a smaller cube, and holds a q-th of each face of it (Agarwal et al. 1995; Bian et al.
          2021, arXiv 2105.14450, section 3). Two of the three axes change their roles from each
          product to the next, so that results lie as the next product wants them.
Layout    residual x[B_x,y, T, D_z]  inner y[B_x,z, T, F_y]  column W[F_y, D_z,x]  row W[D_z, F_y,x]
Forward   column  all_gather over y: x[B_x, T, D_z];  over x: W[F_y, D_z]
                  y[B_x, T, F_y]{sum z} = x W^T -> reduce_scatter -> y[B_x,z, T, F_y]
          row     the same with y and z changed
Backward  gathers both again, and dy over z:
                  dx[B_x, T, D_z]{sum y} = dy W -> reduce_scatter -> dx[B_x,y, T, D_z]
                  dW[F_y, D_z]{sum x} = dy^T x -> reduce_scatter -> dW[F_y, D_z,x]
Cost      Of a product with I rows a rank sends (q-1)/q of 3 I K / q^2 + 2 I J / q^2 + 3 K J / q^2
          elements: with N = q^3 the least of all layouts, N^(-2/3), but both I K and I J.
          Embedding: B T D / q^2 dealt out over x, then B T D / q^2 summed over y.
Limits    q divides heads and key-value heads, q^2 divides D, F and the width of all heads. B is
          padded to a multiple of q^2; V may be any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.primitives import all_gather, all_to_all, reduce_scatter
from phalanx.parallel.tensor.layout import Layout, Matrix, Spread, weight_gradient


class ThreeD(Layout):
    """The cube; see the head of this file."""

    residual = Spread(rows=("tp_x", "tp_y"), features="tp_z")
    inner = Spread(rows=("tp_x", "tp_z"), features="tp_y")
    column = Matrix(out=("tp_y",), inner=("tp_z", "tp_x"))
    row = Matrix(out=("tp_z",), inner=("tp_y", "tp_x"))

    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], _Product.apply(self, "tp_y", "tp_z", x, *weights))

    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        return cast(tuple[Tensor], _Product.apply(self, "tp_z", "tp_y", x, weight))[0]

    def enter(self, partial: Tensor) -> Tensor:
        return cast(Tensor, _Enter.apply(self, partial))


class _Product(Function):
    """x's rows are gathered over one axis, the results' rows scattered over the other."""

    @staticmethod
    def forward(
        ctx: Any, layout: ThreeD, gathered: str, scattered: str, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layout, ctx.axes = layout, (gathered, scattered)
        ctx.save_for_backward(x, *weights)
        mesh = layout.mesh
        whole = all_gather(x, mesh, gathered, 0)
        ys: list[Tensor] = []
        for weight in weights:
            weight_OI = all_gather(weight.to(x.dtype), mesh, "tp_x", 1)
            ys.append(reduce_scatter(F.linear(whole, weight_OI), mesh, scattered, 0))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        mesh = ctx.layout.mesh
        gathered, scattered = ctx.axes
        whole = all_gather(x, mesh, gathered, 0)
        d_weights: list[Tensor] = []
        d_whole: list[Tensor] = []
        for d_part, weight in zip(d_ys, weights, strict=True):
            d_y = all_gather(d_part, mesh, scattered, 0)
            weight_OI = all_gather(weight.to(x.dtype), mesh, "tp_x", 1)
            d_whole.append(d_y @ weight_OI)
            d_weight = weight_gradient(d_y, whole, weight.dtype)
            d_weights.append(reduce_scatter(d_weight, mesh, "tp_x", 1))
        d_x = reduce_scatter(cast(Tensor, sum(d_whole)), mesh, gathered, 0)
        return None, None, None, d_x, *d_weights


class _Enter(Function):
    """[B, T, D_z,x]{sum y} -> [B_x, T, D_z]{sum y} -> [B_x,y, T, D_z]."""

    @staticmethod
    def forward(ctx: Any, layout: ThreeD, partial: Tensor) -> Tensor:
        ctx.mesh = layout.mesh
        dealt = all_to_all(partial, layout.mesh, "tp_x", 0, 2)
        return reduce_scatter(dealt, layout.mesh, "tp_y", 0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_dealt = all_gather(grad_outputs[0], ctx.mesh, "tp_y", 0)
        return None, all_to_all(d_dealt, ctx.mesh, "tp_x", 2, 0)
