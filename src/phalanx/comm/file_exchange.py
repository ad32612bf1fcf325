"""Send files between processes over gloo, beside the collectives of their job.

The group is no group of torch.distributed: no collective of the job, nor a check or a count of
them, sees its messages, and a thread may send while another trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from phalanx.comm.join import lazily_connected
from phalanx.comm.together import reason_of
from phalanx.errors import PeerLost
from phalanx.storage import PARTIAL

CHUNK_BYTES: Final = 8 << 20
"""Bytes of one message."""


class FileTransfer(NamedTuple):
    """A file that one process sends to another.

    Attributes:
        source: number of the process that has the file.
        target: number of the process that gets the file.
        name: path of the file below the folder of either process.
        num_bytes: size of the file, in bytes.
    """

    source: int
    target: int
    name: str
    num_bytes: int


class FileExchange:
    """The connections of some processes, numbered from 0, by which they send files."""

    def __init__(self, store: dist.Store, number: int, size: int, timeout_s: float) -> None:
        """Make the group; every process calls this with keys of `store` that only they use."""
        self._number = number
        with lazily_connected():
            made: Any = dist.ProcessGroupGloo  # its constructor has no type
            self._group = made(store, number, size, timedelta(seconds=timeout_s))

    def run(
        self,
        transfers: Sequence[FileTransfer],
        folder: Path,
        moved: Callable[[int], None] = lambda _: None,
    ) -> tuple[int, int]:
        """Send and receive the files of this process; return the bytes sent and received.

        Every process calls this with the same `transfers`, in the same order, in which each sends
        and receives. So the first transfer that is not done always has both its ends at work.

        Args:
            transfers: the files.
            folder: folder of this process.
            moved: called after each message received, with the bytes received so far.

        Raises:
            PeerLost: a process has gone.
            OSError: there is no room for a file.
        """
        num_received = 0
        with ThreadPoolExecutor(1, "files") as pool:
            sending = pool.submit(
                self._send, [t for t in transfers if t.source == self._number], folder
            )
            for each in (t for t in transfers if t.target == self._number):
                path = folder / each.name
                partial = part_of(path)
                reserve(partial, each.num_bytes)
                for chunk in _chunks(partial, each.num_bytes):
                    self._wait(self._group.recv([chunk], each.source, 0))
                    num_received += chunk.nbytes
                    moved(num_received)
                partial.rename(path)
            return sending.result(), num_received

    def _send(self, transfers: Sequence[FileTransfer], folder: Path) -> int:
        for each in transfers:
            for chunk in _chunks(folder / each.name, each.num_bytes):
                self._wait(self._group.send([chunk], each.target, 0))
        return sum(each.num_bytes for each in transfers)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(
                f"a process that sends or gets files has gone: {reason_of(error)}"
            ) from error


def part_of(path: Path) -> Path:
    """Return the path under which a file is received."""
    return path.with_name(path.name + PARTIAL)


def reserve(path: Path, num_bytes: int) -> None:
    """Reserve the room of a file, because a write to a mapped page without room is a SIGBUS.

    Raises:
        OSError: there is no room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)


def _chunks(path: Path, num_bytes: int) -> Sequence[torch.Tensor]:
    """Return the bytes of a file as tensors that share its memory."""
    mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return mapped.split(CHUNK_BYTES)
