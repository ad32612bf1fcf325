"""Heartbeats of a rank: the activity of its main thread, its place in the code, and for how long.

The main thread records the step and the phase, which costs two assignments. A second thread samples
the main thread about once a second and sends a `Beat` to the watcher of the job: the parent process
on one host, the job's store under torchrun.

Code that waits for other ranks declares the wait (comm/waits.py), and the sample reads how long the
wait lasts. Only for other code, such as torch's own collectives, is the stack compared.
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

from phalanx.comm.waits import current_wait, declared

BEAT_S = 1.0
"""Interval between two heartbeats of a rank to its parent process, in seconds."""

_COMPUTING = ("_engine_run_backward",)
"""Functions of torch that compute for long at one place; a thread in them is not standing still."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A heartbeat: the state of one rank.

    Attributes:
        doing: activity of the main thread, such as "backward of step 12".
        seconds_at_place: time that the main thread has stood at one place of the code, in seconds.
        place: this place and its caller; empty while the main thread moves.
        handles_stop: whether the rank will end by itself on a request to stop.
        on_stop: clause that says how it will end then.
        is_stepping: whether the rank takes steps, in which no rank is stalled for long.
        resume_hint: last checkpoint and how to resume from it, if this rank reports them.
        waits: whether the rank waits for other ranks without a time limit.
        in_collective: whether the rank waits in a collective, which other ranks must call too.
        log: path of the rank's log file; empty if it has none.
        process: process id.
        host: host name.
    """

    doing: str = "starting"
    seconds_at_place: float = 0.0
    place: str = ""
    handles_stop: bool = False
    on_stop: str = ""
    is_stepping: bool = False
    resume_hint: str = ""
    waits: bool = False
    in_collective: bool = False
    log: str = ""
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


class Pulse:
    """The state of this process's main thread, from which heartbeats are made.

    Attributes:
        steps_done: number of completed optimizer steps.
        handles_stop: whether the current work checks `stop_signal` again and again.
        on_stop: clause that says how the work ends once `stop_signal` is set.
        stop_signal: number of the signal that requested the job to stop, or 0.
        handled_signal: number of the signal that the script has seen and ends because of, or 0.
        is_stepping: whether the main thread takes steps.
        resume_hint: last checkpoint and how to resume from it; empty if there is none.
        log: path of this process's log file; empty if it has none.
        advice: returns the last sentence of an error message: how to continue the job.
        on_change: called when `handles_stop` or `resume_hint` has changed, to send a heartbeat
            at once.
    """

    def __init__(self) -> None:
        self.steps_done = 0
        self.handles_stop = False
        self.on_stop = "the run ends after the current step and a checkpoint"
        self.stop_signal = 0
        self.handled_signal = 0
        self.is_stepping = False
        self.resume_hint = ""
        self.log = ""
        self.advice: Callable[[], str] = lambda: self.resume_hint
        self.on_change: Callable[[], None] = lambda: None
        self._doing = "starting"
        self._place: tuple[_Mark, int, str] | None = None
        self._since_s = time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Record `what` as the activity of the main thread inside the block."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Record that the main thread waits for other ranks inside, without a time limit."""
        with self.doing(what), declared(is_limited=False):
            yield

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record the phase of the current step; `Step.watched` accepts this method."""
        with self.doing(f"{name} of step {self.steps_done + 1}"):
            yield

    @contextmanager
    def handling_stop(self) -> Generator[None]:
        """Declare that the block takes steps, checks `stop_signal` and ends soon once it is set."""
        self.is_stepping = True
        self.heed()
        try:
            yield
        finally:
            self.is_stepping = self.handles_stop = False
            self.on_change()

    def heed(self) -> None:
        """Declare that `stop_signal` is checked from now on, for a loop that is not in a block."""
        if not self.handles_stop:
            self.handles_stop = True
            self.on_change()

    def saved(self, resume_hint: str) -> None:
        """Record the last checkpoint and how to resume from it, and notify the watcher."""
        self.resume_hint = resume_hint
        self.on_change()

    def now(self, what: str) -> None:
        """Record the activity of the main thread from now to the end of the enclosing `doing`."""
        self._doing = what

    def stepping(self, steps_done: int) -> None:
        """Record that a script is in step `steps_done + 1`."""
        self.steps_done, self.is_stepping = steps_done, True
        self.now(f"step {steps_done + 1}")

    def beat(self) -> Beat:
        """Return a heartbeat with the current state of the main thread.

        Its place is empty until the thread has stood there for BEAT_S. A declared wait is one
        place. A collective is a wait with a limit, or a call of torch.distributed.
        """
        from phalanx.debug.fingerprint import find_places, is_collective  # imports torch

        thread = threading.main_thread().ident or 0
        wait = current_wait(thread)
        # A reference to a frame keeps alive the local variables, tensors included, of the frame and
        # its callers, also after they return. So this method keeps no frame, and does not bind the
        # result of `_current_frames` to a name: it contains this method's own frame, and the
        # reference cycle would keep all frames alive until a garbage collection. The name is
        # private, but the function is documented.
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
        now_s = time.monotonic()
        if wait is not None:
            self._place, self._since_s = None, wait.since_s
        else:
            place = None  # in a function of `_COMPUTING`, or under a debugger
            if frame is not None and frame.f_code.co_name not in _COMPUTING:
                if frame.f_trace is None:
                    frame.f_trace = _Mark()
                # A loop that sleeps in each step is always sampled there, so `_doing` counts.
                if isinstance(mark := frame.f_trace, _Mark):
                    place = mark, frame.f_lasti, self._doing
            if place is None or place != self._place:
                self._place, self._since_s = place, now_s
        # A thread stands at one place while all samples see one frame at one instruction:
        #
        #     sample       1 s            2 s            3 s
        #     frame, at    f, 120         f, 120         f, 180
        #     still for    0              1 s            0            it has moved
        #
        # The mark in `f_trace` distinguishes a frame from a later one at the same address.
        still_s, where, in_collective = now_s - self._since_s, "", False
        if frame is not None and still_s > BEAT_S:
            in_collective = is_collective(frame) if wait is None else wait.is_limited
            where = ", called from ".join(find_places(frame)[0])
        return Beat(
            doing=self._doing,
            seconds_at_place=still_s,
            place=where,
            handles_stop=self.handles_stop,
            on_stop=self.on_stop,
            is_stepping=self.is_stepping,
            resume_hint=self.resume_hint,
            waits=wait is not None and not wait.is_limited,
            in_collective=in_collective,
            log=self.log,
        )


class _Mark:
    """Marker that identifies a frame, because a later frame may have the same address.

    It is stored in the frame's `f_trace`, the slot for the line callback of a debugger.
    """

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Mark:
        return self


PULSE = Pulse()
"""The pulse of this process, which is one rank with one main thread."""
