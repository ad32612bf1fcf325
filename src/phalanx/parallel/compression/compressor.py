"""What sums a bucket of gradients over dp in fewer bytes: the interface.

[Note: Error feedback] Each rank keeps what compression has cut off a bucket, and adds it to the
same bucket of the next step. So what was cut off arrives later: over steps the sum of all that has
arrived differs from the exact sum by one step's error, and the mean error tends to 0 (Seide et al.,
1-Bit SGD, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). The error is
of one rank, as large as the gradients in float32, and is no part of a checkpoint: a resumed run
begins without. So does the step after one that is skipped, whose errors are of gradients that no
weight took. The error of a parameter that no rank used in a step is sent in that step, and lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending

AXIS: Final = "dp"
"""The axis over which gradients are compressed, the outermost, and so the slowest."""


class Compressor(ABC):
    """Sums buckets of gradients over the ranks of dp, with a loss that error feedback returns."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def start(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Pending:
        """Begin to overwrite a bucket with its sum over the axes of gradients.

        All ranks of dp call this, and wait for what it returns, in one order.

        Args:
            number: of the bucket, the same in each step.
            flat: the bucket, one-dimensional.
            parts: the gradients in it, views of `flat`.
        """
        for axis in self.comm.axes_of("grad"):
            if axis != AXIS:
                self.comm.all_reduce(flat, axis)
        return self._start(number, flat, parts)

    @abstractmethod
    def _start(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Pending:
        """Begin to overwrite a bucket with its sum over dp."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the errors, of gradients that no step has used."""


def keep_finite(error: Tensor) -> None:
    """Drop the error of what overflowed, in place: it would spoil all steps to come."""
    torch.nan_to_num_(error, 0.0, 0.0, 0.0)
