"""The copy of what a rank writes, in host memory that is reserved before the first step.

On the way to the disk the state lies here, so that the next steps may change the tensors. Where
there is not enough memory nothing is kept: then it is written from where it lies, piece by piece,
and the step waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.checkpoint.tensor_file import CHUNK_BYTES


class HostCopy:
    """Holds the bytes of some tensors, one after the other, as their file does.

    On CUDA the memory is pinned if the system lets us, exactly as much as there is: PyTorch's own
    pinned memory is rounded up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._is_pinned = False
        self._most_bytes: int | None = None

    def reserve(self, tensors: Sequence[torch.Tensor], free_bytes: int | None = None) -> bool:
        """Get the memory for such tensors, all of it now: a promised page may be missing later.

        This rank may take `free_bytes` from now on; None leaves it at what was said before, or to
        the system. Returns whether there is enough.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self._buffer is not None and self._buffer.nbytes >= num_bytes:
            return True
        self.release()
        if free_bytes is not None:
            self._most_bytes = free_bytes
        if self._most_bytes is not None and num_bytes > self._most_bytes:
            return False
        try:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").zero_()
        except (RuntimeError, MemoryError):
            return False
        if num_bytes and any(tensor.is_cuda for tensor in tensors):
            cuda: Any = torch.cuda.cudart()
            self._is_pinned = (
                cuda.cudaHostRegister(self._buffer.data_ptr(), num_bytes, 0).value == 0
            )
        return True

    def release(self) -> None:
        """Give the memory back."""
        if self._is_pinned and self._buffer is not None:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._is_pinned = None, False

    def take(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Copy tensors, and return what holds their bytes; they may change once this returns.

        None if there is not enough memory.
        """
        if not self.reserve(tensors):
            return None
        assert self._buffer is not None
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            room = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return [self._buffer[:end]]


def in_pieces(tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Return the tensors in pieces of few bytes on the CPU, each made when it is asked for."""
    for tensor in tensors:
        flat = tensor.reshape(-1)
        for piece in flat.split(max(1, CHUNK_BYTES // tensor.itemsize)):
            yield piece.cpu()
