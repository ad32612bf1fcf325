"""The files of a checkpoint: hashed as they are written, verified before they are read."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Checksum, Manifest
from phalanx.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


LOCK_WAIT_S = 10.0
"""How long a run waits for the lock of another. A killed process keeps its lock until the system
is done with it, which takes a while if the disk is busy: 0.2 s were seen. Files that another host
has written may take a while to be seen, too."""


class RunLock:
    """Keeps the checkpoints of a run for one process: another one would remove what it writes.

    The system takes the lock back from a process that ends, however it ends. Where the system, or
    the disk, has no locks, nothing keeps another process away.
    """

    def __init__(self, run: Path) -> None:
        """Take nothing yet; `run` is the folder of the run."""
        self._folder = run / "checkpoints"
        self._close: weakref.finalize[Any, Any] | None = None

    def take(self) -> str:
        """Take the lock, until `release` or the end of this object; return what marks it as ours.

        Raises:
            CheckpointError: another process has it, and still has it after `LOCK_WAIT_S`.
            OSError: the folder or the lock's file cannot be made or written.
        """
        path = self._folder / manifest.LOCK
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._close = weakref.finalize(self, os.close, descriptor)
        if not _within(LOCK_WAIT_S, lambda: _is_locked(descriptor)):
            self.release()
            raise CheckpointError(
                f"another process saves to {self._folder}; wait until it has ended, or give "
                "another --out"
            )
        mark = secrets.token_hex(8)
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, mark.encode())
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return mark

    def check_shared(self, mark: str) -> None:
        """Check that this host sees the folder in which another one holds the lock.

        Raises:
            CheckpointError: it sees another folder; what ranks here write would be in no
                checkpoint.
        """
        path = self._folder / manifest.LOCK
        if not _within(LOCK_WAIT_S, lambda: path.is_file() and path.read_text() == mark):
            raise CheckpointError(
                f"{self._folder} on {platform.node()} is not the folder that rank 0 writes to; "
                "give an --out on a disk that all hosts share"
            )

    def release(self) -> None:
        """Let others have the lock, if this process holds it."""
        if self._close is not None:
            self._close()


def _is_locked(descriptor: int) -> bool:
    """Lock an open file, if no other process has; True where there are no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this disk has no locks
        return True
    return True


