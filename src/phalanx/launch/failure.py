"""Describe how a rank failed: message, exit code; of several failures, find the cause."""

from __future__ import annotations

import dis
import os
import re
import select
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Final

from phalanx import errors
from phalanx.errors import (
    NO_THREAD,
    PeerLost,
    PhalanxError,
    RankFailed,
    TrainingError,
    limit_met,
    message_of,
    shortened,
)
from phalanx.launch.exit_code import exit_code_of
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.rank_log import screen

_LOST = re.compile(
    "gloo/transport|Application timeout|Connection (was likely )?(closed|reset|refused)"
    "|Socket closed|NCCL.*(timeout|timed out|remote process exited|aborted)"
    "|TCPStore.*(timed out|reset|closed)",
    re.DOTALL | re.IGNORECASE,
)
"""What gloo, NCCL and the store say of a rank that does not come or has left."""

READER_LEFT: Final = 128 + signal.SIGPIPE
"""The exit code after `| head` and the like, where nobody reads the rest."""

WORDS_S: Final = 2.0
"""Time-out of the search for the last checkpoint, in seconds."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        time_s: when, by the host's clock.
        text: the message of a PhalanxError, else the traceback.
        kind: class of a PhalanxError; None for any other exception.
        is_lost_peer: another rank did not come, or left: its failure says more.
        exit_code: of a program that ends by it.
    """

    rank: int
    time_s: float
    text: str
    kind: type[PhalanxError] | None = None
    is_lost_peer: bool = False
    exit_code: int = 1

    def as_error(self) -> PhalanxError:
        """Return what the caller of `run_ranks` is to catch."""
        error: PhalanxError = RankFailed(self.rank, self.text)
        if self.kind is not None:
            # Not by calling the class: some compose their message from other arguments.
            error = self.kind.__new__(self.kind, self.text)
        error.exit_code = self.exit_code
        return error


class PeerFailed(TrainingError):
    """Another rank reports the error; this one ends with it."""


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the failure of the rank that failed first by itself, or else that only lost a peer."""
    return min(failures, key=lambda failure: (failure.is_lost_peer, failure.time_s))


def describe(rank: int, error: BaseException) -> Failure:
    """Describe how a rank failed by an error of its own."""
    kind, text, exit_code = None, shortened(traceback.format_exc()), 1
    if isinstance(error, PhalanxError):
        # The nearest class that every process knows: a user's own may be of a script.
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        text, exit_code = shortened(message_of(error)), error.exit_code
    elif words := out_of_threads(error):
        kind, text = errors.ConfigError, f"rank {rank}: {words}"
        exit_code = kind.exit_code
    if isinstance(error, KeyboardInterrupt):
        exit_code = 128 + getattr(error, "signum", signal.SIGINT)
    if isinstance(error, SystemExit):  # which has cut the work short, whatever its code
        exit_code = exit_code_of(error.code) or 1
    return Failure(rank, time.time(), text, kind, is_lost_peer(error), exit_code)


def out_of_threads(error: BaseException) -> str:
    """Return what to say of an error of Python's that a thread cannot be started; else nothing."""
    if not isinstance(error, RuntimeError) or NO_THREAD not in str(error):
        return ""
    places = [f"{at.filename}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not place.startswith(threading.__file__)]
    return "\nat ".join([limit_met(error), *own[-1:]])


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` says no more than that another rank did not come, or has left.

    A script's own error may have the words of a network's: it comes of a `raise` that is neither
    torch.distributed's nor ours. What C++ raises, a `work.wait()` in a script say, comes of none.
    """
    if isinstance(error, PeerLost):
        return True
    # torch has no class for what gloo says; tests/launch/test_local.py pins its words.
    if not isinstance(error, (RuntimeError, PhalanxError)) or not _LOST.search(str(error)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    from phalanx.debug.fingerprint import is_collective  # it loads torch

    innermost = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return is_collective(trace.tb_frame) or innermost not in ("RAISE_VARARGS", "RERAISE")


def is_reader_gone(error: BaseException) -> bool:
    """Return whether `error`, or what a rank says in it, came of writing to a pipe nobody reads.

    A rich console turns the BrokenPipeError into a SystemExit.
    """
    return "BrokenPipeError" in "".join(traceback.format_exception(error))


def reader_has_left() -> bool:
    """Return whether standard output is a pipe without a reader, as after `| head`, and mute it.

    A pipe may break elsewhere too, between processes of a job: that is not the reader's doing.
    """
    standard_output = 1
    pipe = select.poll()
    pipe.register(standard_output, 0)
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), standard_output)
    return True


def death(rank: int, process: BaseProcess, log: str) -> Failure:
    """Describe a rank that ended without a word."""
    process.join(5)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    text = f"the process ended by {how}, without a Python traceback"
    if code == -signal.SIGABRT:
        text += (
            "; gloo ends so a process whose collective does not match another rank's, or is "
            "called by one rank alone: --debug-comm, or phalanx.init(debug_comm=True), names it; "
            "and C++ one that has too little memory or too few threads: see ulimit -v, ulimit -u "
            "and pids.max"
        )
    if code == 1:  # what multiprocessing itself ends with if it cannot import or find the function
        text += (
            ' of its work; a script that starts ranks needs `if __name__ == "__main__":` before '
            "what it runs, and a function that can be imported from its file"
        )
    if log:
        text += f"; {log} has what it printed"
    # What its peers say follows from it.
    return Failure(rank, 0.0, text, exit_code=code if code is not None and code > 0 else 1)


def report(message: str) -> None:
    """Print a message on standard error while the job continues."""
    print(f"phalanx: {message}", file=screen(), flush=True)


def advised(message: str) -> str:
    """Close a message with what to do, unless it says that or the disk is lost too."""
    advice: list[str] = []
    asked = threading.Thread(target=lambda: advice.append(PULSE.advice()), daemon=True)
    asked.start()
    asked.join(WORDS_S)
    return "\n".join([message, *(text for text in advice if text and text not in message)])
