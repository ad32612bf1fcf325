"""PowerSGD: the summed gradient of a matrix, approximated by a product of two narrow matrices.

With M[m, n], a rank's gradient plus its error from the previous step, the ranks compute

    P = sum_dp M Q          all-reduce of m x r;  P is then orthonormalized
    Q = sum_dp M.T P        all-reduce of n x r
    M <- P Q.T              the error is M - P (M.T P).T, with each rank's own M

and start the next step with this Q (Vogels et al., PowerSGD, 2019, algorithms 1 and 2). A rank
sends r (m + n) instead of m n values. Gradients with fewer than two dimensions, and gradients that
would not become at least twice as small, are summed uncompressed in the first all-reduce.

Every rank orthonormalizes the same sum P. Ranks on processors of the same kind get equal bits, so
their replicas stay equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending
from phalanx.parallel.compression.compressor import AXIS, Compressor, zero_nonfinite

RANK: Final = 4
"""Number of columns of the narrow matrices, r."""


@dataclass
class _Matrix:
    """Compressor state of a gradient, viewed as S matrices M[m, n]: see `_matrices`.

    Attributes:
        error: [S, m, n], the error of the last step; during a step, M.
        q: [S, n, r], the matrix Q of the last step.
    """

    error: Tensor
    q: Tensor


class LowRankSum(Compressor):
    """Sum of gradient buckets by PowerSGD; see the module docstring."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._matrices: dict[tuple[int, int], _Matrix] = {}

    @override
    def _start(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Pending:
        views = [_matrices(part) for part in parts]
        wide = [at for at, view in enumerate(views) if view is not None]
        rest = [part for part, view in zip(parts, views, strict=True) if view is None]
        matrices: list[_Matrix] = []
        for at in wide:
            view = views[at]
            assert view is not None
            if (number, at) not in self._matrices:
                error = torch.zeros_like(view, dtype=torch.float32)
                q = _first_q(error.new_empty(len(error), error.shape[2], RANK))
                self._matrices[number, at] = _Matrix(error, q)
            matrix = self._matrices[number, at]
            matrix.error.add_(view)
            matrices.append(matrix)
        #   `_start`     P_r = M_r Q  [m, r]      message: P_r of all matrices | small gradients
        #                all_reduce, while backward computes
        #   `_finish`    P = basis of sum P_r      Q_r = M_r^T P  [n, r]
        #                all_reduce, which the wait for the bucket waits for
        narrow = [matrix.error @ matrix.q for matrix in matrices]
        message = _joined([*narrow, *rest], flat)
        hop = self.comm.all_reduce_start(message, AXIS)
        finish = functools.partial(
            self._finish, flat, [parts[at] for at in wide], rest, matrices, message, hop
        )
        return Pending(flat, begin=finish)

    def _finish(
        self, flat: Tensor, wide: Sequence[Tensor], rest: Sequence[Tensor],
        matrices: Sequence[_Matrix], message: Tensor, hop: Pending,
    ) -> Pending:  # fmt: skip
        hop.wait()
        shapes = [(*matrix.error.shape[:2], RANK) for matrix in matrices]
        sizes = [math.prod(shape) for shape in shapes]
        *sums, exact = message.split([*sizes, len(message) - sum(sizes)])
        for part, total in zip(rest, exact.split([part.numel() for part in rest]), strict=True):
            part.copy_(total.view_as(part))
        bases = [
            torch.linalg.qr(each.view(shape)).Q for each, shape in zip(sums, shapes, strict=True)
        ]
        columns = [matrix.error.mT @ base for matrix, base in zip(matrices, bases, strict=True)]
        totals = self.comm.all_reduce(_joined(columns, flat), AXIS)
        totals_q = totals.split([each.numel() for each in columns])
        for part, matrix, base, mine, total in zip(
            wide, matrices, bases, columns, totals_q, strict=True
        ):
            q = total.view_as(mine)
            part.copy_((base @ q.mT).view_as(part))
            # With the rank's own Q_r: the errors of all ranks then sum to sum M_r - P Q^T, which is
            # exactly what the result lacks.
            matrix.error.baddbmm_(base, mine.mT, alpha=-1)
            zero_nonfinite(matrix.error)
            # A loss that overflowed leaves a Q of NaN, from which no later step would recover.
            matrix.q = torch.where(q.isfinite().all(), q, _first_q(q))
        return Pending(flat)

    @override
    def reset_errors(self) -> None:
        self._matrices.clear()


def _matrices(part: Tensor) -> Tensor | None:
    """Return a gradient as matrices [S, m, n]; None if their narrow ones are not half as large.

    A stack, such as experts [E, F, D], has a matrix each: what follows from one expert does not
    depend on others. The kernels of most convolutions are too small for that, and are one matrix.
    """
    if part.ndim == 3 and _is_wide(*part.shape[1:]):
        return part
    is_one = part.ndim > 1 and _is_wide(len(part), part.numel() // len(part))
    return part.reshape(1, len(part), -1) if is_one else None


def _is_wide(m: int, n: int) -> bool:
    return 2 * RANK * (m + n) <= m * n


def _first_q(like: Tensor) -> Tensor:
    """Return equal random matrices with the shape of `like`, [S, n, r], the same on all ranks."""
    generator = torch.Generator().manual_seed(like.shape[1])
    return torch.randn(like.shape[1:], generator=generator).to(like.device).repeat(len(like), 1, 1)


def _joined(parts: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Concatenate `parts` into one flat float32 message; it may be empty."""
    empty = flat.new_empty(0, dtype=torch.float32)
    return torch.cat([empty, *(part.reshape(-1).float() for part in parts)])
