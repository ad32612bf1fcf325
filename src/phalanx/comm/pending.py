"""A collective under way."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from phalanx.comm.waits import waiting


class Pending:
    """A collective under way; `wait` returns its tensor when it is there."""

    def __init__(
        self,
        tensor: Tensor,
        work: dist.Work | None = None,
        begin: Callable[[], Pending] | None = None,
    ) -> None:
        """Have `wait` wait for `work`, or begin it."""
        self._tensor = tensor
        self._work = work
        self._begin = begin

    def wait(self) -> Tensor:
        """Return the tensor once the collective has ended (for CUDA: once it is on the stream)."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin().wait()
        if self._work is not None:
            with waiting(self._tensor):
                self._work.wait()
            self._work = None
        return self._tensor
