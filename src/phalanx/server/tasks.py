"""Who computes which samples: a lost worker's tasks go to others, each is pushed once.

A slot's own worker takes its tasks, one for each clock. Where it is not heard of for `LEASE_S`, or
has left, whoever waits takes them. Where no worker waits for another (the asynchronous kinds), one
that has finished its own slot helps the slot that is furthest behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

LEASE_S: Final = 3.0
"""How long a worker or a server may be silent before it is held for lost, in seconds for which the
other side has listened."""

_LEFT: Final = float("-inf")


@dataclass
class Tasks:
    """The tasks of a worker group.

    Attributes:
        num_slots: workers, and tasks of a clock.
        begin: first clock; `end` follows the last.
        is_open: whether the consistency is asynchronous, see `Consistency.is_open`.
        clock: returns the seconds for which the scheduler has listened.
        done: clocks below which a slot has nothing left, by slot.
    """

    num_slots: int
    begin: int
    end: int
    is_open: bool
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
        """Note that a worker is there."""
        self._heard_s[worker] = self.clock()

    def beat(self, worker: int) -> None:
        """Note that a worker is there that has not said that it leaves."""
        if self._heard_s.get(worker) != _LEFT:
            self.hear(worker)

    def leave(self, worker: int) -> None:
        """Note that a worker has gone."""
        self._heard_s[worker] = _LEFT

    def is_lost(self, worker: int) -> bool:
        """Return whether a worker has gone, or has not been heard of for too long."""
        return self.clock() - self._heard_s.get(worker, self._start_s) > LEASE_S

    @property
    def num_live(self) -> int:
        """Workers that are there."""
        return sum(not self.is_lost(worker) for worker in range(self.num_slots))

    def late(self) -> list[tuple[int, int]]:
        """Return whose tasks others wait for though they are there, and the clock of each."""
        first = min(self.done.values())
        slots = [slot for slot, done in self.done.items() if done == first < self.end]
        of_slots = {self._taken.get((first, slot), slot) for slot in slots}
        return [(worker, first) for worker in sorted(of_slots) if not self.is_lost(worker)]

    def own(self, worker: int, clock: int) -> bool:
        """Return whether a worker is to compute its task of a clock; if so it is taken."""
        task = (clock, worker)
        taken = self._taken.get(task, worker)
        if self._is_done(*task) or (taken != worker and not self.is_lost(taken)):
            return False
        self._taken[task] = worker
        return True

    def help(self, worker: int, limit: int, *, is_through: bool) -> tuple[int, int] | None:
        """Return a task of another that a worker is to compute, of a clock up to `limit`.

        One that `is_through` its own slot also helps those who are there, where no worker waits.
        """
        order = sorted(range(self.num_slots), key=lambda slot: self.done[slot])
        for slot in order:
            if slot == worker or not (self.is_lost(slot) or (self.is_open and is_through)):
                continue
            last = min(self.end - 1, limit)
            for clock in range(self.done[slot], last + 1):
                taken = self._taken.get((clock, slot))
                is_free = taken is None or self.is_lost(taken) or taken == worker
                if is_free and not self._is_done(clock, slot):
                    self._taken[clock, slot] = worker
                    return clock, slot
        return None

    def finish(self, clock: int, slot: int) -> None:
        """Note that a task is pushed."""
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
