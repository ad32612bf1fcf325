"""Tensor parallelism in two dimensions (SUMMA).

Idea      Both factors of a product and its result lie on a q x q mesh, and nothing is ever gathered
          whole: panels of what moves are broadcast along rows or columns, one after another (van de
          Geijn and Watts, SUMMA, 1997; Xu et al., Optimus, 2021, arXiv 2104.05343, section 3).
          Of the three matrices one stays where it is. Optimus keeps the result of every forward
          product; we keep the largest, the result of a column product and the factor of a row
          product, so that what is F wide never moves.
Layout    residual x[B_row, T, D_col]  inner y[B_row, T, F_col]  column W[F_col, D_row]
          row W[D_row, F_col]
Forward   column  for t in q:  y += broadcast_col(x, t) @ broadcast_row(W, t)^T
          row     for t in q:  z{sum col} = y @ broadcast_row(W, t)^T -> reduce to column t
Backward  column  for t in q:  dx{sum col} = dy @ broadcast_row(W, t) -> reduce to column t
                               dW{sum row} = dy^T @ broadcast_col(x, t) -> reduce to row t
          row     for t in q:  dy += broadcast_col(dz, t) @ broadcast_row(W, t)
                               dW{sum row} = broadcast_col(dz, t)^T @ y -> reduce to row t
          The next panels travel while the present ones are multiplied.
Cost      A rank sends (q-1)/q of the bytes of each panel. A column and a row product move q panels
          of B T D / q^2 elements five times, and q of each weight's O I / q^2 three times: of
          activations 1/(q+1) of what one dimension sends, and weights besides.
          Embedding: B T D / q reduced to rows, then swapped with the rank across the diagonal.
          Norms: one or two numbers a row. Two panels of each matrix are held.
Limits    q divides D, heads, key-value heads and F. B is padded to a multiple of q; V may be any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from phalanx.comm.join import tp_group
from phalanx.comm.primitives import (
    Pending,
    all_gather,
    broadcast_start,
    reduce_scatter,
    reduce_start,
    swap,
)
from phalanx.parallel.tensor.layout import Layout, Matrix, Move, Spread, total, weight_gradient


class TwoD(Layout):
    """SUMMA; see the head of this file."""

    residual = Spread(rows=("tp_row",), features="tp_col")
    inner = residual
    column = Matrix(out=("tp_col",), inner=("tp_row",))
    row = Matrix(out=("tp_row",), inner=("tp_col",))

    def __init__(self, sizes: Mapping[str, int], mesh: DeviceMesh | None = None) -> None:
        super().__init__(sizes, mesh)
        # Made here, where every rank is, and not where the first embedding is.
        self._group = None if mesh is None else tp_group(mesh)

    @override
    def columns(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        ys = [x.new_zeros(x.shape[0] * x.shape[1], len(weight)) for weight in weights]
        casts = [weight.to(x.dtype) for weight in weights]
        for (x_t,), weights_t in zip(
            self.panels("tp_col", x), self.panels("tp_row", *casts), strict=True
        ):
            for y, weight_t in zip(ys, weights_t, strict=True):
                y.addmm_(x_t.flatten(0, 1), weight_t.T)
        return [y.unflatten(0, x.shape[:2]) for y in ys]

    @override
    def columns_backward(
        self, x: Tensor, weights: Sequence[Tensor], d_ys: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        casts = [weight.to(x.dtype) for weight in weights]
        d_x = _Reductions(self, "tp_col")
        d_weights = [_Reductions(self, "tp_row") for _ in weights]
        for (x_t,), weights_t in zip(
            self.panels("tp_col", x), self.panels("tp_row", *casts), strict=True
        ):
            products = [d_y @ weight_t for d_y, weight_t in zip(d_ys, weights_t, strict=True)]
            d_x.add(total(products))
            for d_weight, d_y, weight in zip(d_weights, d_ys, weights, strict=True):
                d_weight.add(weight_gradient(d_y, x_t, weight.dtype))
        return d_x.mine(), [d_weight.mine() for d_weight in d_weights]

    @override
    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        y = _Reductions(self, "tp_col")
        for (weight_t,) in self.panels("tp_row", weight.to(x.dtype)):
            y.add(x @ weight_t.T)
        return y.mine()

    @override
    def back_backward(self, x: Tensor, weight: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
        d_x = x.new_zeros(x.shape[0] * x.shape[1], x.shape[2])
        d_weight = _Reductions(self, "tp_row")
        for (d_y_t,), (weight_t,) in zip(
            self.panels("tp_col", d_y), self.panels("tp_row", weight.to(x.dtype)), strict=True
        ):
            d_x.addmm_(d_y_t.flatten(0, 1), weight_t)
            d_weight.add(weight_gradient(d_y_t, x, weight.dtype))
        return d_x.view(x.shape), d_weight.mine()

    @override
    def enter(self, partial: Tensor) -> Tensor:
        # [B, T, D_row]{sum col} -> [B_col, T, D_row] -> [B_row, T, D_col]
        part = reduce_scatter(partial, self.mesh, "tp_col", 0)
        return self._swap(part)

    @override
    def enter_backward(self, d_x: Tensor) -> Tensor:
        return all_gather(self._swap(d_x), self.mesh, "tp_col", 0)

    @override
    def columns_moves(self, num_in: int, nums_out: Sequence[int]) -> list[Move]:
        size, num_products = self.sizes["tp_row"], len(nums_out)
        x = size * self.elements(self.residual, num_in)
        outs = sum(self.feature_range(self.inner, num_out)[1] for num_out in nums_out)
        weights = outs * num_in
        return [
            Move("forward", "tp_col", "broadcast", size, x),
            Move("forward", "tp_row", "broadcast", size * num_products, weights),
            Move("backward", "tp_col", "broadcast", size, x),
            Move("backward", "tp_row", "broadcast", size * num_products, weights),
            Move("backward", "tp_col", "reduce", size, x),
            Move("backward", "tp_row", "reduce", size * num_products, weights, is_master=True),
        ]

    @override
    def back_moves(self, num_in: int, num_out: int) -> list[Move]:
        size = self.sizes["tp_row"]
        y = size * self.elements(self.residual, num_out)
        weight = num_in * num_out // size
        return [
            Move("forward", "tp_row", "broadcast", size, weight),
            Move("forward", "tp_col", "reduce", size, y),
            Move("backward", "tp_col", "broadcast", size, y),
            Move("backward", "tp_row", "broadcast", size, weight),
            Move("backward", "tp_row", "reduce", size, weight, is_master=True),
        ]

    @override
    def enter_moves(self, num_features: int) -> list[Move]:
        part = self.elements(self.residual, num_features)
        whole = part * self.sizes["tp_col"]
        if self.sizes["tp_row"] == 1:
            return []
        return [
            Move("forward", "tp_col", "reduce_scatter", 1, whole, is_master=True),
            Move("forward", "tp", "all_to_all", 1, part, is_master=True),
            Move("backward", "tp", "all_to_all", 1, part, is_master=True),
            Move("backward", "tp_col", "all_gather", 1, whole, is_master=True),
        ]

    def _swap(self, part: Tensor) -> Tensor:
        """Change parts with the rank across the diagonal, in the same layer of depth."""
        size, row, col = self.sizes["tp_row"], self.coords["tp_row"], self.coords["tp_col"]
        if size == 1:
            return part
        assert self._group is not None
        layer = self._group.rank() // size**2
        return swap(part, self._group, (layer * size + col) * size + row)

    def panels(self, axis: str, *parts: Tensor) -> Iterator[list[Tensor]]:
        """Yield the parts of each rank of `axis` in turn, and fetch the next ones meanwhile."""
        pending = self._fetch(axis, 0, parts)
        for turn in range(self.sizes[axis]):
            panel = [one.wait() for one in pending]
            if turn + 1 < self.sizes[axis]:
                pending = self._fetch(axis, turn + 1, parts)
            yield panel

    def _fetch(self, axis: str, source: int, parts: Sequence[Tensor]) -> list[Pending]:
        is_mine = self.coords[axis] == source
        buffers = [
            part.contiguous()
            if is_mine
            else torch.empty_like(part, memory_format=torch.contiguous_format)
            for part in parts
        ]
        return [broadcast_start(buffer, self.mesh, axis, source) for buffer in buffers]


class _Reductions:
    """Sums over `axis` in turn, the t-th for the rank at coordinate t; one at a time under way."""

    def __init__(self, layout: TwoD, axis: str) -> None:
        self._layout, self._axis = layout, axis
        self._turn = 0
        self._pending: Pending | None = None
        self._mine: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Begin the next sum, of every rank's `part`."""
        self._finish()
        self._pending = reduce_start(part.contiguous(), self._layout.mesh, self._axis, self._turn)

    def mine(self) -> Tensor:
        """Wait for all, and return the sum that is for this rank."""
        self._finish()
        assert self._mine is not None  # there were as many turns as ranks
        return self._mine

    def _finish(self) -> None:
        if self._pending is not None:
            total = self._pending.wait()
            if self._turn == self._layout.coords[self._axis]:
                self._mine = total
            self._pending = None
            self._turn += 1
