"""The consistency model of a job: how stale weights may be, and when an update is applied.

A clock is an iteration (Ho et al.'s term). Task (clock, slot) is the gradient of the minibatch that
worker `slot` of the job processes in iteration `clock`; another worker may compute it instead.
Version v of the weights has v updates.

    ps        task c of a worker needs version c; update c is the sum of all tasks of clock c
    ssp/S     as ps, but task c needs version c - S: no worker is more than S clocks ahead of the
              slowest (Ho et al., More effective distributed ML via a stale synchronous parallel
              parameter server, 2013; an update has all tasks of its clock, as in the bounded delay
              of Li et al., 2014). S = 0 is `ps`.
    async     no worker waits; each task is an update
    quorum/K  an update is at least K tasks, and more that arrive within a grace time; a worker
              waits until its task is applied
    local/H   as ps, but a task is the change of the weights by H local steps of a worker
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ASYNCHRONOUS: Final = ("async", "quorum")
"""The asynchronous kinds: an update takes the gradients that have arrived, of any iteration."""


class DoneTasks:
    """The tasks that are done, each once, in whatever order they end.

    Attributes:
        below: slot -> clock below which all its tasks are done.
        ahead: (clock, slot) of tasks that are done while an earlier one of their slot is not.
    """

    def __init__(self, num_slots: int, begin: int) -> None:
        """Start with the tasks of all clocks below `begin`."""
        self.below = dict.fromkeys(range(num_slots), begin)
        self.ahead = set[tuple[int, int]]()

    def has(self, clock: int, slot: int) -> bool:
        """Return whether a task is done."""
        return clock < self.below[slot] or (clock, slot) in self.ahead

    def add(self, clock: int, slot: int) -> None:
        """Record that a task is done, which may have been recorded before."""
        # Tasks of a slot may end in any order; `below` moves over each run without a gap:
        #
        #     add 0     below 1    ahead {}
        #     add 2     below 1    ahead {2}       1 is not done
        #     add 1     below 3    ahead {}        1, then 2, which waited in `ahead`
        #
        # So the state is small however long the run is: `ahead` has only the tasks out of order.
        if not self.has(clock, slot):
            self.ahead.add((clock, slot))
        while (self.below[slot], slot) in self.ahead:
            self.ahead.remove((self.below[slot], slot))
            self.below[slot] += 1


@dataclass(frozen=True)
class Consistency:
    """The consistency model of a job.

    Attributes:
        kind: kind of `dp` in the strategy.
        num_slots: number of tasks per clock.
        option: S, K or H.
        grace_s: time an update that has its quorum waits for more tasks, in seconds.
    """

    kind: str
    num_slots: int
    option: int = 0
    grace_s: float = 0.0

    @property
    def is_asynchronous(self) -> bool:
        """Whether the kind is asynchronous: no update is tied to an iteration."""
        return self.kind in ASYNCHRONOUS

    @property
    def staleness(self) -> int:
        """Number of versions by which a task's weights may be older than its clock."""
        return self.option if self.kind == "ssp" else 0

    @property
    def num_local_steps(self) -> int:
        """Number of local steps of a worker per task."""
        return self.option if self.kind == "local" else 1

    def needs(self, clock: int) -> int:
        """Return the minimum version of the weights for a task of `clock`."""
        return 0 if self.is_asynchronous else max(0, clock - self.staleness)

    def is_due(self, num_tasks: int, waited_s: float, num_workers: int) -> bool:
        """Return whether `num_tasks` pushed tasks, the first `waited_s` ago, complete an update.

        An update that belongs to a clock needs all tasks of the clock, whichever workers are live.
        """
        if not self.is_asynchronous:
            return num_tasks == self.num_slots
        if self.kind == "async" or num_tasks >= self.num_slots:
            return num_tasks > 0
        return num_tasks >= min(self.option, max(1, num_workers)) and waited_s >= self.grace_s
