"""The scheduler of a worker group: it assigns tasks to workers, and tracks who computes them.

Each worker computes the tasks of its slot, one per clock: its samples of the step. If the lease of
a worker is over, or it has left, workers of its group that wait compute its tasks. With the
asynchronous kinds, where no worker waits for others, a worker that has finished its slot helps the
slot of its group that is furthest behind.

A job of two groups, whose schedulers know of each other only what the coordinator's map says:

    slot                          0   1   2   3
    group of its worker           0   0   1   1
    assigned by, both live        0   0   1   1
    assigned by, 1 lost           0   0   0   0     no worker of 1, or its scheduler, beats
    assigned by, 1 back           0   0   1   1     a task that both compute is pushed once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from phalanx.launch.lease import Leases
from phalanx.server.consistency import DoneTasks
from phalanx.server.liveness import LEASE_S
from phalanx.server.message import WireMessage, answer
from phalanx.server.message_table import PROTOCOL
from phalanx.server.role import Membership, Role, Settings
from phalanx.server.secret import Secret
from phalanx.server.wire import Log


@dataclass
class Tasks:
    """The tasks of a worker group.

    Attributes:
        num_slots: number of workers, which is the number of tasks per clock.
        begin: first clock.
        end: clock after the last.
        is_asynchronous: whether the consistency is asynchronous, see `Consistency.is_asynchronous`.
        clock: function that returns the seconds for which the scheduler has listened.
        workers: workers that have asked for tasks here.
        elsewhere: slots whose tasks the schedulers of other groups assign.
    """

    num_slots: int
    begin: int
    end: int
    is_asynchronous: bool
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.done = DoneTasks(self.num_slots, self.begin)
        self.leases = Leases(self.clock, range(self.num_slots))
        self.workers, self.elsewhere = set[int](), set[int]()
        self._taken: dict[tuple[int, int], int] = {}  # task -> worker to which it is assigned

    def is_lost(self, worker: int) -> bool:
        """Return whether a worker has left, or its lease is over."""
        return self.leases.age_s(worker) > LEASE_S

    @property
    def num_live(self) -> int:
        """Number of live workers that are not of other groups."""
        slots = set(range(self.num_slots)) - self.elsewhere
        return sum(not self.is_lost(worker) for worker in slots)

    def late(self) -> list[tuple[int, int]]:
        """Return (worker, clock) of live workers that have not pushed tasks of the oldest clock."""
        first = min(self.done.below.values())
        slots = [slot for slot, below in self.done.below.items() if below == first < self.end]
        of_slots = {self._taken.get((first, slot), slot) for slot in slots}
        live = self.elsewhere.union(each for each in of_slots if not self.is_lost(each))
        return [(worker, first) for worker in sorted(of_slots & live)]

    def claim(self, worker: int, clock: int) -> bool:
        """Assign a worker its task of a clock; return False if it is done or assigned elsewhere."""
        task = (clock, worker)
        taken = self._taken.get(task, worker)
        if self.done.has(*task) or (taken != worker and not self.is_lost(taken)):
            return False
        self._taken[task] = worker
        return True

    def help(self, worker: int, limit: int, *, is_through: bool) -> tuple[int, int] | None:
        """Assign a worker with no task in hand one of a clock up to `limit`; None if there is none.

        Tasks of live workers that nobody has taken are assigned only with asynchronous kinds, and
        only to a worker that has finished its slot (`is_through`). A task whose taker is lost, or
        asks for help itself, is assigned again, also if its slot's worker is live: that worker may
        have skipped it (see `claim`), and the taker may have missed the answer or been restarted.
        """
        # The slot that is furthest behind comes first. For each of its clocks, who may get the
        # task:
        #
        #     slot's worker    task taken by    assigned to the asking worker
        #     live             nobody           no; if asynchronous, to one that is through
        #     lost             nobody           yes
        #     any              itself           yes: it was restarted, or missed the answer
        #     any              a lost worker    yes
        #     any              a live worker    no
        last = min(self.end - 1, limit)
        for slot, first in sorted(self.done.below.items(), key=lambda item: item[::-1]):
            is_left = self.is_lost(slot) or (self.is_asynchronous and is_through)
            is_open = is_left and slot != worker and slot not in self.elsewhere
            taken_here = (clock for clock, of_slot in self._taken if of_slot == slot)
            for clock in range(first, last + 1) if is_open else sorted(taken_here):
                taken = self._taken.get((clock, slot))
                is_free = is_open if taken is None else taken == worker or self.is_lost(taken)
                if is_free and clock <= last and not self.done.has(clock, slot):
                    self._taken[clock, slot] = worker
                    return clock, slot
        return None

    def finish(self, clock: int, slot: int) -> None:
        """Record that a task is pushed."""
        self.done.add(clock, slot)
        self._taken.pop((clock, slot), None)

    @property
    def is_over(self) -> bool:
        """Whether all tasks are pushed."""
        return all(below >= self.end for below in self.done.below.values())


class TaskScheduler(Role):
    """The role that answers workers' requests for tasks.

    It stores nothing on disk: after a restart it learns the range of tasks from the first request,
    and the finished tasks from workers, which report what servers have with each request.

    Attributes:
        group: number of its worker group.
        tasks: the tasks of the workers; None before the first request.
    """

    kind = "scheduler"

    def __init__(
        self, job: str, coordinator: str, incarnation: str, name: str, secret: Secret, address: str,
        log: Log, group: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(name, secret, address, log)
        self._constant: Settings = {"job": job, "protocol": PROTOCOL}
        self.member = Membership(self, coordinator, incarnation, self.facts)
        self.group = group
        self.tasks: Tasks | None = None
        self._stop_signal = 0  # signal by which worker 0 ended the job, or 0

    def facts(self) -> Settings:
        """Return the fields that the scheduler adds to its heartbeats."""
        live = [] if self.clock.now_s > LEASE_S else None  # by then its workers would have asked
        if (tasks := self.tasks) is not None:
            live = sorted(each for each in tasks.workers if not tasks.is_lost(each))
        group = {"number": self.group, "live": live, "stop_signal": self._stop_signal}
        return {**self._constant, "group": group}

    @override
    def handle(self, peer: bytes, message: WireMessage) -> None:
        """Note who asks and what all servers have, and answer."""
        method, worker = self.dispatch.method(message), int(message["worker"])
        if self.tasks is None:
            size, begin, end = message["tasks"]
            is_open = bool(message["is_open"])
            self.tasks = Tasks(size, begin, end, is_open, lambda: self.clock.now_s)
        tasks, groups = self.tasks, self.member.map.get("groups", [])
        tasks.workers.add(worker)
        if message.kind not in ("beat", "stats"):  # a worker that has left may beat and ask
            tasks.leases.renew(worker)
        # A slot belongs to the group of its worker; slots of groups without a live worker, and of
        # workers that no group has heard of, are spread over the live groups.
        others = [(at, each) for at, each in enumerate(groups) if at != self.group]
        live = sorted({self.group, *(at for at, each in others if each["num_live"])})
        group_of = {slot: live[slot % len(live)] for slot in range(tasks.num_slots)}
        if groups:  # this scheduler may have started again, and a worker of its group be lost
            group_of |= dict.fromkeys(groups[self.group]["workers"], self.group)
        for at, each in others:
            for slot in each["workers"]:
                if slot not in tasks.workers or tasks.is_lost(slot):  # else it has just come here
                    tasks.workers.discard(slot)
                    tasks.leases.leave(slot)  # another scheduler has its lease
                    group_of[slot] = at if at in live else group_of[slot]
        group_of |= dict.fromkeys(tasks.workers, self.group)
        tasks.elsewhere = {slot for slot, group in group_of.items() if group != self.group}
        for slot, below in message.fields.get("done", ()):
            for clock in range(tasks.done.below[slot], below):
                tasks.finish(clock, slot)
        more = method(tasks, worker, message)
        num_live = tasks.num_live + sum(each["num_live"] for _, each in others)
        signum = self._stop_signal or self.member.map.get("stop_signal", 0)
        more |= {"is_over": tasks.is_over, "num_live": num_live, "stop_signal": signum}
        self.reply(peer, message, answer("ok", **more))

    @override
    def tick(self) -> None:
        super().tick()
        self.member.tick()

    # Requests of workers. A method returns the fields of the answer that others lack.

    def on_beat(self, tasks: Tasks, worker: int, _: WireMessage) -> dict[str, Any]:
        """Renew the lease of a worker that has not left."""
        if not tasks.leases.has_left(worker):
            tasks.leases.renew(worker)
        return {}

    def on_claim(self, tasks: Tasks, worker: int, message: WireMessage) -> dict[str, Any]:
        """Assign a worker its own task, unless another computes it."""
        return {"is_mine": tasks.claim(worker, int(message["clock"]))}

    def on_help(self, tasks: Tasks, worker: int, message: WireMessage) -> dict[str, Any]:
        """Assign a worker a task of another, if one is left."""
        is_through = bool(message["is_through"])
        return {"task": tasks.help(worker, int(message["limit"]), is_through=is_through)}

    def on_finish(self, tasks: Tasks, _: int, message: WireMessage) -> dict[str, Any]:
        """Record that a task is pushed."""
        tasks.finish(int(message["clock"]), int(message["slot"]))
        return {}

    def on_stats(self, tasks: Tasks, _: int, __: WireMessage) -> dict[str, Any]:
        """Return the live workers that others wait for."""
        return {"late": tasks.late()}

    def on_leave(self, tasks: Tasks, worker: int, _: WireMessage) -> dict[str, Any]:
        """Record that a worker takes no more steps."""
        tasks.leases.leave(worker)
        return {}

    def on_stop(self, tasks: Tasks, worker: int, message: WireMessage) -> dict[str, Any]:
        """Record the signal by which worker 0 ends the job."""
        self._stop_signal = int(message["signum"])
        return self.on_leave(tasks, worker, message)
