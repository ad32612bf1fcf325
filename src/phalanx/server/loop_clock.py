"""A clock that counts only time in which a loop runs, to measure the silence of peers.

While a process is stopped, or waits for a CPU, it receives nothing. Messages of peers wait in its
sockets meanwhile, so this time must not count as silence.
"""

from __future__ import annotations

import time
from typing import Final

TICK_S: Final = 0.05
"""Longest wait of a role's loop for a message, in seconds."""


class LoopClock:
    """Counts the seconds in which a loop ran.

    Attributes:
        now_s: seconds counted so far.
        looked_s: time of the last `look`, by `time.monotonic`.
    """

    def __init__(self, most_s: float = 4 * TICK_S) -> None:
        """Start at 0; the time between two calls of `look` counts as at most `most_s`."""
        self.now_s, self.looked_s = 0.0, time.monotonic()
        self._most_s = most_s

    def look(self) -> None:
        """Add the time since the last call."""
        looked_s, self.looked_s = self.looked_s, time.monotonic()
        self.now_s += min(self.looked_s - looked_s, self._most_s)
