"""Memory of this process that the other ranks of its host map too.

It is an anonymous file of memory (memfd_create), so it has no name in /dev/shm: no limit of that
file system holds, and nothing is left when a process is killed. Another process opens it as
/proc/PID/fd/NUMBER, and both read the token at its beginning: who reads the same shares the memory.

    0         page        free     block           free      block          num_bytes
    | token   | ............ | bucket 0 ...    | ......... | bucket 1 ... | never touched |

A `Heap` gives out tensors on it. A block is free again once nobody holds the tensor or the block.
Memory is reserved before it is given out: the error of a limit is raised there, and not at a write.
A full control group, such as a container's, may still kill a process, as for any memory. Memory
freed beyond `KEPT_BYTES` goes back to the system. A fork of a rank has this memory too, not a copy:
a gradient that it changes is changed in the rank.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from phalanx.comm.memory_file import memory_file
from phalanx.errors import TrainingError

PAGE: Final = mmap.PAGESIZE

KEPT_BYTES: Final = 256 << 20
"""Free memory that a heap keeps for its next blocks: new pages of 100 MiB take some 40 ms."""

MOST_BYTES: Final = 1 << 40
"""Addresses that a heap takes at most."""

_NAME: Final = "phalanx"
_TOKEN_BYTES: Final = 16

Block = np.ndarray[Any, Any]
"""Bytes of a heap, which are free once nobody refers to them."""


@contextmanager
def said_if_full() -> Generator[None]:
    """Say in one sentence that the host has no memory left for a block."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"shared memory: {error}; use smaller batches or more hosts, or have gloo send by "
            "--no-shared-memory (shared_memory=False), which needs fewer buffers"
        ) from error


class Mapped:
    """A heap as this process has mapped it.

    Attributes:
        bytes: all of it, uint8.
        words: the same as int64.
        address: where it begins in this process.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self.file = file
        self.num_bytes = num_bytes
        self.map = mmap.mmap(file, num_bytes)
        self.map.madvise(mmap.MADV_DONTDUMP)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()
        self.words = memoryview(self.map).cast("q")

    @property
    def token(self) -> bytes:
        """The mark of this memory, which no other has."""
        return bytes(self.map[:_TOKEN_BYTES])

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a part of it as a one-dimensional tensor."""
        return self.bytes[offset : offset + num_bytes].view(dtype)


class Heap(Mapped):
    """The heap of this process, see the head of this file."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: the system or one of its limits does not allow it.
        """
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError("addresses are limited, and a heap takes as many as the host has memory")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        file = os.memfd_create(_NAME)
        size = min(MOST_BYTES, memory) // PAGE * PAGE
        os.ftruncate(file, size)
        super().__init__(file, size)
        os.posix_fallocate(file, 0, PAGE)
        self.map[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        self._lock = threading.Lock()
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._freed: deque[tuple[int, int]] = deque()  # from whichever thread drops the last tensor
        self._free: dict[int, int] = {PAGE: size - PAGE}
        self._backed: dict[int, int] = {}

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor on this heap.

        Raises:
            OSError: the host has no such memory left.
        """
        num_bytes = math.prod(size) * dtype.itemsize
        block = self.block(num_bytes)
        return torch.from_numpy(block).view(dtype).view(*size)

    def block(self, num_bytes: int) -> Block:
        """Return as many bytes.

        Raises:
            OSError: the host has no such memory left.
        """
        size = max(1, -(-num_bytes // PAGE)) * PAGE
        with self._lock:
            self._take_back()
            offset = self._cut(self._backed, size)
            if offset is None:
                offset = self._cut(self._free, size)
                if offset is None:
                    raise OSError(f"a heap of {self.num_bytes} bytes has no {size} left")
                try:
                    os.posix_fallocate(self.file, offset, size)
                except OSError:
                    _add(self._free, offset, size)
                    raise
            block = np.frombuffer(self.map, np.uint8, num_bytes, offset)
            weakref.finalize(block, self._freed.append, (offset, size)).atexit = False
            self._blocks[self.address + offset] = block
            return block

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block that a tensor lies in; None if it lies elsewhere."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def _take_back(self) -> None:
        """Keep what was freed, or return it to the system."""
        while self._freed:
            offset, size = self._freed.popleft()
            if sum(self._backed.values()) + size <= KEPT_BYTES:
                _add(self._backed, offset, size)
            else:
                self.map.madvise(mmap.MADV_REMOVE, offset, size)
                _add(self._free, offset, size)

    @staticmethod
    def _cut(extents: dict[int, int], size: int) -> int | None:
        """Cut as many bytes off the smallest extent that has them; return their offset."""
        fitting = [(length, at) for at, length in extents.items() if length >= size]
        if not fitting:
            return None
        length, at = min(fitting)
        del extents[at]
        if length > size:
            extents[at + size] = length - size
        return at


def _add(extents: dict[int, int], offset: int, size: int) -> None:
    """Add an extent, joined with those beside it."""
    size += extents.pop(offset + size, 0)
    for at, length in extents.items():
        if at + length == offset:
            extents[at] = length + size
            return
    extents[offset] = size


_HEAPS: dict[int, Heap] = {}
"""By process: a fork of a rank has mapped the rank's heap, and gives none of it out."""

_MAPPED: dict[bytes, Mapped] = {}
"""Heaps of other processes, by their tokens."""


def own_heap() -> Heap:
    """Return the heap of this process, made when it is first asked for.

    Raises:
        OSError: the system or one of its limits does not allow it.
    """
    if os.getpid() not in _HEAPS:
        _HEAPS[os.getpid()] = Heap()
    return _HEAPS[os.getpid()]


def mapped(process: int, file: int, token: bytes, num_bytes: int) -> Mapped:
    """Return the heap that another process has as a file.

    Raises:
        OSError: that file is not the heap with this token and size, or this process may not open
            or map it.
    """
    if token not in _MAPPED:
        with memory_file(process, file, _NAME, num_bytes, is_written=True) as opened:
            if os.pread(opened, _TOKEN_BYTES, 0) != token:
                raise OSError(f"file {file} of process {process} is another heap")
            _MAPPED[token] = Mapped(opened, num_bytes)  # the map has a file of its own
    return _MAPPED[token]
