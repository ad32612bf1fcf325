"""Tensor parallelism in one dimension, with sequence parallelism.

Idea      Two consecutive products, the first split by columns, the second by rows, need one sum
          over ranks (Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3). That sum
          is scattered over positions and gathered before the next product, so that norms, dropout
          and residuals are split too (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
          The operators f and g of Megatron (`megatron.py`) become: f all_gather forward and
          reduce_scatter backward, before the column product; g reduce_scatter forward and
          all_gather backward, after the row product. They are still conjugate.
Layout    residual x[B, T_tp, D]    inner y[B, T, F_tp]    column W[F_tp, D]    row W[D, F_tp]
Forward   column  x[T_tp] -> all_gather -> x;  y[F_tp] = x W^T
          row     z{sum tp} = y[F_tp] W^T -> reduce_scatter -> z[T_tp]
Backward  column  all_gather x again, because forward saved only its shard;  dW[F_tp] = dy^T x;
                  dx{sum tp} = dy W -> reduce_scatter -> dx[T_tp]
          row     dz[T_tp] -> all_gather -> dz;  dy[F_tp] = dz W;  dW[F_tp] = dz^T y
Cost      A rank sends (N-1)/N of B T D elements five times for a column and a row product: twice
          in forward, three times in backward, for any F. For the embedding: once in each
          direction. T is padded to a multiple of N. The loss gathers no logits.
          Gradients of norms are summed over tp once a step: `parallel/reduce.py`.
Limits    N must divide heads, key-value heads and F. D, T and V are arbitrary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from phalanx.parallel.tensor.layout import Layout, weight_gradient
from phalanx.parallel.tensor.spec import Spec


class OneD(Layout):
    """Megatron's layout with sequence parallelism; see the module docstring."""

    residual = Spec("B T[tp] D")
    inner = Spec("B T F[tp]")
    column = Spec("F[tp] D")
    row = Spec("D F[tp]")

    @override
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        full = self.gather(x, length)
        return [F.linear(full, weight.to(x.dtype)) for weight in weights]

    @override
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        pairs = list(zip(d_ys, weights, strict=True))
        # [B, T, F_tp] [F_tp, D] -> {sum tp} -> [B, T_tp, D], then x gathered again: the gathered x
        # is not in memory while the sum is scattered.
        d_x = self._scattered_products([(d_y, w.to(x.dtype)) for d_y, w in pairs])
        full = self.gather(x, d_ys[0].shape[1])
        return d_x, [_gradient(d_y, full, weight) for d_y, weight in pairs]

    @override
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._scattered_products([(x, weight.to(x.dtype).T)])

    @override
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        full = self.gather(d_y, x.shape[1])
        return full @ weight.to(x.dtype), _gradient(full, x, weight)

    @override
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        return self.scatter(partial)

    @override
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        return self.gather(d_x, length)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """All-gather the positions of x[B, T_tp, D], and cut padding off."""
        return self.comm.all_gather(x, "tp", 1)[:, :length]

    def _scattered_products(self, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Reduce-scatter the sum of x[B, T, I] w[I, O] over pairs and ranks, along positions.

        The sum is built in a `Comm.empty` buffer, which other ranks of the host can read directly.
        """
        (x, w), *others = factors
        # dx of a branch is one sum over q, k and v (gate and up), so it is scattered once, not once
        # a map.
        out = self.comm.empty((*x.shape[:2], w.shape[1]), x, "tp")
        torch.mm(x.flatten(0, 1), w, out=out.view(-1, w.shape[1]))
        for x_i, w_i in others:
            out += x_i @ w_i
        return self.scatter(out, is_spent=True)

    def scatter(self, x: Tensor, *, is_spent: bool = False) -> Tensor:
        """Reduce-scatter x[B, T, D]{sum tp} along positions; see `Comm.reduce_scatter`."""
        if missing := -x.shape[1] % self.comm.size("tp"):
            x, is_spent = F.pad(x, (0, 0, 0, missing)), False
        return self.comm.reduce_scatter(x, "tp", 1, is_spent=is_spent)


def _gradient(d_y: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the gradient of a weight; None if it is frozen."""
    return weight_gradient(d_y, x, weight.dtype) if weight.requires_grad else None
