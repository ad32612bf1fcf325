"""Who has been heard of, by a clock that counts only the time in which somebody listens.

    member      renews its lease with each heartbeat
    observer    ticks the clock each time it listens, and asks whose lease is too old

    real time        |--listens--|...stopped, or did not read...|--listens--|
    ListeningClock   |--listens--|-|--listens--|     a gap counts as at most `most_s`

Messages that arrive in a gap wait in a socket, so the gap must not count as silence.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container, Iterable
from typing import Generic, TypeVar

Member = TypeVar("Member", int, str)


class ListeningClock:
    """Counts the seconds in which an observer listens.

    Attributes:
        now_s: seconds counted so far.
        ticked_s: time of the last `tick`, by `time.monotonic`.
    """

    def __init__(self, most_s: float) -> None:
        """Start at 0; the time between two calls of `tick` counts as at most `most_s`."""
        self.now_s = 0.0
        self._most_s = most_s
        self.ticked_s = time.monotonic()
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Add the time since the last call; the observer calls this each time it listens."""
        with self._lock:
            # An observer that was stopped for an hour counts `most_s`, so that nobody seems silent
            # for it.
            before_s, self.ticked_s = self.ticked_s, time.monotonic()
            self.now_s += min(self.ticked_s - before_s, self._most_s)


class Leases(Generic[Member]):
    """The time at which each member was last heard of, by the observer's clock.

    Attributes:
        renewed_s: member -> that time; -inf for a member that has left.
    """

    def __init__(self, now_s: Callable[[], float], members: Iterable[Member] = ()) -> None:
        """Watch `members` from now on; `now_s` returns the time by the observer's clock."""
        self._now_s = now_s
        self.renewed_s: dict[Member, float] = dict.fromkeys(members, now_s())

    def renew(self, member: Member) -> None:
        """Record that a member was heard of."""
        self.renewed_s[member] = self._now_s()

    def leave(self, member: Member) -> None:
        """Record that a member has left, which ends its lease."""
        self.renewed_s[member] = -math.inf

    def forget(self, member: Member) -> None:
        """Watch a member no longer."""
        self.renewed_s.pop(member, None)

    def has_left(self, member: Member) -> bool:
        """Return whether a member has left, and was not heard of since."""
        return self.renewed_s.get(member) == -math.inf

    def age_s(self, member: Member) -> float:
        """Return for how long a member has not been heard of, in seconds of the clock."""
        return self._now_s() - self.renewed_s[member]

    def older(self, limit_s: float, among: Container[Member] | None = None) -> list[Member]:
        """Return the members, of `among` or of all, whose lease is older than a limit."""
        members = sorted(self.renewed_s.copy())
        ours = [member for member in members if among is None or member in among]
        return [member for member in ours if self.age_s(member) > limit_s]
