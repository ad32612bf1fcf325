"""The step ledger: every instant of a training step belongs to exactly one of six terms.

data, forward, backward, communication (the exposed part), optimizer, and other: whatever lies in no
phase. An inner phase pauses the outer one, so a wait for another rank inside backward counts as
communication and not twice.

On the CPU the host's clock is read where a phase begins and ends. On a GPU an event is recorded on
the current stream there instead, which does not stall the device: a term is then the time that the
stream spent between two events, idle time that a slow loader causes included. Only `end_step()`
waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch

from phalanx.errors import ConfigError, nearest

Phase = Literal["data", "forward", "backward", "communication", "optimizer"]
Term = Literal["data", "forward", "backward", "communication", "optimizer", "other"]
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step; the six terms sum to the wall time, which is measured on its own."""

    data_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    """Exposed communication: time in which the rank could do nothing but wait for others, also in
    the middle of forward and backward (see comm.waits); on a GPU only outside of them."""
    optimizer_s: float
    other_s: float
    wall_s: float

    def term_s(self, term: Term) -> float:
        """Return the seconds of one term."""
        seconds: float = getattr(self, f"{term}_s")
        return seconds

    @property
    def sum_s(self) -> float:
        """Return the sum of the six terms."""
        return sum(self.term_s(term) for term in TERMS)


class StepTimer:
    """Measures steps; for one thread at a time (autograd's own thread counts as its caller's).

    Attributes:
        history: times of the latest steps, oldest first.
    """

    def __init__(self, device: torch.device | str = "cpu", history: int = 1000) -> None:
        self.history: deque[StepTimes] = deque(maxlen=history)
        self._is_cuda = torch.device(device).type == "cuda"
        self._open: list[Phase] = []
        self._laps = _Laps(self._is_cuda)

    def begin_step(self) -> None:
        """Begin the step now, leaving out what passed since the last one (evaluation, a save).

        Without this call a step begins where the one before it ended.
        """
        self._require_none_open("begin_step")
        self._laps = _Laps(self._is_cuda)

    @contextmanager
    def phase(self, name: Phase) -> Generator[None]:
        """Attribute the time inside the block to a term; an outer phase pauses meanwhile.

        Raises:
            ConfigError: the name is not one of the phases.
        """
        if name not in get_args(Phase):
            raise ConfigError(
                f"'{name}' is no phase of a step{nearest(name, get_args(Phase))}; the phases are "
                f"{', '.join(get_args(Phase))}"
            )
        self._open.append(name)
        self._laps.switch(name)
        try:
            yield
        finally:
            self._open.pop()
            self._laps.switch(self._open[-1] if self._open else "other")

    def end_step(self) -> StepTimes:
        """End the step, wait until a GPU has finished it, begin the next; return its times."""
        self._require_none_open("end_step")
        ended = self._laps
        ended.end()
        self._laps = _Laps(self._is_cuda)
        times = ended.times()
        self.history.append(times)
        return times

    def _require_none_open(self, caller: str) -> None:
        if self._open:
            raise ConfigError(
                f"{caller}() was called inside phase '{self._open[-1]}'; leave every phase first"
            )


class _Mark:
    """An instant, on the host's clock and, for a GPU, in the order of its current stream."""

    def __init__(self, is_cuda: bool) -> None:
        self.host_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if is_cuda:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def until(self, later: _Mark) -> float:
        """Return the seconds from this instant to a later one."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) / 1e3
        return later.host_s - self.host_s


class _Laps:
    """One step: its first and last instant, and those where a term took over from another."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        # The first and the last mark are for the wall alone, so that the sum law can fail.
        self._first = _Mark(is_cuda)
        self._last: _Mark | None = None
        self._switches: list[tuple[Term, _Mark]] = [("other", _Mark(is_cuda))]

    def switch(self, term: Term) -> None:
        self._switches.append((term, _Mark(self._is_cuda)))

    def end(self) -> None:
        self.switch("other")
        self._last = _Mark(self._is_cuda)

    def times(self) -> StepTimes:
        assert self._last is not None, "times() before end()"
        if self._last.event is not None:
            self._last.event.synchronize()
        seconds: dict[Term, float] = dict.fromkeys(TERMS, 0.0)
        for (term, begin), (_, end) in pairwise(self._switches):
            seconds[term] += begin.until(end)
        return StepTimes(
            data_s=seconds["data"],
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            communication_s=seconds["communication"],
            optimizer_s=seconds["optimizer"],
            other_s=seconds["other"],
            wall_s=self._first.until(self._last),
        )
