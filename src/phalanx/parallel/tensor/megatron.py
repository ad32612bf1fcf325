"""Tensor parallelism in one dimension, with full activations: the original Megatron layout.

Idea      Two consecutive products, the first split by columns, the second by rows, need one sum
          over ranks (Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3). Columns come
          first because of the activation between the products: GeLU(X1 W1 + X2 W2) is not
          GeLU(X1 W1) + GeLU(X2 W2), so a first product split by rows would have to be summed
          before the activation. With a column split, each rank applies it to its own columns.
Layout    residual x[B, T, D]    inner y[B, T, F_tp]    column W[F_tp, D]    row W[D, F_tp]
Forward   column  f: no communication;  y[F_tp] = x W^T
          row     z{sum tp} = y[F_tp] W^T -> g: all_reduce -> z
Backward  column  dW[F_tp] = dy^T x;  dx{sum tp} = dy W -> f: all_reduce -> dx
          row     g: no communication;  dy[F_tp] = dz W;  dW[F_tp] = dz^T y
          f and g are the paper's names. They are conjugate: each is the identity in the direction
          in which the other sums. `one_d.py` splits each all_reduce into reduce_scatter and
          all_gather.
Cost      A rank sends (N-1)/N of B T D elements four times for a column and a row product, once
          less than `one_d.py`, which gathers the input again for backward. In return every rank
          stores and computes the residual, its norms and the dropout masks in full.
Limits    N must divide heads, key-value heads and F. B, D, T and V are arbitrary.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.spec import Spec


class Megatron(OneD):
    """Layout with full activations and all-reduces; see the module docstring."""

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
