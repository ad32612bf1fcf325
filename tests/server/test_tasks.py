"""Tasks of a lost worker go to others; each is computed, and none by two who are there."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.server.tasks import LEASE_S, Tasks


def test_a_lost_workers_task_is_given_to_one_that_waits() -> None:
    now = [0.0]
    tasks = Tasks(3, 0, 5, is_open=False, clock=lambda: now[0])
    for worker in range(3):
        tasks.hear(worker)
        assert tasks.own(worker, 0)
    for worker in (0, 1):
        tasks.finish(0, worker)
    assert tasks.help(0, 0, is_through=False) is None
    now[0] = LEASE_S + 1
    tasks.hear(0)
    tasks.hear(1)
    assert tasks.help(0, 0, is_through=False) == (0, 2)
    assert tasks.help(1, 0, is_through=False) is None
    tasks.hear(2)  # it comes back, and finds its task taken
    assert not tasks.own(2, 0)
    tasks.finish(0, 2)
    assert tasks.own(2, 1) and tasks.num_live == 3


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
        tasks.hear(worker)
        version = min(tasks.done.values())
        if clocks[worker] < 4 and (is_open or clocks[worker] <= version):
            task = (clocks[worker], worker) if tasks.own(worker, clocks[worker]) else None
            clocks[worker] += 1
        else:
            through = clocks[worker] == 4
            task = tasks.help(worker, 99 if is_open else version, is_through=through)
        if task is not None:
            done.append(task)
            tasks.finish(*task)
    assert tasks.is_over
    assert sorted(done) == [(clock, slot) for clock in range(4) for slot in range(3)]
