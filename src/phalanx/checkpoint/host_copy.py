"""A host-memory copy of the tensors that a rank saves, reserved before the first step.

The writer thread saves from the copy, so the next steps may change the tensors. Without enough host
memory there is no copy: the tensors are then written piece by piece from the device, and the next
step waits for the write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.checkpoint.tensor_file import CHUNK_BYTES


class HostCopy:
    """A buffer with the bytes of several tensors, concatenated in the order of their file.

    On CUDA the buffer is pinned by `cudaHostRegister` if the system permits. PyTorch's
    `pin_memory` is not used, because it rounds the size up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._is_pinned = False
        self._most_bytes: int | None = None

    def reserve(self, tensors: Sequence[torch.Tensor], free_bytes: int | None = None) -> bool:
        """Allocate the buffer for `tensors`, and write to all its pages so that they exist.

        `free_bytes` limits the buffer of this rank from now on; None keeps the previous limit, if
        any. Return whether the buffer is large enough.
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
            # Written now, since the kernel gives out pages only when they are written: else the
            # first save would pay for them, or fail.
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
        """Unpin and free the buffer."""
        if self._is_pinned and self._buffer is not None:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._is_pinned = None, False

    def take(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Copy tensors, and wait for the copy; return the buffer, or None without enough memory.

        The caller may change the tensors as soon as this returns.
        """
        if not self.reserve(tensors):
            return None
        assert self._buffer is not None
        # All copies are queued, then awaited once; the next step may overwrite the tensors after
        # that.
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            room = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return [self._buffer[:end]]


@dataclass(frozen=True)
class InPieces:
    """The tensors as CPU pieces of at most CHUNK_BYTES, each copied on demand."""

    tensors: Sequence[torch.Tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for tensor in self.tensors:
            flat = tensor.reshape(-1)
            for piece in flat.split(max(1, CHUNK_BYTES // tensor.itemsize)):
                yield piece.cpu()