def _within(limit_s: float, is_so: Callable[[], bool]) -> bool:
    """Return whether something is so, now or within a while."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.05)
    return True


class HashingFiles(FileSystem):
    """The disk, for a `FileSystemWriter`; syncs every file that is written, keeps its checksum.

    What is hashed is what the program meant to write, so a fault on the way to the disk shows.

    Attributes:
        checksums: of the files written so far, by name.
        failure: the last error of the disk, with the name of the file.
    """

    def __init__(self) -> None:
        self.checksums: dict[str, Checksum] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a file to be written from its beginning to its end, and synced there."""
        assert mode == "wb"
        stream = _HashingWriter(io.FileIO(path, mode))
        try:
            with stream:
                yield stream
        except Exception as error:
            cause = error if isinstance(error, OSError) else stream.failure
            if cause is None:
                raise
            self.failure = OSError(cause.errno, cause.strerror, str(path))
            raise self.failure from error
        self.checksums[Path(path).name] = (stream.num_bytes, stream.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _HashingWriter(io.BufferedWriter):
    """A file that is hashed while it is written; hashing lets other threads run."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.failure: OSError | None = None  # torch makes another error of it

    def write(self, buffer: bytes | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.sha256.update(buffer)
        self.num_bytes += len(buffer)
        try:
            return super().write(buffer)
        except OSError as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Have the disk hold the file, and close it.

        torch syncs `.metadata` while its bytes are still in the buffer, and closes the tensors'
        files itself.
        """
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    def seek(self, target: int, whence: int = 0, /) -> int:
        raise io.UnsupportedOperation("what is hashed must be written in order")


_crc32 = threading.Lock()
"""Held while CRC-32 is off: where the setting is the process's, two writers would restore each
other's, and leave it off for good."""


class TensorWriter(FileSystemWriter):
    """Writes tensors without CRC-32, a fifth of the time: sha256 finds what it would.

    It turns `torch.serialization.set_crc32_options` off while it writes: for its own thread alone
    in torch 2.13; in a torch that keeps one setting for the process, for all of it meanwhile.

    Attributes:
        files: the disk, which syncs each file and keeps its checksum.
    """

    def __init__(self, folder: Path, *, single_file_per_rank: bool = True) -> None:
        # With copies ahead of its own, torch's writer would open a GPU.
        super().__init__(
            folder,
            single_file_per_rank=single_file_per_rank,
            sync_files=False,
            per_thread_copy_ahead=0,
        )
        self.fs = self.files = HashingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of a plan; they are written when it returns."""
        with _crc32:
            has_crc32 = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            try:
                return super().write_data(plan, planner)
            finally:
                torch.serialization.set_crc32_options(has_crc32)


def checksum(path: Path) -> Checksum:
    """Return the size of a file in bytes and its sha256, read from the disk."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, about: Manifest, turn: int = 0, num_turns: int = 1) -> None:
    """Compare files of a checkpoint with their checksums.

    Args:
        folder: of the checkpoint.
        about: its manifest.
        turn: which share of the files to read, from 0.
        num_turns: shares into which the files are dealt, of about the same bytes.

    Raises:
        CheckpointError: a file is missing, cut short or changed; names it, and what else there is.
    """
    loads = [0] * num_turns
    for name, (num_bytes, sha256) in sorted(about.files.items(), key=lambda item: -item[1][0]):
        lightest = loads.index(min(loads))
        loads[lightest] += num_bytes
        if lightest != turn:
            continue
        problem = _problem(folder / name, num_bytes, sha256)
        if problem is not None:
            raise CheckpointError(f"its file {name} {problem}{manifest.others_than(folder)}")


def _problem(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Say how a file differs from what was written."""
    if not path.is_file():
        return "is missing"
    if (actual := path.stat().st_size) != num_bytes:
        return f"has {actual} bytes, but {num_bytes} were written"
    if checksum(path)[1] != sha256:
        return "is damaged: its sha256 is not that of what was written"
    return None


def make_partial(final: Path) -> Path:
    """Make the folder in which the checkpoint `final` is written, and return it.

    What killed runs left of any checkpoint is removed. What cannot be removed stays: the next save
    tries again.

    Raises:
        CheckpointError: there is a whole checkpoint of that name.
        OSError: the folder cannot be made.
    """
    if (final / manifest.NAME).exists():
        raise CheckpointError("there is one of that name already")
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in final.parent.iterdir():
        if path.suffix in (manifest.PARTIAL, manifest.REMOVED):
            shutil.rmtree(path, ignore_errors=True)
    partial = final.with_name(final.name + manifest.PARTIAL)
    partial.mkdir(exist_ok=True)  # files that could not be removed are written over
    return partial


def publish(partial: Path, final: Path, about: Manifest) -> None:
    """Write the manifest into `partial`, have the disk hold everything, and name it `final`.

    Raises:
        CheckpointError: a file that a rank has written is not there.
        OSError: the disk is full, or the folder cannot be renamed.
    """
    for name in about.files:
        if not (partial / name).is_file():
            raise CheckpointError(
                f"{name} is not in {partial}, though a rank has written it; --out must be on a "
                "disk that all hosts share"
            )
    manifest.write(partial, about)
    sync(partial / manifest.NAME)
    sync(partial)
    if final.exists():  # without a manifest, or make_partial would have refused
        shutil.rmtree(final)
    partial.rename(final)
    sync(final.parent)


def remove_older(run: Path, keep: int | None) -> None:
    """Remove those whole checkpoints of a run that later ones replace.

    Those are the passing ones, unless one is the latest, and the others but for the last `keep`.
    Each loses its name before it loses a file, so that no folder ever looks whole that is not. One
    that cannot be removed is no reason to end a run: the next save tries again.
    """
    whole = list(manifest.whole(run).values())
    passing = manifest.passing(run)
    lasting = [folder for folder in whole if folder not in passing]
    older = [folder for folder in passing if folder != whole[-1]]
    for folder in older + ([] if keep is None else lasting[:-keep]):
        removed = folder.with_name(folder.name + manifest.REMOVED)
        with suppress(OSError):
            folder.rename(removed)
            (removed / manifest.NAME).unlink()
            shutil.rmtree(removed)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
