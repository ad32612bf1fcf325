"""Memory of a server that the workers of its host read, and cannot write.

It is a file without a name (memfd), which workers open by the number of the server's process, so
nobody has to remove it after a crash. A word before the weights counts their changes,
and is odd while they do: a reader that has met a change reads again (a seqlock). Weights are read
so on Linux alone, on x86, which keeps the order of writes.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.comm.memory_file import memory_file

_NAME: Final = "phalanx-weights"

_HEAD: Final = 4096
"""Bytes before the tensors: the number of changes."""

_NUM_TRIES: Final = 8

IS_POSSIBLE: Final = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def deal(flats: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy flat tensors, one after the other, into parts, likewise."""
    if parts:
        pieces, sizes = list(flats), [part.numel() for part in parts]
        if [piece.numel() for piece in pieces] != sizes:
            pieces = list((pieces[0] if len(pieces) == 1 else torch.cat(pieces)).split(sizes))
        torch._foreach_copy_(list(parts), pieces)  # pyright: ignore[reportPrivateUsage]


class SharedTensors:
    """Tensors of one data type in memory that others may read."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        num_bytes = _num_bytes(sizes, dtype)
        number = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        # Once: closed a second time, the number would close whichever file has it by then.
        self._close = weakref.finalize(self, os.close, number)
        os.ftruncate(number, num_bytes)
        memory = mmap.mmap(number, num_bytes)
        head = torch.frombuffer(memory, dtype=torch.int64, count=2)
        # A closed file leaves its number to the next; nobody else gets this mark.
        head[1] = self._mark = secrets.randbits(62)
        self._changes = head[:1]
        flat = torch.frombuffer(memory, dtype=dtype, offset=_HEAD)
        self.tensors = list(flat[: sum(sizes)].split(list(sizes)))
        self.place = [os.getpid(), number, _boot(), self._mark]

    @contextmanager
    def changing(self) -> Generator[None]:
        """Mark that the tensors change inside."""
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    def close(self) -> None:
        """Let go of the file; those who read it keep theirs."""
        self._close()


class SharedView:
    """The tensors of a server of this host, to be read."""

    def __init__(
        self, place: Sequence[int | str], sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Open the memory.

        Raises:
            OSError: it is on another host, in another container, or of another user.
        """
        process, number, boot, mark = place
        if boot != _boot():
            raise OSError("the server is on another host")
        num_bytes = _num_bytes(sizes, dtype)
        where = int(process), int(number)
        with memory_file(*where, _NAME, num_bytes, is_written=False) as file:
            memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings(action="ignore"):  # torch warns that nobody may write to it
            raw = torch.frombuffer(memory, dtype=torch.uint8)
        self._changes, found = raw[:8].view(torch.int64), int(raw[8:16].view(torch.int64))
        if found != mark:
            raise OSError("the server has replaced these weights")
        flat = raw[_HEAD:].view(dtype)
        self.tensors = list(flat[: sum(sizes)].split(list(sizes)))

    def read(self, targets: Sequence[Sequence[Tensor]]) -> bool:
        """Copy each of the first tensors into its targets; False if it would not hold still."""

        def copy() -> None:
            for tensor, parts in zip(self.tensors, targets, strict=False):
                deal([tensor], parts)

        return self._holds_still(copy)

    def read_rows(self, number: int, rows: Tensor, out: Tensor) -> bool:
        """Copy rows of a tensor, as wide as `out`, to it; False if it would not hold still."""
        table = self.tensors[number].view(-1, out.shape[1])
        return self._holds_still(lambda: torch.index_select(table, 0, rows, out=out))

    def _holds_still(self, copy: Callable[[], Any]) -> bool:
        """Copy until nothing has changed meanwhile; False if that does not come."""
        for _ in range(_NUM_TRIES):
            before = int(self._changes)
            if before % 2 == 0:
                copy()
                if int(self._changes) == before:
                    return True
        return False


def _num_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    return _HEAD + max(1, sum(sizes)) * dtype.itemsize


def _boot() -> str:
    """Return what no two hosts, nor one before and after a restart, have alike."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
