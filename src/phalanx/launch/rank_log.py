"""Write the output of each rank to a log file; the screen shows the output of the first rank.

    first rank    screen; lines that are not redrawn also go to the file
    others        file only, redirected by file descriptor, so that output of C++ libraries is in it

Errors of other ranks reach the screen too: a rank prints its own error after the block of `kept`,
and its threads print reports to `screen` meanwhile.

Each process of a job prints through streams that `keep_printing` has opened: output that can no
longer be written is muted, and the run continues.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from typing_extensions import override

from phalanx.errors import CheckpointError
from phalanx.launch.heartbeat import PULSE
from phalanx.report.output import OTHER_FOLDER, writing
from phalanx.storage import open_to_append

FOLDER: Final = "logs"
"""Name of the folder of a run in which the logs of its ranks are stored."""

_ERASES: Final = "\x1b[2K"
"""Escape sequence that erases a line of a terminal, to redraw a progress bar."""

_CODES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")

_screen: list[TextIO] = []

_errors: Final = [2]
"""Descriptor of Python's standard error, last; see `divert_native`."""

LOST_OUTPUT: Final[dict[int, str]] = {}
"""Descriptors of this process's standard streams that were muted -> the reason."""


class _Display(io.FileIO):
    """An output that mutes itself when it cannot be written, except a pipe without a reader.

    Otherwise a closed terminal, or a full disk under a redirected output, would end the run at its
    next line. A closed terminal counts as its SIGHUP, which a disowned job does not get.
    """

    @override
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # see `failure.reader_has_left`
            raise
        except OSError as error:
            LOST_OUTPUT[self.fileno()] = error.strerror or str(error)
            is_device = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if error.errno == errno.EIO and is_device:
                parent = multiprocessing.parent_process()  # of a rank, the process that decides
                with suppress(OSError):  # the parent has ended
                    os.kill((parent and parent.pid) or os.getpid(), signal.SIGHUP)
            return len(memoryview(data).cast("B"))


def keep_printing() -> None:
    """Mute a standard stream of this process once it cannot be written, instead of raising.

    Characters that the encoding of a stream lacks are escaped, as Python does on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        # A test or a notebook may have replaced the stream.
        if type(stream) is io.TextIOWrapper and not stream.closed:
            buffer: Any = stream.buffer
            if type(raw := getattr(buffer, "raw", buffer)) is not io.FileIO:
                continue
            with suppress(OSError):
                stream.flush()
            _reopen(stream, _Display(raw.fileno(), "w", closefd=False))


def _reopen(stream: io.TextIOWrapper, display: _Display) -> None:
    """Let a standard stream print to `display`; references to it, as of loggers, stay valid."""
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    again: Any = stream.__init__
    again(
        io.BufferedWriter(display) if is_buffered else display,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def divert_native(log: int) -> None:
    """Let native code print errors to the file `log`, and Python where it did before.

    Native code prints to descriptor 2, so Python's standard error gets another one.
    """
    stream = sys.stderr
    if _errors[-1] == 2 and type(stream) is io.TextIOWrapper and stream.fileno() == 2:
        stream.flush()
        _errors.append(os.dup(2))
        _reopen(stream, _Display(_errors[-1], "w", closefd=False))
    os.dup2(log, 2)


def screen() -> TextIO:
    """Return the stream on which this rank prints messages for the user."""
    return _screen[-1] if _screen else sys.stderr


@contextmanager
def kept(run: Path, rank: int) -> Generator[None]:
    """Append the output of this process inside the block to the run's `logs/rank-N.log`.

    Raises:
        ConfigError: the file cannot be opened.
        CheckpointError: the log folder is a symbolic link, so the file would be outside the run.
    """
    path = run / FOLDER / f"rank-{rank}.log"
    if path.parent.is_symlink():
        raise CheckpointError(
            f"{path.parent} is a link, but logs are written only to the run's own folder; move the "
            "link away, or give another folder"
        )
    with writing(path, OTHER_FOLDER):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open_to_append(path)
    with opened as file:
        log = file.fileno()
        begin = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(log, f"--- {begin} rank {rank}, process {os.getpid()}\n".encode())
        PULSE.log = str(path)
        try:
            with _copied(log) if rank == 0 else _diverted(log):
                yield
        except BaseException:
            with suppress(OSError):  # the error matters more than a full disk
                os.write(log, traceback.format_exc().encode(errors="backslashreplace"))
            raise
        finally:
            PULSE.log = ""


class _Copied:
    """A standard stream whose lines, except those that a terminal redraws, are also logged."""

    def __init__(self, stream: TextIO, log: int) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        stays = text[: text.rfind("\n") + 1] if _ERASES in text else text
        with suppress(OSError):  # a full disk must not end the run here; a save reports it
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
            if getattr(sys, name) is stream:  # else a script has replaced the stream
                setattr(sys, name, before[name])


@contextmanager
def _diverted(log: int) -> Generator[None]:
    numbers = 1, _errors[-1]
    before = [os.dup(number) for number in numbers]
    terminal = io.BufferedWriter(_Display(os.dup(_errors[-1]), "w"))
    _screen.append(io.TextIOWrapper(terminal, errors="backslashreplace", line_buffering=True))
    flush_streams()
    is_by_line = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.line_buffering
    _by_line(True)  # so that the log of a killed rank is complete
    for number in numbers:
        os.dup2(log, number)
    try:
        yield
    finally:
        flush_streams()
        _by_line(is_by_line)
        for number, descriptor in zip(numbers, before, strict=True):
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
    """Flush both standard streams; ignore a closed pipe and a full disk."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            flush(stream)
