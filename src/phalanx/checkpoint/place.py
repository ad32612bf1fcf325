"""A new folder of files, written beside its place and renamed when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from phalanx.checkpoint.files import sync
from phalanx.checkpoint.manifest import PARTIAL
from phalanx.errors import CheckpointError, ConfigError


def check_free(source: Path, destination: Path) -> None:
    """Refuse a destination that holds something, or that lies in the source.

    Raises:
        ConfigError: says which, and what to give instead.
    """
    if destination.resolve().is_relative_to(source.resolve()):
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
        CheckpointError: the disk cannot take what is written.
        ConfigError: there is something in the way.
    """
    final = destination.resolve()
    partial = final.with_name(final.name + PARTIAL)
    if partial.exists():
        raise ConfigError(
            f"{partial} is there: a conversion writes to it, or one was killed; remove it if none "
            "is running"
        )
    try:
        _check_space(destination, num_bytes)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {destination}, and nothing of it is left: "
            f"{error.filename or partial}: {error.strerror}"
        ) from error


def existing(path: Path) -> Path:
    """Return the path if it is there, else the nearest folder above that is."""
    return next(place for place in (path, *path.resolve().parents) if place.exists())


def free_bytes(path: Path) -> int:
    """Return the bytes left on the disk that a path is on, or would be."""
    return shutil.disk_usage(existing(path)).free


def _check_space(destination: Path, num_bytes: int) -> None:
    left_bytes = free_bytes(destination)
    if left_bytes < num_bytes:
        raise CheckpointError(
            f"{destination} needs {num_bytes / 2**30:.2f} GiB, but {destination.resolve().parent} "
            f"has {left_bytes / 2**30:.2f} GiB left; make room, or choose a folder on another disk"
        )
