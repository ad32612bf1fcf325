"""Watch the ranks of this host from their parent: collect results, name who holds the others up.

What is told while the job goes on is told once, on standard error: a rank that a signal has stopped
(at once), that does not answer, or that stands still. One that is silent for the whole timeout ends
the job.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from phalanx.errors import Interrupted, PhalanxError, TrainingError, named
from phalanx.launch.rank import LEAVE, Failure
from phalanx.launch.roll import SILENT_S, Roll

Rank = tuple[ForkServerProcess, Any]
"""A process, and the parent's end of the pipe to it (its class depends on the system)."""

STARTING_S: Final = 2.0
"""How long ranks may take to begin before it is said, in seconds."""

UNEVEN_S: Final = 15.0
"""How long all others may stand in a collective after a rank has returned: they wait for it."""

GRACE_S: Final = 0.3
"""How long the failures of other ranks are collected before the first is chosen by its clock."""

TICK_S: Final = 0.25
"""How often the supervisor looks up, in seconds."""

SLEPT_S: Final = 5.0
"""A watcher that did not look for so long was stopped itself, and its ranks with it."""

MISSED_S: Final = 2.0
"""How long a rank must be silent to be the one that another has waited for in vain, in seconds."""

STOPPED_S: Final = 2.0
"""How long a process must be stopped before it is told: Ctrl-Z and `fg` stop all for a moment."""


