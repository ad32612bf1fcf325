"""Tensor parallelism in one dimension, with full activations: Megatron's first form.

Idea      Two products in a row, the first split by columns, the second by rows, need one sum
          between ranks (Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3). Columns
          come first because of what stands between: GeLU(X1 W1 + X2 W2) is not GeLU(X1 W1) +
          GeLU(X2 W2), so a first product that is split by rows would have to be summed before the
          activation. Split by columns, each rank applies it to columns of its own.
Layout    residual x[B, T, D]    inner y[B, T, F_tp]    column W[F_tp, D]    row W[D, F_tp]
Forward   column  f: nothing moves;  y[F_tp] = x W^T
          row     z{sum tp} = y[F_tp] W^T -> g: all_reduce -> z
Backward  column  dW[F_tp] = dy^T x;  dx{sum tp} = dy W -> f: all_reduce -> dx
          row     g: nothing moves;  dy[F_tp] = dz W;  dW[F_tp] = dz^T y
          f and g are the paper's names. They are conjugate: each is the identity in the direction
          in which the other sums. `one_d.py` splits each sum into its two halves.
Cost      A rank sends (N-1)/N of B T D elements four times for a column and a row product, once
          less than `one_d.py`, which gathers the input again for backward. For that the residual,
          its norms and their dropout masks are held, and computed, in full on each rank.
Limits    N divides heads, key-value heads and F. B, D, T and V may be any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from phalanx.parallel.tensor.layout import Layout, total, weight_gradient
from phalanx.parallel.tensor.spec import Spec


class Megatron(Layout):
    """Activations in full, sums by all-reduce; see the head of this file."""

    residual = Spec("B T D")
    inner = Spec("B T F[tp]")
    column = Spec("F[tp] D")
    row = Spec("D F[tp]")

    @override
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        return [F.linear(x, weight.to(x.dtype)) for weight in weights]

    @override
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        pairs = list(zip(d_ys, weights, strict=True))
        d_x = self.comm.all_reduce(total([d_y @ weight.to(x.dtype) for d_y, weight in pairs]), "tp")
        return d_x, [weight_gradient(d_y, x, weight.dtype) for d_y, weight in pairs]

    @override
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.comm.all_reduce(F.linear(x, weight.to(x.dtype)), "tp")

    @override
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        return d_y @ weight.to(x.dtype), weight_gradient(d_y, x, weight.dtype)

    @override
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        return self.comm.all_reduce(partial.clone(), "tp")

    @override
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        return d_x
