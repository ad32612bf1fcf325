"""A server's weights in shared memory, which workers on its host can read but not write.

The memory is an anonymous file (memfd) that workers open by the server's process id, so it needs no
cleanup after a crash. A counter before the weights is incremented before and after each change, so
it is odd during a change: a reader that finds an odd or changed counter reads again (a seqlock).
This is used only on Linux on x86-64, which preserves the order of writes.

The memory also has the latest version that a worker may use, and the time at which the server last
touched it. While the server is alive, a worker can read a version that is there without a request.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.comm.heap import memory_file
from phalanx.server.wire import own_descriptors

_NAME: Final = "phalanx-weights"

_HEAD: Final = 4096
"""Bytes before the tensors, for integers: counter of changes, mark, version, time of last touch."""

FRESH_S = 1.0
"""Time since the server's last touch in which its memory is read without a request, in seconds.

Less than LEASE_S, after which another server may have replaced it."""

_NUM_TRIES: Final = 8

_NONE: Final = -1
"""The version in memory that must not be read without a request."""

IS_POSSIBLE: Final = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def copy_concatenated(flats: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy the concatenation of `flats` into the concatenation of `parts`."""
    if parts:
        pieces, sizes = list(flats), [part.numel() for part in parts]
        if [piece.numel() for piece in pieces] != sizes:
            pieces = list((pieces[0] if len(pieces) == 1 else torch.cat(pieces)).split(sizes))
        torch._foreach_copy_(list(parts), pieces)  # pyright: ignore[reportPrivateUsage]


class SharedTensors:
    """Flat tensors of one dtype in shared memory that other processes can map read-only."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        num_bytes = _num_bytes(sizes, dtype)
        with own_descriptors():
            number = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            # At most once: by a second close, the descriptor may belong to another file.
            self._close = weakref.finalize(self, os.close, number)
            os.ftruncate(number, num_bytes)
            memory, boot = mmap.mmap(number, num_bytes), _boot()
        head = torch.frombuffer(memory, dtype=torch.int64, count=4)
        # A closed file's descriptor may be reused for another file; the mark is unique.
        head[1] = self._mark = secrets.randbits(62)
        self._changes, self._version, self._touched = head[:1], head[2:3], head[3:]
        flat = torch.frombuffer(memory, dtype=dtype, offset=_HEAD)
        self.tensors = list(flat[: sum(sizes)].split(list(sizes)))
        self.place = [os.getpid(), number, boot, self._mark]
        self.touch()

    @contextmanager
    def changing(self) -> Generator[None]:
        """Mark the tensors as changing inside the block, so that readers retry."""
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    def publish(self, version: int) -> None:
        """Store the latest version that a worker may use, unless the memory is closed."""
        if self._close.alive:  # a backup may acknowledge a version after that
            self._version.fill_(version)

    def touch(self) -> None:
        """Store the time: the server is alive, and has a shard in this memory."""
        self._touched.fill_(time.monotonic_ns())

    def close(self) -> None:
        """Close the file; readers that have mapped it keep their mappings, but use no version."""
        self.publish(_NONE)
        self._close()


class SharedView:
    """A read-only mapping of the tensors of a server on this host."""

    def __init__(
        self, place: Sequence[int | str], sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Map the memory at `place`, see `SharedTensors.place`.

        Raises:
            OSError: the server is on another host, in another container, or another user's, or has
                replaced the memory.
        """
        process, number, boot, mark = place
        if boot != _boot():
            raise OSError("the server is on another host")
        num_bytes = _num_bytes(sizes, dtype)
        where = int(process), int(number)
        with memory_file(*where, _NAME, num_bytes, is_written=False) as file:
            memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings(action="ignore"):  # torch warns about read-only memory
            raw = torch.frombuffer(memory, dtype=torch.uint8)
        self._changes, its_mark, self._version, self._touched = raw[:32].view(torch.int64)
        if int(its_mark) != mark:
            raise OSError("the server has replaced these weights")
        flat = raw[_HEAD:].view(dtype)
        self.tensors = list(flat[: sum(sizes)].split(list(sizes)))

    @property
    def version(self) -> int:
        """The latest version that a worker may use; weights that are read next may be newer.

        It is -1 if the server has closed the memory, or has not touched it for `FRESH_S`.
        """
        touched_ns = int(self._touched)
        age_s = (time.monotonic_ns() - touched_ns) / 1e9  # negative: another time namespace
        return int(self._version) if 0 <= age_s < FRESH_S else _NONE

    def read(self, targets: Sequence[Sequence[Tensor]]) -> bool:
        """Copy each of the first tensors to its targets; return False if changes interfered."""

        def copy() -> None:
            for tensor, parts in zip(self.tensors, targets, strict=False):
                copy_concatenated([tensor], parts)

        return self._holds_still(copy)

    def read_rows(self, number: int, rows: Tensor, out: Tensor) -> bool:
        """Copy rows of a table to `out`, of equal width; return False if changes interfered."""
        table = self.tensors[number].view(-1, out.shape[1])
        return self._holds_still(lambda: torch.index_select(table, 0, rows, out=out))

    def _holds_still(self, copy: Callable[[], Any]) -> bool:
        """Repeat `copy` until nothing changes meanwhile; return False after `_NUM_TRIES` tries."""
        # The counter is odd during a change, and equal before and after a copy of one version:
        #
        #     server    4 | 5 ... writes ... | 6
        #     reader    4 copy 4                        done
        #     reader      4 --- copy --- 5              changed meanwhile: try again
        #     reader              5                     a change is under way: try again
        for _ in range(_NUM_TRIES):
            before = int(self._changes)
            if before % 2 == 0:
                copy()
                if int(self._changes) == before:
                    return True
        return False


class MappedShards:
    """The memory of shards that a worker has mapped.

    A server that is no longer the primary of a shard may still have it, as a backup. So each call
    names the current primary.
    """

    def __init__(self) -> None:
        # Shard -> primary that sent the place, place, and mapping.
        self._of_shard: dict[int, tuple[Hashable, Sequence[int | str], SharedView]] = {}

    def ready(self, shard: int, primary: Hashable, due: int) -> tuple[int, SharedView] | None:
        """Return a version of at least `due` and the memory; None if it has no such version.

        The weights in the memory may already be newer than the version, but not older.
        """
        asked, _, view = self._of_shard.get(shard, (None, (), None))
        if view is None or asked != primary:
            return None
        version = view.version
        return (version, view) if version >= due else None

    def map(
        self, shard: int, primary: Hashable, place: Sequence[int | str], sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> SharedView | None:  # fmt: skip
        """Map the memory at `place`, which `primary` has sent, if it is not mapped.

        Return None if the memory is on another host or no longer exists.
        """
        _, mapped, view = self._of_shard.get(shard, (None, (), None))
        if view is None or mapped != place:
            try:
                view = SharedView(place, sizes, dtype)
            except OSError:
                return None
        self._of_shard[shard] = primary, place, view
        return view


def _num_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    return _HEAD + max(1, sum(sizes)) * dtype.itemsize


def _boot() -> str:
    """Return the boot id, which is unique to a host and changes when the host restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
