"""The interface of gradient compressors, which sum buckets of gradients over dp in fewer bytes.

[Note: Error feedback] Each rank stores the compression error of a bucket, and adds the error to the
same bucket in the next step. Errors are thus sent one step later: the sum of all compressed
gradients over the steps differs from the exact sum by one step's error, and the mean error tends to
0 (Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
2019). Each rank has its own error, as large as the gradients in float32. Errors are not in
checkpoints: a resumed run starts with zero errors. So does the step after a skipped step, because
the skipped gradients never reached the weights. The error of a parameter that no rank used in a
step is sent in that step, and lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from phalanx.comm.axes import DENSE
from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending

AXIS: Final = "dp"
"""The axis over which gradients are compressed: the outermost axis, with the slowest links."""


class Compressor(ABC):
    """Lossy sum of gradient buckets over the ranks of dp, with error feedback."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def start(
        self, number: int, flat: Tensor, parts: Sequence[Tensor], sums: str = DENSE.sums
    ) -> Pending:
        """Start to overwrite a bucket with its sum over the set of axes `sums`.

        All ranks of dp must call this, and wait for the returned `Pending`, in the same order.

        Args:
            number: number of the bucket, the same in each step.
            flat: the bucket, one-dimensional.
            parts: the gradients in the bucket, as views of `flat`.
            sums: the axes over which they are partial, dp among them.
        """
        for axis in self.comm.axes_of(sums):
            if axis != AXIS:
                self.comm.all_reduce(flat, axis)
        return self._start(number, flat, parts)

    @abstractmethod
    def _start(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Pending:
        """Start to overwrite a bucket with its sum over dp."""

    @abstractmethod
    def reset_errors(self) -> None:
        """Drop the stored errors, after a step whose gradients were not used."""


def zero_nonfinite(error: Tensor) -> None:
    """Replace non-finite errors by 0 in place, because they would make all later steps invalid."""
    torch.nan_to_num_(error, 0.0, 0.0, 0.0)
