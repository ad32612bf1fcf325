"""Tasks of a lost worker go to others; each is computed, and none by two who are there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.server.liveness import LEASE_S
from phalanx.server.message import WireMessage
from phalanx.server.secret import Secret
from phalanx.server.task_scheduler import Tasks, TaskScheduler


def test_a_lost_workers_task_is_given_to_one_that_waits() -> None:
    now = [0.0]
    tasks = Tasks(3, 0, 5, is_asynchronous=False, clock=lambda: now[0])
    for worker in range(3):
        tasks.leases.renew(worker)
        assert tasks.claim(worker, 0)
    for worker in (0, 1):
        tasks.finish(0, worker)
    assert tasks.help(0, 0, is_through=False) is None
    now[0] = LEASE_S + 1
    tasks.leases.renew(0)
    tasks.leases.renew(1)
    assert tasks.help(0, 0, is_through=False) == (0, 2)
    assert tasks.help(1, 0, is_through=False) is None
    tasks.leases.renew(2)  # it comes back, and finds its task taken
    assert not tasks.claim(2, 0)
    tasks.finish(0, 2)
    assert tasks.claim(2, 1) and tasks.num_live == 3


def test_workers_are_not_lost_while_the_scheduler_does_not_listen(
    tmp_path: Path, now_s: list[float]
) -> None:
    own = ("scheduler", Secret.new(), f"ipc://{tmp_path}/scheduler", lambda _: None)
    scheduler = TaskScheduler("job", f"ipc://{tmp_path}/coordinator", "1", *own)

    def num_live() -> int:
        """Return how many workers there are once worker 0 has asked."""
        scheduler.handle(b"", WireMessage("help", {**asks, "worker": 0}))
        assert scheduler.tasks is not None
        return scheduler.tasks.num_live

    asks = {"tasks": [2, 0, 5], "is_open": False, "limit": 0, "is_through": False}
    try:
        for worker in range(2):
            scheduler.handle(b"", WireMessage("claim", {**asks, "worker": worker, "clock": 0}))
        for _ in range(5):
            now_s[0] += 100 * LEASE_S
            assert num_live() == 2  # the other's word waits behind this one's
            scheduler.tick()
        while num_live() == 2:
            now_s[0] += 0.125
            scheduler.tick()
        assert scheduler.clock.now_s > LEASE_S
    finally:
        scheduler.close()


def test_a_scheduler_that_starts_again_assigns_the_tasks_of_a_worker_that_is_lost(
    tmp_path: Path, now_s: list[float]
) -> None:
    """The other groups leave these to it, as the map says."""
    own = ("scheduler0", Secret.new(), f"ipc://{tmp_path}/scheduler0", lambda _: None)
    scheduler = TaskScheduler("job", f"ipc://{tmp_path}/coordinator", "1", *own, group=0)
    scheduler.member.map["groups"] = [
        {"workers": workers, "num_live": 1, "scheduler": ""} for workers in ([0, 1], [2])
    ]
    asked = WireMessage("beat", {"tasks": [3, 0, 1], "is_open": False, "worker": 0})
    try:
        scheduler.handle(b"", asked)
        until_s = now_s[0] + 2 * LEASE_S
        while now_s[0] < until_s:
            now_s[0] += 0.125
            scheduler.tick()
        scheduler.handle(b"", asked)
        assert scheduler.tasks is not None
        assert scheduler.tasks.help(0, 0, is_through=False) == (0, 1)
        assert scheduler.tasks.elsewhere == {2}
    finally:
        scheduler.close()


def test_tasks_of_a_group_that_is_lost_are_spread_over_the_others(
    tmp_path: Path, now_s: list[float]
) -> None:
    """Of three groups; the coordinator's map is all that a scheduler knows of the others."""
    own = ("scheduler0", Secret.new(), f"ipc://{tmp_path}/scheduler0", lambda _: None)
    scheduler = TaskScheduler("job", f"ipc://{tmp_path}/coordinator", "1", *own, group=0)
    groups = [{"workers": [at, at + 3], "num_live": 2, "scheduler": ""} for at in range(3)]
    asks = {"tasks": [7, 0, 1], "is_open": False}

    def helped(beating: Sequence[int] = (0, 3)) -> list[int]:
        """Return the slots whose tasks are assigned to worker 0, which waits."""
        scheduler.member.map["groups"] = groups
        for worker in beating:
            scheduler.handle(b"", WireMessage("beat", {**asks, "worker": worker}))
        assert scheduler.tasks is not None
        found = list[int]()
        while (task := scheduler.tasks.help(0, 0, is_through=False)) is not None:
            scheduler.tasks.finish(*task)
            found.append(task[1])
        return found

    try:
        assert scheduler.facts()["group"]["live"] is None
        assert helped() == []  # nobody has heard of worker 6, which may come
        assert scheduler.facts()["group"] == {"number": 0, "live": [0, 3], "stop_signal": 0}
        until_s = now_s[0] + 2 * LEASE_S
        while now_s[0] < until_s:
            now_s[0] += 0.125
            scheduler.tick()
        assert helped() == [6]
        groups[1]["num_live"] = 0
        assert helped() == [4]  # the tasks of worker 1 go to group 2
        groups[2]["num_live"] = 0
        assert helped() == [1, 2, 5]
        groups[1] = {"workers": [1, 4, 3], "num_live": 1, "scheduler": ""}
        helped()
        assert scheduler.tasks is not None and scheduler.tasks.workers == {0, 3}
        scheduler.tasks.leases.leave(3)  # it was killed here, and started in group 1
        helped([0])
        assert scheduler.tasks.workers == {0} and 3 in scheduler.tasks.elsewhere
    finally:
        scheduler.close()


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=50, deadline=None)
def test_each_task_is_done_once_however_workers_come_and_go(seed: int, is_open: bool) -> None:
    rng, now = random.Random(seed), [0.0]
    tasks = Tasks(3, 0, 4, is_open, clock=lambda: now[0])
    clocks, done = [0] * 3, list[tuple[int, int]]()
    for _ in range(400):
        now[0] += 1.0
        worker = rng.randrange(3)
        if rng.random() < 0.1:
            continue  # it stalls, and may be held for lost
        tasks.leases.renew(worker)
        version = min(tasks.done.below.values())
        if clocks[worker] < 4 and (is_open or clocks[worker] <= version):
            task = (clocks[worker], worker) if tasks.claim(worker, clocks[worker]) else None
            clocks[worker] += 1
        else:
            through = clocks[worker] == 4
            task = tasks.help(worker, 99 if is_open else version, is_through=through)
        if task is not None:
            done.append(task)
            tasks.finish(*task)
    assert tasks.is_over
    assert sorted(done) == [(clock, slot) for clock in range(4) for slot in range(3)]


