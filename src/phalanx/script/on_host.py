"""Numbers of a device on their way to the host, for which neither waits until they are read."""

from __future__ import annotations

import torch
from torch import Tensor


class OnHost:
    """A copy of a tensor that comes to the host while its device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin to copy; what the device is given later is not waited for."""
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def tolist(self) -> list[float]:
        """Return the numbers of a vector, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
