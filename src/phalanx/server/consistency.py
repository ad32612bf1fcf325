"""How far apart workers may be, and when an update is due: the consistency of a job.

A clock is an iteration (Ho et al.'s word). Task (clock, slot) is the minibatch that worker `slot`
of the job computes a gradient of in iteration `clock`; another worker may compute it in its place.
Version v of the weights has v updates.

    ps        task c of a worker needs version c; update c is the sum of all tasks of clock c
    ssp/S     the same, but task c needs version c - S: nobody is more than S clocks ahead of the
              slowest (Ho et al., More effective distributed ML via a stale synchronous parallel
              parameter server, 2013; that an update is whole is Li et al.'s bounded delay, 2014).
              S = 0 is `ps`.
    async     no worker waits; each task is an update
    quorum/K  an update is K tasks, and those that come within a grace time; a worker waits until
              its own is in one
    local/H   as ps, of the difference that H steps of a worker's own make
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = ("async", "quorum")
"""The asynchronous kinds: an update is not tied to an iteration, but takes the gradients that have
come."""


@dataclass(frozen=True)
class Consistency:
    """The consistency of a job.

    Attributes:
        kind: of `dp` in the strategy.
        num_slots: tasks of a clock.
        option: S, K or H.
        grace_s: how long an update that has its quorum waits for more, in seconds.
    """

    kind: str
    num_slots: int
    option: int = 0
    grace_s: float = 0.0

    @classmethod
    def of(cls, fields: Any) -> Consistency:
        """Read what `vars` gives of one."""
        return cls(**fields)

    @property
    def is_open(self) -> bool:
        """Whether the kind is asynchronous: no update is tied to an iteration."""
        return self.kind in OPEN

    @property
    def staleness(self) -> int:
        """By how many versions a task's weights may be older than its clock."""
        return self.option if self.kind == "ssp" else 0

    @property
    def num_local_steps(self) -> int:
        """Steps that a worker takes for a task."""
        return self.option if self.kind == "local" else 1

    def needs(self, clock: int) -> int:
        """Return the version that the weights of a task of `clock` have at least."""
        return 0 if self.is_open else max(0, clock - self.staleness)

    def is_due(self, num_tasks: int, waited_s: float, num_workers: int) -> bool:
        """Return whether tasks that wait are an update; the first of a quorum came `waited_s` ago.

        Of a clock all tasks are needed, whoever computes them.
        """
        if not self.is_open:
            return num_tasks == self.num_slots
        quorum = 1 if self.kind == "async" else min(self.option, max(1, num_workers))
        return num_tasks >= self.num_slots or (num_tasks >= quorum and waited_s >= self.grace_s)
