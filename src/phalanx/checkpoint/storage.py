"""Files and folders that are whole or absent, and that are what they are taken for when read."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from phalanx.errors import CheckpointError, ConfigError

Checksum = tuple[int, str]
"""Size of a file in bytes, and its sha256 in hexadecimal digits."""

PARTIAL: Final = ".partial"
"""What the name of a file or folder ends with while it is written."""

MAX_JSON_BYTES: Final = 1 << 28
"""Largest JSON file that is read: Python takes some ten times its size in memory."""

MAX_JSON_DEPTH: Final = 16
"""Deepest nesting of a JSON file; what is deeper may not even be copied or printed."""

_CONTROL: Final = re.compile(r"[^\t\n -~\xa0-\U0010ffff]")
"""Characters by which a text could take over the terminal that shows it."""


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read it; neither a link, nor a device, nor a pipe, which could block for ever.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    # Absent on Windows, which has no such pipes and few links.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = io.FileIO(os.open(path, os.O_RDONLY | flags), closefd=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, expected a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no regular file")
    return file


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds one object.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it cannot be read, is too large or too deeply nested, holds no object, a
            name twice, or control characters.
    """
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
                raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
            text = file.readall().decode()
        content: Any = json.loads(text, object_pairs_hook=_named)
        check_plain(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"cannot read {path}: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"cannot read {path}: it is no JSON object")
    return cast("dict[str, Any]", content)


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("it has a name twice")
    return named


def check_plain(content: Any) -> None:
    """Refuse deep nesting, and text that no file or terminal could take.

    Whatever a message may quote from a checkpoint has passed here.

    Raises:
        ValueError: says which.
    """
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                children += [*value, *value.values()]  # the names, too
            elif isinstance(value, list):
                children += value
            elif isinstance(value, str):
                value.encode()
                if _CONTROL.search(value):
                    raise ValueError(f"it has control characters in {brief(value)}")
        if not children:
            return
        level = children
    raise ValueError("it is nested too deeply")


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a file that `read_json` reads; control characters must have been taken out.

    Raises:
        CheckpointError: it would be too large to be read.
        OSError: the disk is full, say.
    """
    text = json.dumps(content, indent=indent) + "\n"
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path.name} would have {len(text):,} bytes, and none of more than "
            f"{MAX_JSON_BYTES:,} is read; save with fewer tensors, or on fewer ranks"
        )
    path.write_text(text, encoding="utf-8")


def harmless(value: Any) -> Any:
    """Return a value of JSON with every control character in its texts spelled out."""
    match value:
        case str():
            return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], value)
        case dict():
            return {harmless(k): harmless(v) for k, v in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [harmless(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def is_plain_name(name: str) -> bool:
    """Return whether `name` is that of a file of a folder itself, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def brief(value: object, limit: int = 80) -> str:
    """Return how a value that somebody else wrote, or an error that quotes it, is shown."""
    text = harmless(str(value)) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def checksum(path: Path) -> Checksum:
    """Return the size of a file in bytes and its sha256, read from the disk.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        num_bytes = os.fstat(raw.fileno()).st_size
        return num_bytes, hashlib.file_digest(file, "sha256").hexdigest()


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
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(content)
    sync(partial)
    partial.replace(path)


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
