"""The lock that keeps the checkpoints of a run for one process."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from phalanx.checkpoint import manifest
from phalanx.errors import CheckpointError
from phalanx.storage import lock

LOCK_WAIT_S = 10.0
"""How long a run waits for the lock of another. A killed process keeps its lock until the system
is done with it, which takes a while if the disk is busy: 0.2 s were seen. Files that another host
has written may take a while to be seen, too."""


class RunLock:
    """Keeps the checkpoints of a run for one process: another one would remove what it writes.

    The system takes the lock back from a process that ends, however it ends. Where the disk has no
    locks, nothing keeps another process away.
    """

    def __init__(self, run: Path) -> None:
        """Take nothing yet; `run` is the folder of the run."""
        self._folder = run / "checkpoints"
        self._file: IO[bytes] | None = None

    def take(self) -> str:
        """Take the lock, until `release` or the end of this object; return what marks it as ours.

        Raises:
            CheckpointError: another process has it, and still has it after `LOCK_WAIT_S`.
            OSError: the folder or the lock's file cannot be made or written.
        """
        path = self._folder / manifest.LOCK
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file = path.open("ab", buffering=0)
        if not _within_wait(lambda: lock(file.fileno()) is not False):
            self.release()
            raise CheckpointError(
                f"another process saves to {self._folder}; wait until it has ended, or give "
                "another --out"
            )
        mark = secrets.token_hex(8)
        try:
            file.truncate(0)
            file.write(mark.encode())
            os.fsync(file.fileno())
        except OSError as error:
            self.release()
            raise OSError(error.errno, error.strerror, str(path)) from error
        return mark

    def check_shared(self, mark: str) -> None:
        """Check that this host sees the folder in which another one holds the lock.

        Raises:
            CheckpointError: it sees another folder; what ranks here write would be in no
                checkpoint.
        """
        path = self._folder / manifest.LOCK
        if not _within_wait(lambda: path.is_file() and path.read_text() == mark):
            raise CheckpointError(
                f"{self._folder} on {platform.node()} is not the folder that rank 0 writes to; "
                "give an --out on a disk that all hosts share"
            )

    def release(self) -> None:
        """Let others have the lock, if this process holds it."""
        if self._file is not None:
            self._file.close()


def _within_wait(is_so: Callable[[], bool]) -> bool:
    """Return whether something is so, now or within `LOCK_WAIT_S`."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not is_so():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.05)
    return True
