"""Tensor parallelism in two dimensions (SUMMA).

Idea      Both factors of a product and its result are split over a q x q mesh, and no matrix is
          ever gathered in full: panels of the moving matrices are broadcast along mesh rows or
          columns, one after another (van de Geijn and Watts, SUMMA, 1997; Xu et al., Optimus,
          2021, arXiv 2104.05343, section 3). One of the three matrices is stationary. In Optimus
          it is the result of every forward product; here it is the largest, the result of a
          column product and the factor of a row product, so that tensors F wide never move.
Layout    residual x[B_row, T, D_col]  inner y[B_row, T, F_col]  column W[F_col, D_row]
          row W[D_row, F_col]
Forward   column  for t in q:  y += broadcast_col(x, t) @ broadcast_row(W, t)^T
          row     for t in q:  z{sum col} = y @ broadcast_row(W, t)^T -> reduce to column t
Backward  column  for t in q:  dx{sum col} = dy @ broadcast_row(W, t) -> reduce to column t
                               dW{sum row} = dy^T @ broadcast_col(x, t) -> reduce to row t
          row     for t in q:  dy += broadcast_col(dz, t) @ broadcast_row(W, t)
                               dW{sum row} = broadcast_col(dz, t)^T @ y -> reduce to row t
          Broadcasts of the next panels overlap the products of the current panels.
Cost      A rank sends (q-1)/q of the bytes of each panel. A column and a row product move q panels
          of B T D / q^2 elements five times, and q panels of each weight's O I / q^2 three times:
          1/(q+1) of the activation elements that one dimension sends, and weights in addition.
          Embedding: reduce_scatter of B T D / q along B, then a swap across the mesh diagonal.
          Norms: one or two numbers a row. A rank holds two panels of each matrix at a time.
Limits    q must divide D, heads, key-value heads and F. B is padded to a multiple of q; V is
          arbitrary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending
from phalanx.parallel.tensor.layout import Layout, sum_tensors, weight_gradient
from phalanx.parallel.tensor.spec import Spec


class TwoD(Layout):
    """The SUMMA layout; see the module docstring."""

    residual = Spec("B[row] T D[col]")
    inner = Spec("B[row] T F[col]")
    column = Spec("F[col] D[row]")
    row = Spec("D[row] F[col]")

    @override
    def column_parallel_linear(
        self, x: Tensor, weights: Sequence[Tensor], length: int
    ) -> list[Tensor]:
        # Rank (r, c) of a 2 x 2 mesh; y stays, and panels of x and W arrive:
        #
        #                      t = 0                             t = 1
        #   x along row r      x[B_r, D_0] from (r, 0)           x[B_r, D_1] from (r, 1)
        #   W along column c   W[F_c, D_0] from (0, c)           W[F_c, D_1] from (1, c)
        #   y[B_r, F_c]        += x[B_r, D_0] W[F_c, D_0]^T      += x[B_r, D_1] W[F_c, D_1]^T
        ys = [x.new_zeros(x.shape[0] * x.shape[1], len(weight)) for weight in weights]
        casts = [weight.to(x.dtype) for weight in weights]
        for (x_t,), weights_t in zip(
            self.panels("tp_col", x), self.panels("tp_row", *casts), strict=True
        ):
            for y, weight_t in zip(ys, weights_t, strict=True):
                y.addmm_(x_t.flatten(0, 1), weight_t.T)
        return [y.unflatten(0, x.shape[:2]) for y in ys]

    @override
    def column_parallel_linear_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        casts = [weight.to(x.dtype) for weight in weights]
        # dy[B_r, F_c] stays. In turn t rank (r, c) has W[F_c, D_t] and x[B_r, D_t], and computes
        #
        #   one of q terms of dx[B_r, D_t]    sum along row r, to rank (r, t)
        #   one of q terms of dW[F_c, D_t]    sum along column c, to rank (t, c)
        d_x = _Reductions(self.comm, "tp_col")
        d_weights = [_Reductions(self.comm, "tp_row") for _ in weights]
        for (x_t,), weights_t in zip(
            self.panels("tp_col", x), self.panels("tp_row", *casts), strict=True
        ):
            products = [d_y @ weight_t for d_y, weight_t in zip(d_ys, weights_t, strict=True)]
            d_x.add(sum_tensors(products))
            for d_weight, d_y, weight in zip(d_weights, d_ys, weights, strict=True):
                d_weight.add(weight_gradient(d_y, x_t, weight.dtype))
        return d_x.mine(), [d_weight.mine() for d_weight in d_weights]

    @override
    def row_parallel_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        # x[B_r, F_c] stays. In turn t rank (r, c) has W[D_t, F_c], and computes one of the q terms
        # of z[B_r, D_t], which are summed along row r to rank (r, t): its shard of the residual.
        y = _Reductions(self.comm, "tp_col")
        for (weight_t,) in self.panels("tp_row", weight.to(x.dtype)):
            y.add(x @ weight_t.T)
        return y.mine()

    @override
    def row_parallel_linear_backward(
        self, x: Tensor, weight: Tensor, d_y: Tensor
    ) -> tuple[Tensor, Tensor]:
        # dx[B_r, F_c] stays, and dW[D_t, F_c] = dz[B_r, D_t]^T x[B_r, F_c] is summed along column
        # c, to rank (t, c), which has that shard of W.
        d_x = x.new_zeros(x.shape[0] * x.shape[1], x.shape[2])
        d_weight = _Reductions(self.comm, "tp_row")
        for (d_y_t,), (weight_t,) in zip(
            self.panels("tp_col", d_y), self.panels("tp_row", weight.to(x.dtype)), strict=True
        ):
            d_x.addmm_(d_y_t.flatten(0, 1), weight_t)
            d_weight.add(weight_gradient(d_y_t, x, weight.dtype))
        return d_x.view(x.shape), d_weight.mine()

    @override
    def reduce_embedding(self, partial: Tensor) -> Tensor:
        # [B, T, D_row]{sum col} -> [B_col, T, D_row] -> [B_row, T, D_col]
        return self._swap(self.comm.reduce_scatter(partial, "tp_col", 0))

    @override
    def reduce_embedding_backward(self, d_x: Tensor, length: int) -> Tensor:
        return self.comm.all_gather(self._swap(d_x), "tp_col", 0)

    def _swap(self, shard: Tensor) -> Tensor:
        """Exchange shards with the rank across the diagonal, at the same coordinate on tp_depth."""
        size = self.comm.size("tp_row")
        below = self.comm.coord("tp_row") - self.comm.coord("tp_col")
        # (row, col) has number row * size + col in its depth layer; subtracting
        # below * (size - 1) gives the number of (col, row).
        partner = self.comm.coord("tp") - below * (size - 1)
        return shard if size == 1 else self.comm.swap(shard, "tp", partner)

    def panels(self, axis: str, *shards: Tensor) -> Iterator[list[Tensor]]:
        """Yield the shards of each rank of `axis` in turn; prefetch the next ones meanwhile."""
        #   this thread   wait 0 | product 0 | wait 1 | product 1
        #   broadcasts    -- 0 --  -- 1 ----            (two panels of each matrix at a time)
        pending = self._fetch(axis, 0, shards)
        for turn in range(self.comm.size(axis)):
            panel = [one.wait() for one in pending]
            if turn + 1 < self.comm.size(axis):
                pending = self._fetch(axis, turn + 1, shards)
            yield panel

    def _fetch(self, axis: str, source: int, shards: Sequence[Tensor]) -> list[Pending]:
        is_mine = self.comm.coord(axis) == source
        buffers = [
            shard.contiguous()
            if is_mine
            else torch.empty_like(shard, memory_format=torch.contiguous_format)
            for shard in shards
        ]
        return [self.comm.broadcast_start(buffer, axis, source) for buffer in buffers]


class _Reductions:
    """Successive reduces over `axis`, the t-th to the rank at coordinate t, one in flight."""

    def __init__(self, comm: Comm, axis: str) -> None:
        self._comm, self._axis = comm, axis
        self._turn = 0
        self._pending: Pending | None = None
        self._mine: Tensor | None = None

    def add(self, term: Tensor) -> None:
        """Start the reduce of every rank's `term` to the next coordinate."""
        self._finish()
        # The reduce of turn t runs while the caller computes the term of turn t + 1.
        self._pending = self._comm.reduce_start(term.contiguous(), self._axis, self._turn)

    def mine(self) -> Tensor:
        """Wait for all reduces, and return the sum for this rank."""
        self._finish()
        assert self._mine is not None  # `add` was called once for each rank of the axis
        return self._mine

    def _finish(self) -> None:
        if self._pending is not None:
            total = self._pending.wait()
            if self._turn == self._comm.coord(self._axis):
                self._mine = total
            self._pending = None
            self._turn += 1