class Supervisor:
    """Watches ranks until all have returned or one has failed."""

    def __init__(
        self,
        ranks: list[Rank],
        signals: list[int],
        timeout_s: float,
        say_starting: Callable[[], None] | None = None,
    ) -> None:
        """Begin to watch; `signals` is the list to which those that come are added."""
        self._ranks = ranks
        self._signals = signals
        self._timeout_s = timeout_s
        self._roll = Roll()
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._going: dict[Any, int] = {line: rank for rank, (_, line) in enumerate(ranks)}
        self._stopped_since_s: dict[int, float] = {}
        self._is_asked_to_stop = False
        self._begin_s = self._looked_s = time.monotonic()
        self._say_starting = say_starting

    def watch(self) -> list[Any]:
        """Return what each rank returned, or raise what `run_ranks` does."""
        while self._going and not self._failures:
            self._receive(TICK_S)
            if self._say_starting is not None and time.monotonic() - self._begin_s > STARTING_S:
                if not self._roll.has_begun(len(self._ranks)):
                    self._say_starting()
                self._say_starting = None
            self._obey_signals()
            if time.monotonic() - self._looked_s > 1:
                self._look()
            self._check_even()
        if self._failures:
            until_s = time.monotonic() + GRACE_S
            while self._going and (left_s := until_s - time.monotonic()) > 0:
                self._receive(left_s)
            raise self._advised(self._failure())
        for _, line in self._ranks:
            with suppress(OSError):  # it has ended already: what it returned is here
                line.send(LEAVE)
        return [self._results[rank] for rank in range(len(self._ranks))]

    def _receive(self, limit_s: float) -> None:
        """Take all that the ranks have sent, or what they send first within some time."""
        ready: list[Any] = wait(list(self._going), limit_s)
        # A signal must not meet a rank as it was several beats ago, on a busy machine.
        while ready:
            for line in ready:
                self._take(line)
            ready = wait(list(self._going), 0)

    def _take(self, line: Any) -> None:
        """Take one word of a rank."""
        rank = self._going[line]
        kind: str
        value: Any
        try:
            kind, value = line.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "failure", _death(rank, self._ranks[rank][0])
        if kind == "beat":
            self._roll.hear(rank, value)
            return
        del self._going[line]
        if kind == "failure":
            self._failures.append(value)
        else:
            self._results[rank] = value
            self._roll.leave(rank)

    def _obey_signals(self) -> None:
        """Ask the ranks to end after their step; those that would not, and at once, by raising."""
        if not self._signals or (len(self._signals) == 1 and self._is_asked_to_stop):
            return
        signum = self._signals[0]
        if len(self._signals) > 1 or not self._roll.heeds_stop():
            raise Interrupted(signum, self._roll.stands())
        self._is_asked_to_stop = True
        for line in self._going:
            with suppress(OSError):  # it has ended: the next look finds that out
                line.send(signum)
        tell(
            f"{signal.Signals(signum).name}: the run ends after the step under way and a "
            "checkpoint; a second signal ends it at once"
        )

    def _look(self) -> None:
        """Tell who holds the others up, and give up one that was silent for the timeout."""
        now_s = time.monotonic()
        slept_s, self._looked_s = now_s - self._looked_s, now_s
        if slept_s > SLEPT_S:
            self._roll.wake(slept_s)
            self._stopped_since_s.clear()
        for rank in self._going.values():
            if not _is_stopped(self._ranks[rank][0]):
                self._stopped_since_s.pop(rank, None)
                continue
            since_s = self._stopped_since_s.setdefault(rank, now_s)
            if now_s - since_s >= STOPPED_S and self._roll.is_news(rank):
                pid = self._ranks[rank][0].pid
                tell(f"{self._why_silent(rank)}; `kill -CONT {pid}` lets it go on")
        for rank in self._roll.silent(SILENT_S):
            if self._roll.is_news(rank):
                tell(f"{self._why_silent(rank)}; the others will wait for it")
        if stall := self._roll.stall():
            tell(
                f"{stall}\nUnless this is a slow step: end it, and start again with --debug-comm, "
                "which compares the calls of the ranks"
            )
        if gone := self._roll.silent(self._timeout_s):
            over = f"the timeout of {self._timeout_s:g} s is over"
            raise self._advised(TrainingError(f"{self._why_silent(gone[0])}; {over}"))

    def _check_even(self) -> None:
        """Blame the ranks that returned, if all others wait for them.

        One that works alone, to draw a picture or write a file, may do so for as long as it needs.
        """
        going = sorted(self._going.values())
        if self._results and going and self._roll.in_collectives(going, UNEVEN_S):
            returned = named(sorted(self._results))
            told = self._roll.told(
                f"{returned} returned, and now nobody answers those that wait in a collective; "
                "each rank must make the same calls:"
            )
            raise self._advised(TrainingError(told))

    def _failure(self) -> PhalanxError:
        """Return the error of the rank that failed first by itself, or say whom the ranks miss."""
        first = min(self._failures, key=lambda failure: (failure.is_lost_peer, failure.time_s))
        if not first.is_lost_peer:
            return first.as_error()
        waited = f"{named([first.rank])} has waited in vain for another rank"
        if silent := [r for r in self._roll.silent(MISSED_S) if r in self._going.values()]:
            return TrainingError(f"{self._why_silent(silent[0])}; {waited}")
        return TrainingError(f"{self._roll.told(f'{waited}; all stood')}\n{first.text.rstrip()}")

    def _advised(self, error: PhalanxError) -> PhalanxError:
        """Add which checkpoint stands, as far as the ranks have said so."""
        if stands := self._roll.stands():
            error.add_note(stands)
        return error

    def _why_silent(self, rank: int) -> str:
        """Say what is known of a rank that does not answer."""
        process, doing = self._ranks[rank][0], self._roll.doing(rank)
        for_s = f"for {self._roll.silence_s(rank):.0f} s"
        how = "has been stopped by a signal" if _is_stopped(process) else "has not answered"
        return f"rank {rank} (process {process.pid}) {how} {for_s} (last heard of: {doing})"


def tell(message: str) -> None:
    """Print a message on standard error while the job goes on."""
    print(f"phalanx: {message}", file=sys.stderr, flush=True)  # noqa: T201 - no verb is at hand


def _is_stopped(process: ForkServerProcess) -> bool:
    """Return whether a signal has stopped the process; unknown but on Linux."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"
    return False


def _death(rank: int, process: ForkServerProcess) -> Failure:
    """Describe a rank that ended without a word."""
    process.join(5)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    text = f"the process ended by {how}, without a Python traceback"
    if code == -signal.SIGABRT:
        text += (
            "; gloo ends so a process whose collective does not match that of another rank, or is "
            "called by one rank alone: --debug-comm, or phalanx.init(debug_comm=True), names it; "
            "and C++ one that has too little memory or too few threads: see ulimit -v, ulimit -u "
            "and pids.max"
        )
    if code == 1:  # what multiprocessing itself ends with if it cannot import or find the function
        text += (
            ' of its work; a script that starts ranks needs `if __name__ == "__main__":` before '
            "what it runs, and a function that can be imported from its file"
        )
    # What its peers say follows from it.
    return Failure(rank, 0.0, text, exit_code=code if code is not None and code > 0 else 1)
