"""Tensor parallelism in one dimension, with sequence parallelism.

Idea      Two products in a row, the first split by columns, the second by rows, need one sum
          between ranks (Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3). That sum
          is scattered over positions and gathered before the next product, so that norms, dropout
          and residuals are split too (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
          So the operators f and g of Megatron (`megatron.py`) become: f all_gather forward and
          reduce_scatter backward, before the column product; g reduce_scatter forward and
          all_gather backward, after the row product. They are conjugate still.
Layout    residual x[B, T_tp, D]    inner y[B, T, F_tp]    column W[F_tp, D]    row W[D, F_tp]
Forward   column  x[T_tp] -> all_gather -> x;  y[F_tp] = x W^T
          row     z{sum tp} = y[F_tp] W^T -> reduce_scatter -> z[T_tp]
Backward  column  all_gather x again, for only its part was kept;  dW[F_tp] = dy^T x;
                  dx{sum tp} = dy W -> reduce_scatter -> dx[T_tp]
          row     dz[T_tp] -> all_gather -> dz;  dy[F_tp] = dz W;  dW[F_tp] = dz^T y
Cost      A rank sends (N-1)/N of B T D elements five times for a column and a row product: twice
          forward, three times backward, whatever F is. The embedding: once each way. T is padded to
          a multiple of N. The loss gathers no logits.
Limits    N divides heads, key-value heads and F. D, T and V may be any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from phalanx.comm.primitives import all_gather, reduce_scatter
from phalanx.parallel.tensor.layout import Layout, Matrix, Move, Spread, total, weight_gradient


class OneD(Layout):
    """Megatron's layout; see the head of this file."""

    residual = Spread(places="tp")
    inner = Spread(features="tp")
    column = Matrix(out=("tp",), inner=())
    row = Matrix(out=(), inner=("tp",))

    @override
    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        whole = self.gather(x)
        return [F.linear(whole, weight.to(x.dtype)) for weight in weights]

    @override
    def columns_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        pairs = list(zip(d_ys, weights, strict=True))
        d_x = self.scatter(total([d_y @ w.to(x.dtype) for d_y, w in pairs]))
        whole = self.gather(x)
        return d_x, [weight_gradient(d_y, whole, weight.dtype) for d_y, weight in pairs]

    @override
    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.scatter(F.linear(x, weight.to(x.dtype)))

    @override
    def back_backward(self, x: Tensor, weight: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
        whole = self.gather(d_y)
        return whole @ weight.to(x.dtype), weight_gradient(whole, x, weight.dtype)

    @override
    def enter(self, partial: Tensor) -> Tensor:
        return self.scatter(partial)

    @override
    def enter_backward(self, d_x: Tensor) -> Tensor:
        return self.gather(d_x)

    @override
    def columns_moves(self, num_in: int, nums_out: Sequence[int]) -> list[Move]:
        whole = self.extent.num_rows * self.padded_length * num_in
        return [
            Move("forward", "tp", "all_gather", 1, whole),
            Move("backward", "tp", "all_gather", 1, whole),
            Move("backward", "tp", "reduce_scatter", 1, whole),
        ]

    @override
    def back_moves(self, num_in: int, num_out: int) -> list[Move]:
        whole = self.extent.num_rows * self.padded_length * num_out
        return [
            Move("forward", "tp", "reduce_scatter", 1, whole),
            Move("backward", "tp", "all_gather", 1, whole),
        ]

    @override
    def enter_moves(self, num_features: int) -> list[Move]:
        whole = self.extent.num_rows * self.padded_length * num_features
        return [
            Move("forward", "tp", "reduce_scatter", 1, whole, is_master=True),
            Move("backward", "tp", "all_gather", 1, whole, is_master=True),
        ]

    def gather(self, x: Tensor) -> Tensor:
        """Gather the places of x[B, T_tp, D], and cut padding off."""
        return all_gather(x, self.mesh, "tp", 1)[:, : self.extent.length]

    def scatter(self, x: Tensor) -> Tensor:
        """Sum x[B, T, D]{sum tp}, and keep this rank's places, padded."""
        missing = -x.shape[1] % self.sizes["tp"]
        return reduce_scatter(F.pad(x, (0, 0, 0, missing)), self.mesh, "tp", 1)
