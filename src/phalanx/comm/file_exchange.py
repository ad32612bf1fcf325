"""Send files between processes over gloo, beside the collectives of their job.

The group is none of torch.distributed: no collective of the job, nor a check or count of them, sees
its messages, and a thread may send while another trains.
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
    """A file of `num_bytes` that the process `source` sends to the process `target`.

    `name` is its path below the folder of either process.
    """

    source: int
    target: int
    name: str
    num_bytes: int


class FileExchange:
    """The connections of some processes, numbered from 0, by which they send files.

    Attributes:
        bytes_sent: bytes of files that this process has sent.
    """

    def __init__(self, store: dist.Store, number: int, size: int, timeout_s: float) -> None:
        """Make the group; every process calls this with keys of `store` that only they use."""
        self._number, self.bytes_sent = number, 0
        with lazily_connected():
            kind: Any = dist.ProcessGroupGloo  # its constructor has no type
            self._group = kind(store, number, size, timedelta(seconds=timeout_s))

    def run(
        self,
        transfers: Sequence[FileTransfer],
        folder: Path,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Send and receive the files of this process; every process calls this together.

        Each has the same `transfers`, and sends and, at the same time, receives in their order. So
        both ends of the first that is not done work on it. `moved` is called after each message
        received.

        Raises:
            PeerLost: a process has gone.
            OSError: there is no room for a file in `folder`, where this process has its files.
        """
        sent = [each for each in transfers if each.source == self._number]
        with ThreadPoolExecutor(1, "files") as pool:
            sending = pool.submit(self._send, sent, folder)
            for each in transfers:
                if each.target != self._number:
                    continue
                path = folder / each.name
                partial = path.with_name(path.name + PARTIAL)
                path.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as file:  # a write to a page without room is a SIGBUS
                    os.posix_fallocate(file.fileno(), 0, each.num_bytes)
                for chunk in _chunks(partial, each.num_bytes):
                    _complete(self._group.recv, chunk, each.source)
                    moved()
                partial.rename(path)
            sending.result()

    def _send(self, transfers: Sequence[FileTransfer], folder: Path) -> None:
        for each in transfers:
            for chunk in _chunks(folder / each.name, each.num_bytes):
                _complete(self._group.send, chunk, each.target)
                self.bytes_sent += len(chunk)


def _complete(call: Any, chunk: torch.Tensor, peer: int) -> None:
    try:  # gloo reports a peer that has gone by the wait, or by the call after it went
        call([chunk], peer, 0).wait()
    except RuntimeError as error:
        raise PeerLost(f"a host that sends or gets files has gone: {reason_of(error)}") from error


def _chunks(path: Path, num_bytes: int) -> Sequence[torch.Tensor]:
    """Return the bytes of a file as tensors that share its memory."""
    mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return mapped.split(CHUNK_BYTES)
