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
          elements. It falls fastest with N = q^3, but what is F wide moves too: a column and a row
          product send 5 B T (D + F) / N^(2/3) of activations, and in two dimensions 5 B T D /
          N^(1/2). That is less from (1 + F/D)^6 ranks on: 64 where F is D, 15,625 where it is 4 D.
          Embedding: B T D / q^2 dealt out over x, then B T D / q^2 summed over y.
Limits    q divides heads and key-value heads, q^2 divides D, F and the width of all heads. B is
          padded to a multiple of q^2; V may be any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from phalanx.comm.primitives import all_gather, all_to_all, reduce_scatter
from phalanx.parallel.tensor.layout import Layout, Matrix, Move, Spread, total, weight_gradient


class ThreeD(Layout):
    """The cube; see the head of this file."""

    residual = Spread(rows=("tp_x", "tp_y"), features="tp_z")
    inner = Spread(rows=("tp_x", "tp_z"), features="tp_y")
    column = Matrix(out=("tp_y",), inner=("tp_z", "tp_x"))
    row = Matrix(out=("tp_z",), inner=("tp_y", "tp_x"))

    @override
    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return self._multiply(x, weights, "tp_y", "tp_z")

    @override
    def columns_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return self._multiply_backward(x, weights, d_ys, "tp_y", "tp_z")

    @override
    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._multiply(x, [weight], "tp_z", "tp_y")[0]

    @override
    def back_backward(self, x: Tensor, weight: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
        d_x, (d_weight,) = self._multiply_backward(x, [weight], [d_y], "tp_z", "tp_y")
        return d_x, d_weight

    @override
    def enter(self, partial: Tensor) -> Tensor:
        # [B, T, D_z,x]{sum y} -> [B_x, T, D_z]{sum y} -> [B_x,y, T, D_z]
        return reduce_scatter(all_to_all(partial, self.mesh, "tp_x", 0, 2), self.mesh, "tp_y", 0)

    @override
    def enter_backward(self, d_x: Tensor) -> Tensor:
        return all_to_all(all_gather(d_x, self.mesh, "tp_y", 0), self.mesh, "tp_x", 2, 0)

    @override
    def columns_moves(self, num_in: int, nums_out: Sequence[int]) -> list[Move]:
        outs = [self.elements(self.inner, num_out) for num_out in nums_out]
        parts = [self.feature_range(self.inner, num_out)[1] for num_out in nums_out]
        x = self.elements(self.residual, num_in)
        return self._moves(x, outs, [num_in * part for part in parts], "tp_y", "tp_z")

    @override
    def back_moves(self, num_in: int, num_out: int) -> list[Move]:
        size = self.sizes["tp_y"]
        x, y = self.elements(self.inner, num_in), self.elements(self.residual, num_out)
        return self._moves(x, [y], [num_in * num_out // size], "tp_z", "tp_y")

    def _moves(
        self, x: int, ys: list[int], weights: list[int], gathered: str, scattered: str
    ) -> list[Move]:
        """Return the moves of products, from the elements of parts of x and y.

        Args:
            x: elements of this rank's part.
            ys: of its part of each result.
            weights: of each weight, whole over the other two axes together.
            gathered: axis that the rows of x are gathered over.
            scattered: axis that those of the results are scattered over.
        """
        size, num_products = self.sizes["tp_x"], len(ys)
        x, y, weight = x * size, sum(ys) * size, sum(weights) // size
        return [
            Move("forward", gathered, "all_gather", 1, x),
            Move("forward", "tp_x", "all_gather", num_products, weight),
            Move("forward", scattered, "reduce_scatter", num_products, y),
            Move("backward", gathered, "all_gather", 1, x),
            Move("backward", scattered, "all_gather", num_products, y),
            Move("backward", "tp_x", "all_gather", num_products, weight),
            Move("backward", "tp_x", "reduce_scatter", num_products, weight, is_master=True),
            Move("backward", gathered, "reduce_scatter", 1, x),
        ]

    @override
    def enter_moves(self, num_features: int) -> list[Move]:
        size = self.sizes["tp_x"]
        dealt = self.elements(self.residual, num_features) * size
        return [
            Move("forward", "tp_x", "all_to_all", 1, dealt, is_master=True),
            Move("forward", "tp_y", "reduce_scatter", 1, dealt, is_master=True),
            Move("backward", "tp_y", "all_gather", 1, dealt, is_master=True),
            Move("backward", "tp_x", "all_to_all", 1, dealt, is_master=True),
        ]

    def _multiply(
        self, x: Tensor, weights: Sequence[Tensor], gathered: str, scattered: str
    ) -> list[Tensor]:
        """Gather the rows of x over one axis, and scatter those of the results over the other."""
        whole = all_gather(x, self.mesh, gathered, 0)
        ys: list[Tensor] = []
        for weight in weights:
            whole_weight = all_gather(weight.to(x.dtype), self.mesh, "tp_x", 1)
            ys.append(reduce_scatter(F.linear(whole, whole_weight), self.mesh, scattered, 0))
        return ys

    def _multiply_backward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        d_ys: Sequence[Tensor],
        gathered: str,
        scattered: str,
    ) -> tuple[Tensor, list[Tensor]]:
        whole = all_gather(x, self.mesh, gathered, 0)
        d_weights: list[Tensor] = []
        d_whole: list[Tensor] = []
        for d_part, weight in zip(d_ys, weights, strict=True):
            d_y = all_gather(d_part, self.mesh, scattered, 0)
            whole_weight = all_gather(weight.to(x.dtype), self.mesh, "tp_x", 1)
            d_whole.append(d_y @ whole_weight)
            d_weight = weight_gradient(d_y, whole, weight.dtype)
            d_weights.append(reduce_scatter(d_weight, self.mesh, "tp_x", 1))
        return reduce_scatter(total(d_whole), self.mesh, gathered, 0), d_weights
