"""Where a rank stands: what its main thread does, since when, and at which place in the code.

The main thread notes the step and the phase; that costs two assignments. A thread of the rank looks
at it about once a second and sends a `Beat` to whoever watches the job: the parent process on one
host, the job's store under torchrun.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

BEAT_S = 1.0
"""Seconds between two beats of a rank."""

_COMPUTING = ("_engine_run_backward",)
"""Functions of torch that compute for long in one place: a thread in one does not stand still."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where one rank stands.

    Attributes:
        doing: what it does, such as "backward of step 12".
        still_s: how long its main thread has stood at one place of the code, in seconds.
        place: that place, and from where it was called; empty as long as it moves.
        heeds_stop: whether a request to stop will end it after its step.
        is_stepping: whether it takes steps, none of which has a rank stand still for long.
        resume_hint: the last checkpoint and how to resume from it, if this rank reports them.
        waits: whether it waits for other ranks, however long they need.
        in_collective: whether that place is within a call that other ranks have to make too.
        log: file that has what it prints; empty if there is none.
        process: number of its process.
        host: name of its host.
    """

    doing: str = "starting"
    still_s: float = 0.0
    place: str = ""
    heeds_stop: bool = False
    is_stepping: bool = False
    resume_hint: str = ""
    waits: bool = False
    in_collective: bool = False
    log: str = ""
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


class Pulse:
    """What this process says of its own main thread.

    Attributes:
        steps_done: optimizer steps that are done.
        heeds_stop: set by work that looks at `stop_signal` after each step.
        stop_signal: the signal by which the job was asked to stop, or 0.
        obeyed: the signal that a script knows of, and ends by; or 0.
        is_stepping: whether the main thread takes steps.
        resume_hint: the last checkpoint and how to resume from it; empty if there is none.
        log: file that has what this process prints; empty if there is none.
        advice: says what to do about a job that has ended, to close a message with.
        on_change: called when what it heeds, or the last checkpoint, has changed, so that the
            watcher knows at once.
    """

    def __init__(self) -> None:
        self.steps_done = 0
        self.heeds_stop = False
        self.stop_signal = 0
        self.obeyed = 0
        self.is_stepping = False
        self.resume_hint = ""
        self.log = ""
        self.advice: Callable[[], str] = lambda: self.resume_hint
        self.on_change: Callable[[], None] = lambda: None
        self._doing = "starting"
        self._waits = False
        self._place: tuple[_Mark, int, str] | None = None
        self._since_s = time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Note what the main thread does inside."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Note that the main thread waits for other ranks inside, however long they need."""
        self._waits = True
        try:
            with self.doing(what):
                yield
        finally:
            self._waits = False

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Note the phase of the step under way; a watcher of the step."""
        with self.doing(f"{name} of step {self.steps_done + 1}"):
            yield

    @contextmanager
    def heeding(self) -> Generator[None]:
        """Promise to look at `stop_signal` inside, and to end soon if it is set."""
        self.is_stepping = True
        self.heed()
        try:
            yield
        finally:
            self.is_stepping = self.heeds_stop = False
            self.on_change()

    def heed(self) -> None:
        """Promise to look at `stop_signal` from now on; for a loop that is no block of its own."""
        if not self.heeds_stop:
            self.heeds_stop = True
            self.on_change()

    def saved(self, resume_hint: str) -> None:
        """Note the last checkpoint and how to resume from it, so that the watcher knows."""
        self.resume_hint = resume_hint
        self.on_change()

    def now(self, what: str) -> None:
        """Note what the main thread does from now on, until the end of a block of `doing`."""
        self._doing = what

    def stepping(self, steps_done: int) -> None:
        """Note that a script's main thread takes the step after `steps_done` ones."""
        self.steps_done, self.is_stepping = steps_done, True
        self.now(f"step {steps_done + 1}")

    def beat(self) -> Beat:
        """Look at the main thread."""
        still_s, where, in_collective = self._look()
        return Beat(
            doing=self._doing,
            still_s=still_s,
            place=where,
            heeds_stop=self.heeds_stop,
            is_stepping=self.is_stepping,
            resume_hint=self.resume_hint,
            waits=self._waits,
            in_collective=in_collective,
            log=self.log,
        )

    def _look(self) -> tuple[float, str, bool]:
        """Return for how long the main thread has stood at one place, and where if that is long.

        And whether it is a call of comm or of torch.distributed.

        Who holds a frame holds its variables and its callers', tensors among them, also
        after they have returned. So no frame is held for longer than a look takes, and what
        `_current_frames` returns not at all: this function's own frame is in it, and a variable of
        this function would make it a cycle, which holds them until Python collects garbage.
        """
        from phalanx.debug.fingerprint import find_places, is_collective  # they load torch

        thread = threading.main_thread().ident or 0
        # Private by its name, public by its documentation.
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
        at = None if frame is None else _place_of(frame)
        # A loop that sleeps in each step is met at one instruction, and takes steps all the same.
        place = None if at is None else (*at, self._doing)
        now_s = time.monotonic()
        if place is None or place != self._place:
            self._place, self._since_s = place, now_s
        still_s = now_s - self._since_s
        if frame is None or still_s <= BEAT_S:
            return still_s, "", False
        return still_s, ", called from ".join(find_places(frame)[0]), is_collective(frame)


class _Mark:
    """Left on a frame to know it again: another may have its address by then.

    It lies where a debugger keeps what it calls for each line of the frame.
    """

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Mark:
        return self


def _place_of(frame: FrameType) -> tuple[_Mark, int] | None:
    """Return a value that is equal while a frame stands at one place; None if it computes there."""
    if frame.f_code.co_name in _COMPUTING:
        return None
    if frame.f_trace is None:
        frame.f_trace = _Mark()
    mark = frame.f_trace
    return (mark, frame.f_lasti) if isinstance(mark, _Mark) else None  # None under a debugger


PULSE = Pulse()
"""The pulse of this process, which has one main thread as it has one rank."""
