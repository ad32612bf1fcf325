"""Keep what a rank prints in a file of its own: the screen shows what the first rank prints.

    first rank    screen, and the lines that stay there also in the file
    others        the file, from the descriptors up, so that libraries of C++ are in it too

What goes wrong on another rank is on the screen too: its own last words come after the block, and
what its threads say meanwhile goes to `screen`.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from phalanx.errors import CheckpointError, ConfigError
from phalanx.launch.heartbeat import PULSE
from phalanx.storage import open_to_append

FOLDER: Final = "logs"
"""Folder of a run that holds its ranks' logs."""

_ERASES: Final = "\x1b[2K"
"""What a terminal erases a line by, to draw a progress bar anew."""

_CODES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")

_screen: list[TextIO] = []


def screen() -> TextIO:
    """Return the stream by which this rank says what a person must see."""
    return _screen[-1] if _screen else sys.stderr


@contextmanager
def kept(run: Path, rank: int) -> Generator[None]:
    """Append what this process prints inside to the run's `logs/rank-N.log`.

    Raises:
        ConfigError: the file cannot be opened.
        CheckpointError: it would be written through a link, to somewhere else.
    """
    path = run / FOLDER / f"rank-{rank}.log"
    if path.parent.is_symlink():
        raise CheckpointError(
            f"{path.parent} is a link, and logs are written to the run's own folder; move it away, "
            "or give another folder"
        )
    with _opened(path) as file:
        log = file.fileno()
        begin = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(log, f"--- {begin} rank {rank}, process {os.getpid()}\n".encode())
        PULSE.log = str(path)
        try:
            with _copied(log) if rank == 0 else _diverted(log):
                yield
        except BaseException:
            with suppress(OSError):  # the error itself says more than a full disk
                os.write(log, traceback.format_exc().encode(errors="backslashreplace"))
            raise
        finally:
            PULSE.log = ""


def _opened(path: Path) -> io.TextIOWrapper:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_to_append(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give another folder with --out"
        ) from None


class _Copied:
    """A standard stream, of which the lines that stay on the screen are in a file too."""

    def __init__(self, stream: TextIO, log: int) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        stays = text[: text.rfind("\n") + 1] if _ERASES in text else text
        with suppress(OSError):  # no run ends by its log: a save reports a full disk
            os.write(self._log, _CODES.sub("", stays).encode(errors="backslashreplace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _copied(log: int) -> Generator[None]:
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    copied = {name: _Copied(stream, log) for name, stream in before.items() if stream is not None}
    for name, stream in copied.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in copied.items():
            if getattr(sys, name) is stream:  # and not what a script has put there
                setattr(sys, name, before[name])


@contextmanager
def _diverted(log: int) -> Generator[None]:
    before = [os.dup(number) for number in (1, 2)]
    _screen.append(os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace"))
    flush_streams()
    is_by_line = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.line_buffering
    _by_line(True)  # a rank that is killed has printed what it said
    for number in (1, 2):
        os.dup2(log, number)
    try:
        yield
    finally:
        flush_streams()
        _by_line(is_by_line)
        for number, descriptor in enumerate(before, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _screen.pop().close()


def _by_line(is_by_line: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=is_by_line)


def flush(stream: Any) -> None:
    """Flush a standard stream, which a script may have closed."""
    if stream is not None and not stream.closed:
        stream.flush()


def flush_streams() -> None:
    """Flush both standard streams as far as somebody reads them and the disk is not full."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            flush(stream)
