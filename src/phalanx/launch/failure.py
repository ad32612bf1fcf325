"""Describe how a rank failed (message and exit code), and find the cause among several failures."""

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
    message_of,
    shortened,
    system_limit_advice,
)
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import VARIABLE
from phalanx.launch.rank_log import screen

_LOST = re.compile(
    "gloo/transport|Application timeout|Connection (was likely )?(closed|reset|refused)"
    "|Socket closed|NCCL.*(timeout|timed out|remote process exited|aborted)"
    "|TCPStore.*(timed out|reset|closed)",
    re.DOTALL | re.IGNORECASE,
)
"""Messages by which gloo, NCCL and the store report a rank that is missing or has left."""

READER_LEFT: Final = 128 + signal.SIGPIPE
"""Exit code when the reader of standard output, such as `| head`, has closed the pipe."""

LOST_PEER: Final = 75
"""Exit code of a rank that `phalanx launch` has started, if it ends because another is lost."""

ADVICE_TIMEOUT_S: Final = 2.0
"""Timeout of the search for the last checkpoint, in seconds."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        time_s: time of the failure by the host's clock, in seconds.
        text: message of a PhalanxError, traceback of any other exception.
        kind: class of a PhalanxError; None for any other exception.
        is_lost_peer: whether the failure is only that another rank is missing or has left.
        exit_code: exit code of a program that ends by this failure.
        name: what messages call the rank; empty: "rank N".
    """

    rank: int
    time_s: float
    text: str
    kind: type[PhalanxError] | None = None
    is_lost_peer: bool = False
    exit_code: int = 1
    name: str = ""

    def as_error(self) -> PhalanxError:
        """Return the error that `run_ranks` raises for this failure."""
        error: PhalanxError = RankFailed(self.rank, self.text, self.name)
        if self.kind is not None:
            # Without __init__, because some classes build their message from other arguments.
            error = self.kind.__new__(self.kind, self.text)
        error.exit_code = self.exit_code
        return error


class PeerFailed(TrainingError):
    """The error of a rank that ends without a message, because another rank reports the cause."""


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the earliest failure that is not only a lost peer, or else the earliest of all."""
    return min(failures, key=lambda failure: (failure.is_lost_peer, failure.time_s))


def lost_peer_code() -> int:
    """Return the exit code of a rank that ends because another is lost."""
    return LOST_PEER if VARIABLE in os.environ else TrainingError.exit_code


def describe(rank: int, error: BaseException, name: str = "") -> Failure:
    """Return the failure of a rank that raised `error`; for `name` see `Failure`."""
    kind, text, exit_code = None, shortened(traceback.format_exc()), 1
    if isinstance(error, PhalanxError):
        # The nearest class in phalanx.errors: a script's own class cannot be imported elsewhere.
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        text, exit_code = shortened(message_of(error)), error.exit_code
    elif limit := out_of_threads(error):
        kind, text = errors.ConfigError, f"{name or f'rank {rank}'}: {limit}"
        exit_code = kind.exit_code
    if isinstance(error, KeyboardInterrupt):
        exit_code = 128 + getattr(error, "signum", signal.SIGINT)
    if isinstance(error, SystemExit):  # a failure even with code 0: the work did not finish
        exit_code = exit_code_of(error.code) or 1
    return Failure(rank, time.time(), text, kind, is_lost_peer(error), exit_code, name)


def exit_code_of(value: object) -> int:
    """Return the exit code that Python uses for the argument of `sys.exit`."""
    return value & 0xFF if isinstance(value, int) else int(value is not None)


def out_of_threads(error: BaseException) -> str:
    """Return a message if `error` is Python's failure to start a thread, else ""."""
    if not isinstance(error, RuntimeError) or NO_THREAD not in str(error):
        return ""
    places = [f"{at.filename}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
    of_script = [place for place in places if not place.startswith(threading.__file__)]
    return "\nat ".join([system_limit_advice(error), *of_script[-1:]])


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` reports only that another rank is missing or has left.

    A script's own error may contain the words of a network error, but its `raise` statement is
    outside torch.distributed and comm. An error from C++, as of `work.wait()`, has no `raise`.
    """
    if isinstance(error, PeerLost):
        return True
    # torch has no class for gloo's errors; tests/launch/test_local.py pins their messages.
    if not isinstance(error, (RuntimeError, PhalanxError)) or not _LOST.search(str(error)):
        return False
    # The innermost frame decides: one of torch.distributed or comm, or an instruction that is not a
    # `raise`, means that C++ has reported the network.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    from phalanx.debug.fingerprint import is_collective  # imported here because it loads torch

    innermost = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return is_collective(trace.tb_frame) or innermost not in ("RAISE_VARARGS", "RERAISE")


def is_reader_gone(error: BaseException) -> bool:
    """Return whether `error`, or a rank's error that it quotes, is a write to a closed pipe.

    The traceback is searched, because a rich console turns a BrokenPipeError into a SystemExit.
    """
    return "BrokenPipeError" in "".join(traceback.format_exception(error))


def reader_has_left() -> bool:
    """Return whether the reader of standard output closed the pipe, as `| head` does; then mute it.

    A broken pipe between processes of the job is another matter: an error.
    """
    standard_output = 1
    pipe = select.poll()
    pipe.register(standard_output, 0)
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), standard_output)
    return True


def failure_of_dead_process(rank: int, process: BaseProcess, log: str) -> Failure:
    """Return the failure of a rank whose process ended without reporting an error."""
    process.join(5)
    code = process.exitcode
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by signal {signal.Signals(-code).name}"
    text = f"the process ended {how}, without a Python traceback"
    if code == -signal.SIGABRT:
        text += (
            "; gloo aborts a process whose collective does not match another rank's, or is called "
            "by only one rank: --debug-comm, or phalanx.init(debug_comm=True), names that call; "
            "C++ aborts a process that has too little memory or too few threads: see ulimit -v, "
            "ulimit -u and pids.max"
        )
    if code == 1:  # exit code of multiprocessing if it cannot import or find the function
        text += (
            ' of its function; a script that starts ranks needs `if __name__ == "__main__":` '
            "before the statements that it runs, and a function that can be imported from its file"
        )
    if code == 255:  # exit code of multiprocessing if the forkserver cannot report another
        text += (
            "; so do all processes of a job if their forkserver is killed, as for lack of memory"
        )
    if log:
        text += f"; its output is in {log}"
    # Time 0 makes it the first failure, because the failures of its peers are consequences.
    return Failure(rank, 0.0, text, exit_code=code if code is not None and code > 0 else 1)


def report(message: str) -> None:
    """Print a message to the user on standard error while the job continues."""
    print(f"phalanx: {message}", file=screen(), flush=True)


def with_advice(message: str) -> str:
    """Append advice on how to resume, unless the message has it or a lost disk delays it."""
    advice: list[str] = []
    asked = threading.Thread(target=lambda: advice.append(PULSE.advice()), daemon=True)
    asked.start()
    asked.join(ADVICE_TIMEOUT_S)
    return "\n".join([message, *(text for text in advice if text and text not in message)])
