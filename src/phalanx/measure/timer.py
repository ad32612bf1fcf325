"""The step ledger: every instant of a training step belongs to exactly one of six terms.

data, forward, backward, communication (the exposed part), optimizer, and other: all time outside of
phases. An inner phase pauses the outer one, so that a wait for another rank inside backward counts
once, as communication.

On the CPU, the host's clock is read where a phase begins and ends. On a GPU, an event is recorded
on the current stream instead, which does not stall the device. A term is then the time of the
stream between two events, including idle time that a slow loader causes. Only `end_step()` waits
for the device. Communication inside forward and backward (see comm.waits) is measured on the CPU
only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

Term = Literal["data", "forward", "backward", "communication", "optimizer", "other"]
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: by term, and its separately measured wall time."""

    terms_s: dict[Term, float]
    wall_s: float


class StepTimer:
    """A timer of training steps, for one thread at a time (autograd's thread counts as the caller).

    Attributes:
        history: times of the latest steps, oldest first.
        switches: terms of the last step, each with its begin.
    """

    def __init__(self, device: torch.device | str = "cpu", history: int = 1000) -> None:
        self.history: deque[StepTimes] = deque(maxlen=history)
        self._is_cuda = torch.device(device).type == "cuda"
        self._open: list[Term] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the step now, and exclude the time since the last step (evaluation, a save).

        Without this call, a step begins where the previous step ended.
        """
        assert not self._open, f"a step begins inside phase '{self._open[-1]}'"
        # The wall time is measured separately, so that comparing it with the terms is a check.
        self._begin = self._now()
        self._switches: list[tuple[Term, float | torch.cuda.Event]] = [("other", self._now())]

    @contextmanager
    def phase(self, term: Term) -> Generator[None]:
        """Attribute the time inside the block to a term; the outer phase is paused inside."""
        self._open.append(term)
        self._switches.append((term, self._now()))
        try:
            yield
        finally:
            self._open.pop()
            self._switches.append((self._open[-1] if self._open else "other", self._now()))

    def end_step(self) -> StepTimes:
        """End the step, begin the next, wait for the GPU, and return the times of the step."""
        self._switches.append(("other", self._now()))
        begin, switches, end = self._begin, self._switches, self._now()
        self.switches = [*switches]
        self.begin_step()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        terms_s: dict[Term, float] = dict.fromkeys(TERMS, 0.0)
        for (term, first), (_, last) in pairwise(switches):
            terms_s[term] += _seconds(first, last)
        self.history.append(StepTimes(terms_s, _seconds(begin, end)))
        return self.history[-1]

    def _now(self) -> float | torch.cuda.Event:
        """Return the host's clock, or an event recorded on the GPU's current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(first: Any, last: Any) -> float:
    """Return the seconds between two values of `_now`."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3
