"""The step ledger: every instant of a training step belongs to exactly one of seven terms.

data, forward, backward, communication (the exposed part), bubble, optimizer, and other: all time
outside of phases. An inner phase pauses the outer one, so that a wait for another rank inside
backward counts once, as communication.

Bubble is the idle time of a rank of a pipeline: its waits over pp between the step's first forward
and the optimizer phase. These are the waits for messages inside the schedule, and after the rank's
last action the waits in the collectives that need all stages (tied weights, then the loss).

    rank 0   F0 F1 ....... B0 B1 | loss                . bubble
    rank 1   .. F0 B0 F1 B1 .... | loss

Exposed communication is divided by the mesh axis of each wait. A wait over several axes, such as
all ranks, has the axis "world".

On the CPU, the host's clock is read where a phase begins and ends. On a GPU, an event is recorded
on the current stream instead, which does not stall the device. A term is then the time of the
stream between two events, including idle time that a slow loader causes. Only `end_step()` waits
for the device. Waits inside forward and backward (see comm.waits), and so the bubble and the axes,
are measured on the CPU only.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch  # reports of finished runs do without

Term = Literal["data", "forward", "backward", "communication", "bubble", "optimizer", "other"]
TERMS: tuple[Term, ...] = get_args(Term)

_Label = tuple[Term, str]
"""A term and the mesh axis of a wait, which is empty outside of waits."""

_OTHER: _Label = ("other", "")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step.

    Attributes:
        terms_s: seconds by term.
        wall_s: wall time, measured separately.
        exposed_s: seconds of waits in `communication` by mesh axis; empty on a GPU.
    """

    terms_s: dict[Term, float]
    wall_s: float
    exposed_s: Mapping[str, float] = field(default_factory=dict[str, float])


class StepTimer:
    """A timer of training steps, for one thread at a time (autograd's thread counts as the caller).

    Attributes:
        history: times of the latest steps, oldest first.
        switches: terms of the last step, each with its begin.
    """

    def __init__(self, device: torch.device | str = "cpu", history: int = 1000) -> None:
        self.history: deque[StepTimes] = deque(maxlen=history)
        self._is_cuda = str(device).startswith("cuda")
        self._open: list[_Label] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the step now, and exclude the time since the last step (evaluation, a save).

        Without this call, a step begins where the previous step ended.
        """
        assert not self._open, f"a step begins inside phase '{self._open[-1][0]}'"
        # The wall time is measured separately, so that comparing it with the terms is a check.
        self._begin = self._now()
        self._switches: list[tuple[_Label, float | torch.cuda.Event]] = [(_OTHER, self._now())]
        self._is_in_schedule = False

    @contextmanager
    def phase(self, term: Term, axis: str = "") -> Generator[None]:
        """Attribute the time inside the block to a term; the outer phase is paused inside."""
        if term in ("forward", "backward", "optimizer"):
            self._is_in_schedule = term != "optimizer"
        self._open.append((term, axis))
        self._switches.append((self._open[-1], self._now()))
        try:
            yield
        finally:
            self._open.pop()
            self._switches.append((self._open[-1] if self._open else _OTHER, self._now()))

    def wait(self, axis: str) -> AbstractContextManager[None]:
        """Attribute the time inside the block to a wait for other ranks of a mesh axis."""
        is_bubble = axis == "pp" and self._is_in_schedule
        return self.phase("bubble" if is_bubble else "communication", axis)

    def end_step(self) -> StepTimes:
        """End the step, begin the next, wait for the GPU, and return the times of the step."""
        self._switches.append((_OTHER, self._now()))
        begin, switches, end = self._begin, self._switches, self._now()
        self.switches = [*switches]
        self.begin_step()
        if not isinstance(end, (int, float)):
            end.synchronize()
        terms_s: dict[Term, float] = dict.fromkeys(TERMS, 0.0)
        exposed_s: defaultdict[str, float] = defaultdict(float)
        for ((term, axis), first), (_, last) in pairwise(switches):
            seconds = _seconds(first, last)
            terms_s[term] += seconds
            if axis and term == "communication":
                exposed_s[axis] += seconds
        self.history.append(StepTimes(terms_s, _seconds(begin, end), exposed_s))
        return self.history[-1]

    def _now(self) -> float | torch.cuda.Event:
        """Return the host's clock, or an event recorded on the GPU's current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(first: Any, last: Any) -> float:
    """Return the seconds between two values of `_now`."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3
