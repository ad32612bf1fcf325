"""Atomic writes of files and folders, and reads that accept regular files only.

    new_folder      write under a temporary name in the same parent, sync, rename (`publish_folder`)
    replace_file    the same for a file; an existing file stays intact until the rename

A crash leaves a file or folder whose name ends with PARTIAL, which no code reads.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import io
import os
import secrets
import shutil
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from phalanx.errors import CheckpointError, ConfigError
from phalanx.report.units import size_text

Checksum = tuple[int, str]
"""Size of a file in bytes, and its sha256 in hexadecimal digits."""

PARTIAL: Final = ".partial"
"""Suffix of the name of a file or folder while it is written."""

MOST_TEXT_BYTES: Final = 64 << 20
"""Largest text file that `read_text` accepts, in bytes."""

STALE_S: Final = 24 * 3600.0
"""Seconds without a change after which a PARTIAL file or folder counts as left by a crash."""


def open_regular(path: Path, *, may_be_link: bool = False) -> io.FileIO:
    """Open a regular file for reading; refuse devices and pipes, which could block forever.

    Args:
        path: file to open.
        may_be_link: whether to follow a symbolic link, as for a file that the user names.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: it is not a regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if may_be_link else os.O_NOFOLLOW)
    try:
        file = io.FileIO(os.open(path, flags), closefd=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, expected a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no regular file")
    return file


def read_text(path: Path) -> str:
    """Return the text of a file that the user names.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, is not UTF-8, or has more
            than MOST_TEXT_BYTES.
    """
    try:
        with io.BufferedReader(open_regular(path, may_be_link=True)) as file:
            text = file.read(MOST_TEXT_BYTES + 1)
        if len(text) > MOST_TEXT_BYTES:
            raise ConfigError(f"cannot read {path}: it has more than {MOST_TEXT_BYTES >> 20} MiB")
        return text.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8") from None
    except CheckpointError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def open_to_append(path: Path) -> io.TextIOWrapper:
    """Open a text file for appending, and create it if needed; refuse symbolic links.

    Raises:
        CheckpointError: it is not a regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_APPEND | os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path} is a link, expected a regular file; move it away, or give another folder"
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file; move it away, or give another folder")
    return os.fdopen(descriptor, "a", encoding="utf-8")


def checksum(path: Path, algorithm: str = "sha256") -> Checksum:
    """Return the size of a file in bytes and its hash, read from the disk.

    Raises:
        CheckpointError: it is not a regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        num_bytes = os.fstat(raw.fileno()).st_size
        return num_bytes, hashlib.file_digest(file, algorithm).hexdigest()


def lock(descriptor: int, *, waits: bool = False) -> bool | None:
    """Lock an open file or folder; return False if another process holds the lock.

    Wait for the lock if `waits`. Return None if the file system does not support locks. The
    operating system releases the lock when the process ends, whether it exits or crashes.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        return None
    return True


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically; an existing file stays intact until the new one replaces it.

    Raises:
        OSError: the write failed, for example because the disk is full.
    """
    partial = _beside(path)
    _sweep(path.parent)
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(final: Path) -> Generator[Path]:
    """Yield a temporary folder; rename it to `final` on exit, or remove it on an error.

    Raises:
        OSError: the write failed, for example because the disk is full, or `final` exists and is
            not an empty folder.
    """
    partial = _beside(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    try:
        partial.mkdir()
        yield partial
        for path in partial.iterdir():
            # Without the sync, a power cut could leave files of the right size that contain zeros.
            sync(path)
        sync(partial)
        publish_folder(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish_folder(partial: Path, final: Path) -> None:
    """Rename a folder that is synced with its files to `final`, which marks it as complete.

    Raises:
        OSError: `final` exists and is not an empty folder.
    """
    partial.rename(final)
    sync(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder if possible; another process finds all of it or nothing, never a part."""
    partial = _beside(folder.with_name("removed"))  # whose name is never too long
    with suppress(OSError):
        folder.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Return a unique temporary path in the same parent folder as `path`."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _sweep(parent: Path) -> None:
    """Remove PARTIAL files and folders of crashed processes, unchanged for STALE_S seconds."""
    for path in parent.glob("*." + 8 * "[0-9a-f]" + PARTIAL):
        try:
            # The folder's mtime is when its last file was created; the mtimes of the files show
            # whether a process is still writing.
            inside = path.iterdir() if path.is_dir() else ()
            newest = max(each.stat().st_mtime for each in (path, *inside))
        except OSError:
            continue  # another process has removed or renamed it, or we may not read it
        if time.time() - newest <= STALE_S:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def check_free(source: Path, destination: Path) -> None:
    """Check that `destination` is empty or absent, and that it is not inside `source`.

    Raises:
        ConfigError: it is inside `source`, is a file, or is not empty.
    """
    if _resolved(destination).is_relative_to(_resolved(source)):
        raise ConfigError(
            f"{destination} is inside {source}, which is the input; give a folder outside {source}"
        )
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is a file; give the name of a new folder")
    if destination.exists() and any(destination.iterdir()):
        raise ConfigError(f"{destination} is not empty; give another folder, or remove it first")


@contextmanager
def published(destination: Path, num_bytes: int) -> Generator[Path]:
    """Yield a temporary folder that becomes `destination` on exit, as `new_folder` does.

    Raises:
        CheckpointError: the disk has fewer than `num_bytes` free, or a write failed.
    """
    left_bytes = free_bytes(destination)
    if left_bytes < num_bytes:
        raise CheckpointError(
            f"{destination} needs {size_text(num_bytes)}, but {_resolved(destination).parent} "
            f"has {size_text(left_bytes)} left; make room, or choose a folder on another disk"
        )
    try:
        with new_folder(_resolved(destination)) as partial:
            yield partial
    except OSError as error:
        raise CheckpointError(
            f"cannot write {destination}, and nothing of it is left: "
            f"{error.filename or destination}: {error.strerror}"
        ) from error


def existing(path: Path) -> Path:
    """Return `path` if it exists, even as a broken link, else its nearest existing parent."""
    return next(each for each in (path, *_resolved(path).parents) if os.path.lexists(each))


def _resolved(path: Path) -> Path:
    """Return `path` with links resolved; unlike `Path.resolve`, accept a cycle of links."""
    return Path(os.path.realpath(path))


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that contains `path`, which need not exist."""
    return shutil.disk_usage(existing(path)).free


def hint_of_missing(path: Path) -> str:
    """Return the end of a message on a missing path: its broken link, or a similar name."""
    if path.is_symlink():
        return f": it is a link to {os.readlink(path)}, which leads nowhere"
    while not path.parent.is_dir():
        path = path.parent
    names = sorted(entry.name for entry in path.parent.iterdir())
    if close := difflib.get_close_matches(path.name, names, n=1, cutoff=0.5):
        return f" (did you mean '{path.with_name(close[0])}'?)"
    return f"; {path.parent} contains no similar name"
