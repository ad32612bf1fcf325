"""The time for which a loop has listened: the silence of others is measured in it.

While a process is stopped, or waits for a processor, it hears nobody. Messages of others wait in
its sockets then, and are no silence.
"""

from __future__ import annotations

import time
from typing import Final

TICK_S: Final = 0.05
"""How often a role looks up without a message, in seconds."""


class LoopClock:
    """Counts the seconds in which a loop ran.

    Attributes:
        now_s: seconds so far.
        looked_s: when the loop looked last, by `time.monotonic`.
    """

    def __init__(self, most_s: float = 4 * TICK_S) -> None:
        """Begin; a pause between two looks counts as `most_s` at most."""
        self.now_s, self.looked_s = 0.0, time.monotonic()
        self._most_s = most_s

    def look(self) -> None:
        """Count the time since the last look."""
        looked_s, self.looked_s = self.looked_s, time.monotonic()
        self.now_s += min(self.looked_s - looked_s, self._most_s)
