"""Tensor parallelism in three dimensions: a q x q x q cube.

Idea      A product of I x K by K x J numbers is a cube of I J K multiplications; each rank computes
          a smaller cube, and stores 1/q of each of its faces (Agarwal et al. 1995; Bian et al.
          2021, arXiv 2105.14450, section 3). Two of the three axes exchange their roles between
          consecutive products, so that each result has the sharding that the next product reads.
Layout    residual x[B_x,y, T, D_z]  inner y[B_x,z, T, F_y]  column W[F_y, D_z,x]  row W[D_z, F_y,x]
Forward   column  all_gather over y: x[B_x, T, D_z];  over x: W[F_y, D_z]
                  y[B_x, T, F_y]{sum z} = x W^T -> reduce_scatter -> y[B_x,z, T, F_y]
          row     the same with y and z exchanged
Backward  all_gather both factors again, and dy over z:
                  dx[B_x, T, D_z]{sum y} = dy W -> reduce_scatter -> dx[B_x,y, T, D_z]
                  dW[F_y, D_z]{sum x} = dy^T x -> reduce_scatter -> dW[F_y, D_z,x]
Cost      For a product with I rows a rank sends (q-1)/q of 3 I K / q^2 + 2 I J / q^2 + 3 K J / q^2
          elements. This cost falls fastest with N = q^3, but activations F wide move too: a column
          and a row product send 5 B T (D + F) / N^(2/3) activation elements, against 5 B T D /
          N^(1/2) in two dimensions. Three dimensions send less from (1 + F/D)^6 ranks on: 64 if
          F = D, 15,625 if F = 4 D.
          Embedding: all_to_all of B T D / q^2 over x, then reduce_scatter of B T D / q^2 over y.
Limits    q must divide heads and key-value heads, q^2 must divide D, F and the width of all heads.
          B is padded to a multiple of q^2; V is arbitrary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from phalanx.parallel.tensor.layout import Layout, sum_tensors, weight_gradient
from phalanx.parallel.tensor.spec import Spec


class ThreeD(Layout):
    """The 3D layout; see the module docstring."""

    residual = Spec("B[x y] T D[z]")
    inner = Spec("B[x z] T F[y]")
    column = Spec("F[y] D[z x]")
    row = Spec("D[z] F[y x]")

    @override
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        return self._multiply(x, weights, "tp_y", "tp_z")

    @override
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return self._multiply_backward(x, weights, d_ys, "tp_y", "tp_z")

    @override
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._multiply(x, [weight], "tp_z", "tp_y")[0]

    @override
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_x, (d_weight,) = self._multiply_backward(x, [weight], [d_y], "tp_z", "tp_y")
        return d_x, d_weight

    @override
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        # [B, T, D_z,x]{sum y} -> [B_x, T, D_z]{sum y} -> [B_x,y, T, D_z]
        return self.comm.reduce_scatter(self.comm.all_to_all(partial, "tp_x", 0, 2), "tp_y", 0)

    @override
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        return self.comm.all_to_all(self.comm.all_gather(d_x, "tp_y", 0), "tp_x", 2, 0)

    def _multiply(
        self, x: Tensor, weights: Sequence[Tensor], gathered: str, scattered: str
    ) -> list[Tensor]:
        """Return x times each weight: gather rows over `gathered`, scatter over `scattered`."""
        # Column, on rank (x, y, z) of q^3; a row product exchanges y and z:
        #
        #   x[B_x,y, T, D_z]  -> all_gather over y -> [B_x, T, D_z]    a face of the rank's cube
        #   W[F_y, D_z,x]     -> all_gather over x -> [F_y, D_z]       another
        #   [B_x, T, F_y]{sum z}, the third -> reduce_scatter over z -> [B_x,z, T, F_y]
        full = self.comm.all_gather(x, gathered, 0)
        ys: list[Tensor] = []
        for weight in weights:
            full_weight = self.comm.all_gather(weight.to(x.dtype), "tp_x", 1)
            ys.append(self.comm.reduce_scatter(F.linear(full, full_weight), scattered, 0))
        return ys

    def _multiply_backward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        d_ys: Sequence[Tensor],
        gathered: str,
        scattered: str,
    ) -> tuple[Tensor, list[Tensor]]:
        full = self.comm.all_gather(x, gathered, 0)
        d_weights: list[Tensor] = []
        # The sums over z of forward become gathers over z, the gather over y a sum over y:
        #
        #   dy[B_x,z, T, F_y] -> [B_x, T, F_y]    dy W -> [B_x, T, D_z]{sum y} -> dx[B_x,y, T, D_z]
        #                                         dy^T x -> [F_y, D_z]{sum x} -> dW[F_y, D_z,x]
        d_full: list[Tensor] = []
        for d_shard, weight in zip(d_ys, weights, strict=True):
            d_y = self.comm.all_gather(d_shard, scattered, 0)
            full_weight = self.comm.all_gather(weight.to(x.dtype), "tp_x", 1)
            d_full.append(d_y @ full_weight)
            d_weight = weight_gradient(d_y, full, weight.dtype)
            d_weights.append(self.comm.reduce_scatter(d_weight, "tp_x", 1))
        return self.comm.reduce_scatter(sum_tensors(d_full), gathered, 0), d_weights