@given(st.integers(0, 2**32), st.booleans())
def test_every_task_is_computed_however_answers_and_workers_are_lost(
    seed: int, is_open: bool
) -> None:
    """Once the workers that are left beat and ask, every task that is not done is given to them.

    Before that, answers are lost, and workers fall silent, come back, are killed and restarted. A
    worker that is restarted has no task in hand, and begins at the first of its slot not done.
    """
    rng, now = random.Random(seed), [0.0]
    tasks = Tasks(3, 0, 4, is_open, clock=lambda: now[0])
    clocks, hands = [0] * 3, dict[int, tuple[int, int]]()

    def ask(worker: int) -> None:
        """Push the task in hand, or ask for one; the answer is lost sometimes."""
        tasks.leases.renew(worker)
        if worker in hands:
            tasks.finish(*hands.pop(worker))
            return
        clock, version = clocks[worker], min(tasks.done.below.values())
        is_own = clock < 4 and (is_open or clock <= version)
        if is_own:
            task = (clock, worker) if tasks.claim(worker, clock) else None
        else:
            limit = 99 if is_open else version
            task = tasks.help(worker, limit, is_through=clock == 4)
        assert not any(task == held and not tasks.is_lost(w) for w, held in hands.items())
        if rng.random() >= lost_share:
            clocks[worker] += is_own
            if task is not None:
                hands[worker] = task

    lost_share = 0.2
    for _ in range(rng.randrange(80)):
        now[0] += 1.0
        worker = rng.randrange(3)
        if rng.random() < 0.2:
            hands.pop(worker, None)
            clocks[worker] = tasks.done.below[worker]
        elif rng.random() < 0.8:
            ask(worker)
    lost_share = 0.0
    left = rng.sample(range(3), rng.randint(1, 3))
    for _ in range(3 * 4 * 4):
        now[0] += 1.0
        for worker in left:
            ask(worker)
    assert tasks.is_over


def test_a_task_that_its_helper_has_forgotten_is_given_again() -> None:
    """Worker 1 is back, and has skipped the task that it had lost to a helper."""
    for loses_answer in (True, False):
        now = [0.0]
        tasks = Tasks(3, 0, 5, is_asynchronous=False, clock=lambda now=now: now[0])
        for worker in (0, 2):
            assert tasks.claim(worker, 0)
            tasks.finish(0, worker)
        now[0] = LEASE_S + 1
        for worker in (0, 2):
            tasks.leases.renew(worker)
        assert tasks.help(0, 0, is_through=False) == (0, 1)
        tasks.leases.renew(1)
        assert not tasks.claim(1, 0)
        assert tasks.help(1, 0, is_through=False) is None
        if loses_answer:
            assert tasks.help(0, 0, is_through=False) == (0, 1)
            continue
        now[0] += LEASE_S + 1  # the helper is lost for good
        tasks.leases.renew(1)
        assert tasks.help(1, 0, is_through=False) == (0, 1)
        assert tasks.help(1, 0, is_through=False) == (0, 1)  # this answer was lost, too
        assert tasks.claim(1, 0)


def test_who_is_there_and_holds_others_up_is_known() -> None:
    now = [0.0]
    tasks = Tasks(3, 0, 2, is_asynchronous=False, clock=lambda: now[0])
    for worker in (0, 1):
        tasks.leases.renew(worker)
    tasks.finish(0, 0)
    assert tasks.late() == [(1, 0), (2, 0)]
    now[0] = LEASE_S + 1
    for worker in (0, 1):
        tasks.leases.renew(worker)
    assert tasks.late() == [(1, 0)]
    assert tasks.help(0, 0, is_through=False) == (0, 2)
    assert tasks.late() == [(0, 0), (1, 0)]
    for slot in range(3):
        for clock in range(2):
            tasks.finish(clock, slot)
    assert tasks.late() == []
