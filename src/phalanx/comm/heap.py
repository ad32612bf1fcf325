"""Memory of this process that the other ranks on its host map too.

The memory is an anonymous memory file (memfd_create). It has no name in /dev/shm, so the size limit
of that file system does not apply, and nothing remains when a process is killed. Another process
opens the file as /proc/PID/fd/NUMBER, and compares the token at its start: if the tokens are equal,
the two processes share the memory.

    0         page        free     block           free      block          num_bytes
    | token   | ............ | bucket 0 ...    | ......... | bucket 1 ... | never touched |

A `Heap` allocates tensors in this memory. A block is freed when its tensor and the block itself are
no longer referenced. Memory is reserved at allocation, so that an exceeded limit raises an error
there instead of killing the process at a write. A full control group, such as a container's, may
still kill the process, as for any memory. Freed memory beyond `KEPT_BYTES` returns to the system.
A fork of a rank shares this memory instead of a copy: its writes change the rank's gradients.
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
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import TrainingError

PAGE: Final = mmap.PAGESIZE

KEPT_BYTES: Final = 256 << 20
"""Most freed memory that a heap keeps for reuse: 100 MiB of new pages take about 40 ms."""

MOST_BYTES: Final = 1 << 40
"""Most address space that a heap reserves."""

_NAME: Final = "phalanx"
_TOKEN_BYTES: Final = 16

Block = np.ndarray[Any, Any]
"""Bytes of a heap, which are freed when this array is no longer referenced."""


@contextmanager
def memory_file(
    process: int, number: int, name: str, num_bytes: int, *, is_written: bool
) -> Generator[int]:
    """Open a memory file (memfd_create) of a process of this host; yield a descriptor of it.

    It is opened as /proc/PID/fd/NUMBER. In another container the same numbers may mean another
    process and file, so callers compare a token of the owner before they map it, in addition to the
    name and size compared here.

    Raises:
        OSError: the file does not exist, this process may not open it, or it has another name or
            size.
    """
    path = Path(f"/proc/{process}/fd/{number}")
    target = os.readlink(path)  # before opening, because opening a pipe or device could block
    if target != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {target}; expected a memory file named {name}")
    opened = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        size = os.fstat(opened).st_size
        if size != num_bytes:
            raise OSError(f"{path} has {size} bytes; expected {num_bytes}")
        yield opened
    finally:
        os.close(opened)


@contextmanager
def errors_if_full() -> Generator[None]:
    """Convert an OSError inside the block to a TrainingError that reports lack of memory."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"shared memory: {error}; use smaller batches or more hosts, or let gloo send by "
            "--no-shared-memory (shared_memory=False), which needs fewer buffers"
        ) from error


class Mapped:
    """A mapping of a heap, of this or another process, in this process's address space.

    Attributes:
        bytes: the heap as uint8.
        words: the same memory as int64.
        address: start address of the mapping.
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
        """Random bytes at the start of the memory that identify it."""
        return bytes(self.map[:_TOKEN_BYTES])

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return bytes `offset` to `offset + num_bytes` as a one-dimensional tensor."""
        return self.bytes[offset : offset + num_bytes].view(dtype)


class Heap(Mapped):
    """The heap of this process, see the module's docstring."""

    def __init__(self) -> None:
        """Create the memory file and map it.

        Raises:
            OSError: the system or one of its limits does not allow it.
        """
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError(
                "address space is limited, and a heap reserves as much as the host has memory"
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        file = os.memfd_create(_NAME)
        size = min(MOST_BYTES, memory) // PAGE * PAGE
        os.ftruncate(file, size)
        super().__init__(file, size)
        os.posix_fallocate(file, 0, PAGE)
        self.map[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        self._lock = threading.Lock()
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._freed: deque[tuple[int, int]] = deque()  # filled by any thread, without the lock
        self._free: dict[int, int] = {PAGE: size - PAGE}
        self._backed: dict[int, int] = {}

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor on this heap.

        Raises:
            OSError: the host does not have enough memory.
        """
        num_bytes = math.prod(size) * dtype.itemsize
        block = self.block(num_bytes)
        return torch.from_numpy(block).view(dtype).view(*size)

    def block(self, num_bytes: int) -> Block:
        """Allocate `num_bytes` bytes.

        Raises:
            OSError: the host does not have enough memory.
        """
        size = max(1, -(-num_bytes // PAGE)) * PAGE
        with self._lock:
            # free (no pages) -> block -> backed (pages, at most KEPT_BYTES) -> block ...
            #                         -> free, if more is backed already; the pages are returned
            while self._freed:
                offset, length = self._freed.popleft()
                if sum(self._backed.values()) + length <= KEPT_BYTES:
                    _add(self._backed, offset, length)
                else:
                    self.map.madvise(mmap.MADV_REMOVE, offset, length)
                    _add(self._free, offset, length)
            offset = self._cut(self._backed, size)
            if offset is None:
                offset = self._cut(self._free, size)
                if offset is None:
                    raise OSError(f"a heap of {self.num_bytes} bytes has no {size} bytes left")
                try:
                    os.posix_fallocate(self.file, offset, size)
                except OSError:
                    _add(self._free, offset, size)
                    raise
            block = np.frombuffer(self.map, np.uint8, num_bytes, offset)
            # A finalizer may run in any thread at any allocation, also while this thread holds the
            # lock: so it only appends, and the next call of `block` takes the memory back.
            weakref.finalize(block, self._freed.append, (offset, size)).atexit = False
            self._blocks[self.address + offset] = block
            return block

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block that stores `tensor`; None if the tensor is not on this heap."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    @staticmethod
    def _cut(extents: dict[int, int], size: int) -> int | None:
        """Remove `size` bytes from the smallest sufficient extent; return their offset, or None."""
        fitting = [(length, at) for at, length in extents.items() if length >= size]
        if not fitting:
            return None
        length, at = min(fitting)
        del extents[at]
        if length > size:
            extents[at + size] = length - size
        return at


def _add(extents: dict[int, int], offset: int, size: int) -> None:
    """Add an extent, merged with adjacent extents."""
    size += extents.pop(offset + size, 0)
    for at, length in extents.items():
        if at + length == offset:
            extents[at] = length + size
            return
    extents[offset] = size


_HEAPS: dict[int, Heap] = {}
"""Process id -> heap; a fork of a rank must not allocate from the rank's heap, which it maps."""

_MAPPED: dict[bytes, Mapped] = {}
"""Token -> mapped heap of another process."""


def own_heap() -> Heap:
    """Return the heap of this process, created by the first call.

    Raises:
        OSError: the system or one of its limits does not allow it.
    """
    if os.getpid() not in _HEAPS:
        _HEAPS[os.getpid()] = Heap()
    return _HEAPS[os.getpid()]


def mapped(process: int, file: int, token: bytes, num_bytes: int) -> Mapped:
    """Map the heap that is open as descriptor `file` of another process; cache it by token.

    Raises:
        OSError: the file is not the heap with this token and size, or this process may not open
            or map it.
    """
    if token not in _MAPPED:
        with memory_file(process, file, _NAME, num_bytes, is_written=True) as opened:
            if os.pread(opened, _TOKEN_BYTES, 0) != token:
                raise OSError(f"file {file} of process {process} is a different heap")
            _MAPPED[token] = Mapped(opened, num_bytes)  # mmap duplicates the descriptor
    return _MAPPED[token]
