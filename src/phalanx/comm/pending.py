"""The handle of an asynchronous collective."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from phalanx.comm.ranges import named
from phalanx.comm.transfer import Transfer
from phalanx.comm.waits import waiting


class Pending:
    """An asynchronous collective; `wait` returns its tensor once it is complete."""

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work | None = None,
        begin: Callable[[], Pending] | None = None,
        op: str = "",
        axis: str = "world",
    ) -> None:
        """Make `wait` wait for `work`, or for what `begin` then starts; `op` labels traces."""
        self._tensor = tensor
        self._op, self._axis = op, axis
        self._work = work
        self._begin = begin

    def wait(self) -> Tensor:
        """Return the tensor once the collective has ended (for CUDA: once it is on the stream)."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin().wait()
        if self._work is not None:
            with named(f"wait {self._op} {self._axis}"):
                if isinstance(self._work, Transfer):  # its `wait` notifies listeners itself
                    self._work.tensor, self._work.axis = self._tensor, self._axis
                    self._work.wait()
                else:
                    with waiting(self._tensor, self._axis):
                        self._work.wait()
            self._work = None
        return self._tensor
