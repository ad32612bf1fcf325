"""Agree over all ranks, about once a second, whether to stop and whether to save by time.

    step      1   2   3   4   5   6   7   8   9  10 ...
    compare   x   x           x           x             about every second, by rank 0's clock

Each rank has its own signals and clock, but all ranks must stop and save after the same step. So
they all-reduce: each time, rank 0 sets the number of steps until the next all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.comm.together import max_over_ranks
from phalanx.config.save_policy import SavePolicy
from phalanx.launch.heartbeat import PULSE

COMPARE_S = 1.0
"""Approximate seconds between two comparisons of the ranks."""

MAX_STEPS = 1000
"""Most steps between two comparisons."""


class StopAndSaveSync:
    """The agreement of all ranks on when to stop and when to save; all ranks make the same calls.

    Attributes:
        stop_signal: number of the signal by which all ranks stop after this step, or 0.
        has_compared: whether the ranks have compared after the latest step.
        is_save_due: whether the last save is so long ago that the policy asks for one by time.
    """

    def __init__(
        self, policy: SavePolicy, is_first: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock, of which only rank 0's counts."""
        self._is_first = is_first
        self._policy = policy
        self._clock = clock
        self._saved_s = self._compared_s = clock()
        self._interval = self._steps_left = 1
        self.stop_signal, self.is_save_due, self.has_compared = 0, False, False

    def saved(self) -> None:
        """Record that a save has begun now."""
        self._saved_s = self._clock()

    def after_step(self, *, can_save: bool) -> None:
        """Update `stop_signal` and `is_save_due`; no save is due unless rank 0's `can_save`."""
        self.is_save_due = False
        self._steps_left -= 1
        self.has_compared = self._steps_left <= 0
        if not self.has_compared:
            return
        is_due, interval = 0, 0
        if self._is_first:
            now_s = self._clock()
            is_due = int(can_save and self._policy.is_late(now_s - self._saved_s))
            step_s = max((now_s - self._compared_s) / self._interval, COMPARE_S / MAX_STEPS)
            interval = max(1, round(COMPARE_S / step_s))
            self._compared_s = now_s
        self.stop_signal, is_due, interval = max_over_ranks([PULSE.stop_signal, is_due, interval])
        self._interval = self._steps_left = interval
        self.is_save_due = bool(is_due)
