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

from torch import Tensor
from typing_extensions import override

from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.spec import Spec


class Megatron(OneD):
    """Activations in full: nothing is gathered, and a sum is whole; see the head of this file."""

    residual = Spec("B T D")

    @override
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        return self.scatter(partial.clone())

    @override
    def gather(self, x: Tensor, length: int) -> Tensor:
        return x

    @override
    def scatter(self, x: Tensor, *, is_spent: bool = False) -> Tensor:
        return self.comm.all_reduce(x, "tp")
