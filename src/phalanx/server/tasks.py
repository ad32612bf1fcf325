"""The assignment of tasks to workers: other workers compute the tasks of a lost worker.

Each worker computes the tasks of its slot, one per clock. If a worker sends no heartbeat for
`LEASE_S`, or has left, workers that wait compute its tasks. With the asynchronous kinds, where no
worker waits for others, a worker that has finished its slot helps the slot that is furthest behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

LEASE_S: Final = 3.0
"""Silence after which a worker or a server is considered lost, in seconds in which the observer
listens."""

_LEFT: Final = float("-inf")


@dataclass
class Tasks:
    """The tasks of a worker group.

    Attributes:
        num_slots: number of workers, which is the number of tasks per clock.
        begin: first clock.
        end: clock after the last.
        is_asynchronous: whether the consistency is asynchronous, see `Consistency.is_asynchronous`.
        clock: function that returns the seconds for which the scheduler has listened.
        done: slot -> clock below which all its tasks are pushed.
    """

    num_slots: int
    begin: int
    end: int
    is_asynchronous: bool
    clock: Callable[[], float]
    done: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self._ahead = set[tuple[int, int]]()
        self._taken: dict[tuple[int, int], int] = {}
        self._heard_s: dict[int, float] = {}
        self._start_s = self.clock()
        for slot in range(self.num_slots):
            self.done.setdefault(slot, self.begin)

    def hear(self, worker: int) -> None:
        """Record that a worker is live."""
        self._heard_s[worker] = self.clock()

    def beat(self, worker: int) -> None:
        """Record that a worker is live, unless it has left."""
        if self._heard_s.get(worker) != _LEFT:
            self.hear(worker)

    def leave(self, worker: int) -> None:
        """Record that a worker has left."""
        self._heard_s[worker] = _LEFT

    def is_lost(self, worker: int) -> bool:
        """Return whether a worker has left, or has been silent for `LEASE_S`."""
        return self.clock() - self._heard_s.get(worker, self._start_s) > LEASE_S

    @property
    def num_live(self) -> int:
        """Number of live workers."""
        return sum(not self.is_lost(worker) for worker in range(self.num_slots))

    def late(self) -> list[tuple[int, int]]:
        """Return (worker, clock) of live workers that have not pushed tasks of the oldest clock."""
        first = min(self.done.values())
        slots = [slot for slot, done in self.done.items() if done == first < self.end]
        of_slots = {self._taken.get((first, slot), slot) for slot in slots}
        return [(worker, first) for worker in sorted(of_slots) if not self.is_lost(worker)]

    def own(self, worker: int, clock: int) -> bool:
        """Assign a worker its task of a clock; return False if it is done or assigned elsewhere."""
        task = (clock, worker)
        taken = self._taken.get(task, worker)
        if self._is_done(*task) or (taken != worker and not self.is_lost(taken)):
            return False
        self._taken[task] = worker
        return True

    def help(self, worker: int, limit: int, *, is_through: bool) -> tuple[int, int] | None:
        """Assign a worker with no task in hand one of a clock up to `limit`; None if there is none.

        Tasks of live workers that nobody has taken are assigned only with asynchronous kinds, and
        only to a worker that has finished its slot (`is_through`). A task whose taker is lost, or
        asks for help itself, is assigned again, also if its slot's worker is live: that worker may
        have skipped it (see `own`), and the taker may have missed the answer or been restarted.
        """
        last = min(self.end - 1, limit)
        for slot in sorted(range(self.num_slots), key=lambda slot: self.done[slot]):
            is_left = self.is_lost(slot) or (self.is_asynchronous and is_through)
            is_open = is_left and slot != worker
            taken_here = (clock for clock, of_slot in self._taken if of_slot == slot)
            for clock in range(self.done[slot], last + 1) if is_open else sorted(taken_here):
                taken = self._taken.get((clock, slot))
                is_free = is_open if taken is None else taken == worker or self.is_lost(taken)
                if is_free and clock <= last and not self._is_done(clock, slot):
                    self._taken[clock, slot] = worker
                    return clock, slot
        return None

    def finish(self, clock: int, slot: int) -> None:
        """Record that a task is pushed."""
        self._ahead.add((clock, slot))
        while (self.done[slot], slot) in self._ahead:
            self._ahead.remove((self.done[slot], slot))
            self._taken.pop((self.done[slot], slot), None)
            self.done[slot] += 1

    @property
    def is_over(self) -> bool:
        """Whether all tasks are pushed."""
        return all(done >= self.end for done in self.done.values())

    def _is_done(self, clock: int, slot: int) -> bool:
        return clock < self.done[slot] or (clock, slot) in self._ahead
