"""The errors that a user of Phalanx can meet.

PhalanxError                 base of the errors below; the command line prints it as one message
├── ConfigError              a setting: unknown, of the wrong type, out of range, contradictory
│   ├── StrategyError        a strategy cannot be parsed, or uses a combination not implemented
│   ├── NotDivisible         a size does not split over a degree
│   └── BatchError           global batch, microbatch, accumulation and data ranks contradict
├── ScriptError              a script's call of Phalanx or torch would give wrong results
├── DataError                a corpus, tokenizer or token file is missing, empty or unreadable
├── CheckpointError          a checkpoint is missing, incomplete or from another model
├── StoreError               an object store refuses a request, or fails it each time
└── TrainingError            training went wrong, such as a loss that is not finite
    ├── CollectiveMismatch   ranks of a group call different collectives, or one makes no call
    ├── PeerLost             another rank has left; that rank is the cause of the job's failure
    └── RankFailed           a process of the job ended; carries that rank's own traceback

Interrupted                  a KeyboardInterrupt, also for SIGTERM and SIGHUP; only the outermost
                             caller catches it

Each message names the mistake, the actual value, the expected value, and the nearest legal value.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import re
import signal
import textwrap
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

NUM_NAMED = 8
"""Most ranks that a message lists; it gives the rest as a count."""


LONGEST = 20_000
"""Most characters of an error's text, including its traceback, that are shown."""


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, start a new line, or reverse the text direction."""

LIMITS: Final[Mapping[int, str]] = {
    errno.EMFILE: "a process may not open as many files as this needs; raise ulimit -n",
    errno.ENFILE: "the system has too many files open; end some programs",
    errno.ENOMEM: "no memory is left, or allowed; raise ulimit -v or the control group's limit",
    errno.EAGAIN: "no further process or thread may be started; raise ulimit -u or pids.max, or "
    "ulimit -v, which bounds the memory for its stack",
}
"""errno of a system limit -> advice for the user."""

NO_THREAD: Final = "can't start new thread"
"""Message of Python's RuntimeError when the system refuses to start a thread."""

_WORDS: Final[Mapping[str, int]] = {
    NO_THREAD: errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "Cannot allocate memory": errno.ENOMEM,
    "failed to map segment from shared object": errno.ENOMEM,
}
"""Message text of an error without an errno -> the errno of the system limit it reports."""


class PhalanxError(Exception):
    """Base class of the errors that a user can fix; the text is the whole message."""

    exit_code = 2


class ConfigError(PhalanxError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class StrategyError(ConfigError):
    """A strategy cannot be parsed, or uses a combination that is not implemented."""


class NotDivisible(ConfigError):
    """A size does not split evenly over a degree."""

    def __init__(self, what: str, size: int, degree: int) -> None:
        start = min(degree, size)  # search outward from the degree, because a size may be large
        near = (start + way * gap for gap in itertools.count() for way in (-1, 1))
        legal = next(each for each in near if each > 0 and size % each == 0)
        super().__init__(
            f"{what} is {size}, which {degree} does not divide; the nearest degree that does is "
            f"{legal}"
        )


class BatchError(ConfigError):
    """Global batch, microbatch, accumulation and data ranks contradict each other."""


class ScriptError(PhalanxError):
    """A training loop calls Phalanx or torch in a way that would give wrong results."""


class DataError(PhalanxError):
    """A corpus, tokenizer or token file is missing, empty or unreadable."""

    def __init__(self, message: str) -> None:
        """Escape line breaks, which file names may contain, so that the message is one line."""
        super().__init__(message.replace("\n", "\\n"))


class CheckpointError(PhalanxError):
    """A checkpoint is missing, incomplete or from another model."""


class StoreError(PhalanxError, OSError):
    """An object store refuses a request, or has failed it each time."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class TrainingError(PhalanxError):
    """Training went wrong in a way that further steps would hide."""

    exit_code = 1


class CollectiveMismatch(TrainingError):
    """The ranks of a group call different collectives, or one rank does not make a call.

    Attributes:
        speaker: global rank that detected the mismatch first and reports it; the other ranks
            raise the same error and need not print it.
    """

    speaker: int = 0  # default for an error that another process sent as its message only

    def __init__(self, message: str, speaker: int) -> None:
        super().__init__(message)
        self.speaker = speaker


class PeerLost(TrainingError):
    """Another rank has left or does not answer; the error of that rank names the cause."""


class RankFailed(TrainingError):
    """A process of the job ended early.

    Attributes:
        rank: global rank of the process that failed first.
        traceback: traceback of that process, or a sentence that names the signal that ended it.
    """

    def __init__(self, rank: int, traceback: str, name: str = "") -> None:
        self.rank = rank
        self.traceback = traceback
        super().__init__(f"{name or f'rank {rank}'} failed first:\n{traceback.rstrip()}")


class Interrupted(KeyboardInterrupt):
    """A signal ended the work: Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, signum: int, message: str = "") -> None:
        self.signum, self.exit_code = signum, 128 + signum
        name = signal.Signals(signum).name
        by = "" if signum == signal.SIGINT else f" by {name}"
        super().__init__(f"interrupted{by}{message and '; '}{message}")


def message_of(error: BaseException) -> str:
    """Return the message of `error` and its notes, such as the failure of a save."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return printable(text)


def text_of(error: BaseException) -> str:
    """Return the text of an error that a script raised, whose `__str__` may raise another."""
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"


def printable(text: str) -> str:
    """Return `text` with terminal control characters escaped; use it for file names."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def system_limit_advice(error: BaseException) -> str:
    """Return advice if `error` came from a system limit in `LIMITS`, else an empty string."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    elif isinstance(error, (RuntimeError, ImportError)):
        number = next((value for text, value in _WORDS.items() if text in text_of(error)), None)
    return LIMITS.get(number or 0, "")


@contextmanager
def within_limits(what: str) -> Generator[None]:
    """Convert an error from a system limit into a ConfigError that starts with `what`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not (advice := system_limit_advice(error)):
            raise
        raise ConfigError(f"{what}: {advice}") from error


def shortened(text: str, longest: int = LONGEST, around: str = "\n") -> str:
    """Return `text`, with its middle left out if it is longer than `longest` characters.

    `around` is put before and after the words that give the number of characters left out.
    """
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}{around}... {left_out:,} characters left out ...{around}{text[-half:]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the known word closest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def named(ranks: Sequence[int], names: Sequence[str] = ()) -> str:
    """Return "rank 1" or "ranks 0, 1", with at most NUM_NAMED ranks; or their `names`, if any."""
    shown = ", ".join(names[rank] if names else str(rank) for rank in ranks[:NUM_NAMED])
    more = f" and {len(ranks) - NUM_NAMED} more" if len(ranks) > NUM_NAMED else ""
    return f"{'' if names else 'ranks ' if len(ranks) > 1 else 'rank '}{shown}{more}"


def wrapped(text: str, width: int) -> str:
    """Wrap `text` at `width` columns; short lines keep their breaks, words are never broken."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            drop_whitespace=True,
        ) if len(line) > width else [line]  # fmt: skip
    return "\n".join(lines)
