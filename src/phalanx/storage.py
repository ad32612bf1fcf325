"""Files and folders that are whole or absent, and that are what they are taken for when read.

    new_folder      written beside under another name, synced, renamed: `become`
    replace_file    likewise; a file of that name stays whole until the new one is

A crash leaves a folder whose name ends with PARTIAL, which nothing reads.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from phalanx.errors import CheckpointError, ConfigError, size_text

Checksum = tuple[int, str]
"""Size of a file in bytes, and its sha256 in hexadecimal digits."""

PARTIAL: Final = ".partial"
"""What the name of a file or folder ends with while it is written."""

MOST_TEXT_BYTES: Final = 64 << 20
"""Largest text file that is read at once."""

STALE_S: Final = 24 * 3600.0
"""How long nothing has changed in a folder that a process left half written."""


def open_regular(path: Path, *, may_be_link: bool = False) -> io.FileIO:
    """Open a file to read it; neither a device nor a pipe, which could block for ever.

    Args:
        path: of the file.
        may_be_link: whether it may be a link to one, as a file that the user names.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no regular file.
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
        ConfigError: it cannot be read, is no regular file, is not UTF-8, or has more than
            MOST_TEXT_BYTES.
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
    """Open a file of text to write at its end, or make it; nothing is written through a link.

    Raises:
        CheckpointError: it is no regular file.
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
        CheckpointError: it is no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        num_bytes = os.fstat(raw.fileno()).st_size
        return num_bytes, hashlib.file_digest(file, algorithm).hexdigest()


def lock(descriptor: int) -> bool | None:
    """Lock an open file; False if another process has it, None where its disk has no locks.

    The system takes the lock back from a process that ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this disk has no locks
        return None
    return True


def sync(path: Path) -> None:
    """Have the disk hold a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file; one of that name stays whole until the new one is.

    Raises:
        OSError: the disk is full, say.
    """
    partial = _beside(path)
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(final: Path) -> Generator[Path]:
    """Give a folder to write files to, which becomes `final` at the end, or goes if that fails.

    Raises:
        OSError: the disk is full, say, or `final` is there and is no empty folder.
    """
    partial = _beside(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    try:
        partial.mkdir()
        yield partial
        for path in partial.iterdir():
            # Without this, a power cut could leave files of the right size that hold zeros.
            sync(path)
        become(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def become(partial: Path, final: Path) -> None:
    """Give a folder, whose files the disk holds, the name under which it is taken for whole.

    Raises:
        OSError: `final` is there and is no empty folder.
    """
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def _beside(path: Path) -> Path:
    """Return a name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _sweep(parent: Path) -> None:
    """Remove the folders that crashed processes have left half written, a day or more ago."""
    for path in parent.glob("*." + 8 * "[0-9a-f]" + PARTIAL):
        try:
            # The folder's own time is when it was made; the files show work that continues.
            newest = max(each.stat().st_mtime for each in (path, *path.iterdir()))
        except OSError:
            continue  # its own process has just removed or renamed it, or it is not ours
        if time.time() - newest > STALE_S:
            shutil.rmtree(path, ignore_errors=True)


def check_free(source: Path, destination: Path) -> None:
    """Refuse a destination that holds something, or that lies in the source.

    Raises:
        ConfigError: says which, and what to give instead.
    """
    if _whole(destination).is_relative_to(_whole(source)):
        raise ConfigError(
            f"{destination} lies in {source}, which is read; give a folder outside of it"
        )
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is a file; give the name of a new folder")
    if destination.exists() and any(destination.iterdir()):
        raise ConfigError(f"{destination} is not empty; give another folder, or remove it first")


@contextmanager
def published(destination: Path, num_bytes: int) -> Generator[Path]:
    """Give a folder to write to, which becomes `destination` at the end, or goes if that fails.

    Raises:
        CheckpointError: the disk has no room for it.
    """
    left_bytes = free_bytes(destination)
    if left_bytes < num_bytes:
        raise CheckpointError(
            f"{destination} needs {size_text(num_bytes)}, but {_whole(destination).parent} "
            f"has {size_text(left_bytes)} left; make room, or choose a folder on another disk"
        )
    try:
        with new_folder(_whole(destination)) as partial:
            yield partial
    except OSError as error:
        raise CheckpointError(
            f"cannot write {destination}, and nothing of it is left: "
            f"{error.filename or destination}: {error.strerror}"
        ) from error


def existing(path: Path) -> Path:
    """Return the path if it is there, as a link to nowhere too, else the nearest folder above."""
    return next(each for each in (path, *_whole(path).parents) if os.path.lexists(each))


def _whole(path: Path) -> Path:
    """Return a path without links, as far as these lead; `Path.resolve` raises at a circle."""
    return Path(os.path.realpath(path))


def free_bytes(path: Path) -> int:
    """Return the bytes left on the disk that a path is on, or would be."""
    return shutil.disk_usage(existing(path)).free


def hint_of_missing(path: Path) -> str:
    """Return words on the existing path nearest to a missing one, to end a message."""
    if path.is_symlink():
        return f": it is a link to {os.readlink(path)}, which leads nowhere"
    while not path.parent.is_dir():
        path = path.parent
    names = sorted(entry.name for entry in path.parent.iterdir())
    if close := difflib.get_close_matches(path.name, names, n=1, cutoff=0.5):
        return f" (did you mean '{path.with_name(close[0])}'?)"
    return f"; {path.parent} holds nothing of a like name"
