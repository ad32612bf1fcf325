"""Parts of whole tensors, cut as the heads of the layout files say and without the code's own help.

A dimension split over axes is padded with zeros to a multiple of their sizes, outer axis first; the
vocabulary is not padded: its last parts are short, or empty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.layout import Layout
from phalanx.strategy import Strategy

TEXTS = (
    "tp2", "dp2,tp2:megatron", "tp4:2d", "tp3:2.5d/3",
    *map(by_hand, ("dp2,tp3", "dp2,tp4:2d", "tp9:2d", "dp2,tp8:2.5d/2", "dp2,tp8:3d")),
)  # fmt: skip
"""Most have an outer axis, so that a rank's number in tp is not its number in the job."""

B, T, D, F = 5, 7, 12, 24
"""Rows and positions that few sizes divide; features that all do."""

AXES = {
    # kind: rows, positions, features of the residual; the same of inner; rows of what is looked up;
    # out and in of a column weight; of a row weight
    "1d": (("", "tp", ""), ("", "", "tp"), "", ("tp", ""), ("", "tp")),
    "megatron": (("", "", ""), ("", "", "tp"), "", ("tp", ""), ("", "tp")),
    "2d": (("row", "", "col"), ("row", "", "col"), "", ("col", "row"), ("row", "col")),
    "2.5d": (
        ("depth row", "", "col"),
        ("depth row", "", "col"),
        "depth",
        ("col", "row"),
        ("row", "col"),
    ),
    "3d": (("x y", "", "z"), ("x z", "", "y"), "", ("y", "z x"), ("z", "y x")),
}
"""The layouts once more, as their files draw them."""


class Cut:
    """Cuts the parts of this rank."""

    def __init__(self, text: str, num_rows: int = B, length: int = T) -> None:
        self.strategy = Strategy.parse(text)
        self.comm: Ranks = Ranks(self.strategy)
        self.layout: Layout = layout_of(self.strategy, self.comm)
        self.batch = BatchShape(num_rows, length)
        self.residual, self.inner, self.entry, self.column, self.row = AXES[self.strategy.tp.kind]
        self.copy = self.comm.coord("dp")

    def position(self, axes: str) -> tuple[int, int]:
        """Return this rank's number among the parts over `axes`, and their number."""
        number, count = 0, 1
        for name in axes.split():
            axis = name if name == "tp" else f"tp_{name}"
            number = number * self.comm.size(axis) + self.comm.coord(axis)
            count *= self.comm.size(axis)
        return number, count

    def padded(self, whole: Tensor, dim: int, axes: str) -> Tensor:
        """Return the part of a dimension that is padded to a multiple."""
        number, count = self.position(axes)
        missing = -whole.shape[dim] % count
        shape = [*whole.shape[:dim], missing, *whole.shape[dim + 1 :]]
        return torch.cat((whole, whole.new_zeros(shape)), dim).chunk(count, dim)[number]

    def short(self, whole: Tensor, dim: int, axes: str) -> Tensor:
        """Return the part of a dimension whose last parts are short."""
        number, count = self.position(axes)
        size = math.ceil(whole.shape[dim] / count)
        first = min(whole.shape[dim], number * size)
        return whole.narrow(dim, first, min(size, whole.shape[dim] - first))

    def activation(self, whole: Tensor, axes: tuple[str, str, str]) -> Tensor:
        """Return the part of an activation [B, T, D], contiguous and of its own."""
        rows, positions, features = axes
        whole = self.padded(self.padded(whole, 0, rows), 1, positions)
        return self.short(whole, 2, features).clone(memory_format=torch.contiguous_format)

    def matrix(self, whole: Tensor, axes: tuple[str, str]) -> Tensor:
        """Return the part of a weight [out, in]."""
        part = self.short(self.padded(whole, 1, axes[1]), 0, axes[0])
        return part.clone(memory_format=torch.contiguous_format)

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return what all ranks of one tp draw alike, and those beside it otherwise."""
        generator = torch.Generator().manual_seed(100 * self.copy + seed)
        return torch.randn(shape, dtype=torch.float64, generator=generator)


def gap(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite where shapes differ or a number is none."""
    if ours.shape != expected.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    difference = float((ours.double() - expected.double()).abs().max())
    return difference if math.isfinite(difference) else math.inf
