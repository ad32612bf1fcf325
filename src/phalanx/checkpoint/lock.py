"""The lock that lets only one process save checkpoints of a run."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from phalanx.checkpoint import manifest
from phalanx.errors import CheckpointError
from phalanx.object_store import address_of, get, put
from phalanx.storage import lock

LOCK_WAIT_S = 8.0
"""Seconds to wait for the lock of another process, or for a file that another host wrote.

A killed process keeps its lock until the operating system cleans up: 0.2 s on a busy disk."""


class RunLock:
    """A file lock on the checkpoints of a run: a second process would remove unfinished saves.

    The operating system releases the lock when the process exits or crashes. On a file system
    without locks, a second process is not detected.

    At an address the lock holds on one host. Across hosts the object .lock has the mark of the
    process that saved last, which each process compares before it publishes (`fence`): one that was
    cut off, and continues after its successor, ends. Not guarded is a save in the milliseconds
    between comparison and manifest; both checkpoints are whole then.
    """

    def __init__(self, run: Path) -> None:
        """Prepare the lock of the run folder `run`; `take` acquires it."""
        self._folder = run / "checkpoints"
        self._file: IO[bytes] | None = None
        self._mark = self._latest = b""

    def take(self) -> str:
        """Acquire the lock until `release`; return the random mark written to the lock file.

        Raises:
            CheckpointError: another process still holds the lock after LOCK_WAIT_S.
            OSError: the folder or the lock file cannot be created or written.
        """
        path = self._folder / manifest.LOCK
        if not _within_wait(lambda: self._acquire(path)):
            raise CheckpointError(
                f"another process saves to {self._folder}; wait until it has ended, or give "
                "another --out"
            )
        # The mark shows other hosts that they see the same folder, see `check_shared`.
        mark, file = secrets.token_hex(8), self._file
        assert file is not None
        try:
            file.truncate(0)
            file.write(mark.encode())
            os.fsync(file.fileno())
        except OSError as error:
            self.release()
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._mark, self._latest = mark.encode(), self._mark_there()
        return mark

    def _mark_there(self) -> bytes:
        """Return the mark of the process that saved last to an address; empty without one."""
        with suppress(FileNotFoundError):
            return b"" if address_of(self._folder) is None else get(self._folder / manifest.LOCK)
        return b""

    def fence(self) -> None:
        """Raise CheckpointError if another process has saved to the address since `take`."""
        if address_of(self._folder) is None:
            return
        if self._mark_there() != self._latest:
            raise CheckpointError(
                f"another process has saved to {self._folder} since this one started; this run "
                "saves no more there"
            )
        if self._latest != self._mark:
            put(self._folder / manifest.LOCK, self._mark)
            self._latest = self._mark

    def take_if_free(self) -> bool:
        """Acquire the lock until `release`, without a mark; return False if another process has it.

        Raises:
            OSError: the folder or the lock file cannot be created.
        """
        return self._acquire(self._folder / manifest.LOCK)

    def _acquire(self, path: Path) -> bool:
        """Lock the file at `path`, unless another process holds the lock.

        A process whose run is refused removes its new folder before it releases the lock.
        """
        try:
            file = self._file = self._open(path)
        except (FileExistsError, FileNotFoundError):  # found, but removed before it was opened
            file = self._file = self._open(path)
        # A lock on a file that has been removed meanwhile locks nothing: compare it with the
        # path's.
        if lock(file.fileno()) is not False:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return True
        self.release()
        return False

    def _open(self, path: Path) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)

    def check_shared(self, mark: str) -> None:
        """Check that the lock file on this host contains the `mark` that rank 0 wrote.

        Raises:
            CheckpointError: it does not, so this host has a different folder, and files written
                by its ranks would be missing from the checkpoint.
        """
        path = self._folder / manifest.LOCK
        is_same = address_of(path) is not None  # as the address is
        if not is_same and not _within_wait(lambda: path.is_file() and path.read_text() == mark):
            raise CheckpointError(
                f"{self._folder} on {platform.node()} is not the folder that rank 0 writes to; "
                "give an --out on a disk that all hosts share"
            )

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._file is not None:
            self._file.close()


def _within_wait(is_so: Callable[[], bool]) -> bool:
    """Poll the condition `is_so` for at most LOCK_WAIT_S; return whether it became true."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not is_so():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.05)
    return True
