"""Decide together, about once a second, whether to stop and whether a checkpoint is due by time.

    step      1   2   3   4   5   6   7   8   9  10 ...
    compare   x   x           x           x             about a second apart, by rank 0's clock

Signals and clocks are each rank's own, but all ranks must stop and save after the same step. So
they compare: at each comparison rank 0 says after how many steps the next one is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.comm.together import max_over_ranks
from phalanx.launch.heartbeat import PULSE

COMPARE_S = 1.0
"""About how often the ranks compare, in seconds."""

MAX_STEPS = 1000
"""Most steps between two comparisons."""


class Pace:
    """When to stop, and when to save by the clock; every rank makes one, and calls it alike.

    Attributes:
        stop_signal: the signal by which all ranks stop after this step, or 0.
        is_save_due: whether the last checkpoint was begun so long ago that another is due.
    """

    def __init__(
        self, save_every_s: float, is_first: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count; rank 0's clock decides, and 0 is no bound between two checkpoints."""
        self._is_first = is_first
        self._save_every_s = save_every_s
        self._clock = clock
        self._saved_s = self._compared_s = clock()
        self._interval = self._steps_left = 1
        self.stop_signal, self.is_save_due = 0, False

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        self._saved_s = self._clock()

    def after_step(self, *, can_save: bool) -> None:
        """Decide what all ranks do after this step; a save begins if rank 0 says that it can."""
        self.is_save_due = False
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        is_due, interval = 0, 0
        if self._is_first:
            now_s = self._clock()
            late = self._save_every_s > 0 and now_s - self._saved_s >= self._save_every_s
            is_due = int(late and can_save)
            step_s = max((now_s - self._compared_s) / self._interval, COMPARE_S / MAX_STEPS)
            interval = max(1, round(COMPARE_S / step_s))
            self._compared_s = now_s
        self.stop_signal, is_due, interval = max_over_ranks([PULSE.stop_signal, is_due, interval])
        self._interval = self._steps_left = interval
        self.is_save_due = bool(is_due)
