"""Who holds the others up, from beats alone."""

import pytest

from phalanx.launch.heartbeat import Beat
from phalanx.launch.heartbeat_monitor import (
    PATIENCE,
    SLEPT_S,
    STILL_S,
    HeartbeatMonitor,
    named,
)
from phalanx.launch.lease import Leases, ListeningClock


def test_ranks_that_stand_still_are_told_once() -> None:
    monitor = HeartbeatMonitor(600.0)
    waits = Beat(doing="backward of step 5", place="data.py:3 in wait", is_stepping=True)

    def stall(still_s: float, is_stepping: bool = True) -> str | None:
        for rank in (0, 2, 3):
            monitor.record(
                rank,
                Beat(**{**vars(waits), "seconds_at_place": still_s, "is_stepping": is_stepping}),
            )
        monitor.record(1, Beat(doing="data of step 5", is_stepping=is_stepping))
        return monitor.stall()

    assert stall(STILL_S - 1) is None
    assert (told := stall(STILL_S + 1)) is not None
    assert told.splitlines()[:-1] == [
        "ranks 0, 2, 3 at the same place in the code for 21 s:",
        "  ranks 0, 2, 3: backward of step 5",
        "    for 21 s at data.py:3 in wait",
        "  rank 1: data of step 5",
    ]
    assert "phalanx train and verify --debug-comm" in told
    assert stall(STILL_S + 5) is None
    assert stall(0) is None
    assert stall(STILL_S + 5) is None  # steps of this job are slow
    assert stall(3 * STILL_S) is not None
    assert stall(0) is None
    # While it is set up, one rank may read for long and the others wait.
    assert stall(PATIENCE * STILL_S + 1, is_stepping=False) is None


def test_who_waits_as_long_as_it_takes_is_not_told_and_whom_it_waits_for_is() -> None:
    monitor = HeartbeatMonitor(600.0)
    waits = Beat(doing="waiting", seconds_at_place=PATIENCE * STILL_S + 1, place="a", waits=True)
    monitor.record(1, waits)
    monitor.record(0, Beat(doing="preparing"))
    assert monitor.stall() is None
    monitor.record(0, Beat(doing="preparing", seconds_at_place=PATIENCE * STILL_S + 1, place="b"))
    assert (told := monitor.stall()) is not None
    assert told.startswith("rank 0 at the same place in the code for 101 s:\n")


def test_silence_is_measured_by_the_clock_that_is_handed_in() -> None:
    clock = ListeningClock(SLEPT_S)
    monitor = HeartbeatMonitor(600.0, clock=clock)
    for rank in range(3):
        monitor.record(rank, Beat())
    clock.now_s = 9.0
    monitor.record(1, Beat())
    assert monitor.silent(8.0) == [0, 2]
    assert monitor.silent(8.0, [1, 2]) == [2]
    monitor.leave(2)
    clock.now_s = 30.0
    assert monitor.silent(8.0) == [0, 1]


def test_a_clock_counts_only_the_time_of_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("phalanx.launch.lease.time.monotonic", lambda: now[0])
    clock = ListeningClock(5.0)
    leases = Leases[str](lambda: clock.now_s)
    for now[0], member in ((101.0, "a"), (4000.0, "b"), (4003.0, "c")):
        clock.tick()  # it was stopped for more than an hour
        leases.renew(member)
    assert [leases.age_s(member) for member in "abc"] == [8.0, 3.0, 0.0]
    assert leases.older(2.0) == ["a", "b"]
    leases.forget("a")
    assert leases.older(2.0, "ac") == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0, 2"),
        (list(range(99)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 91 more"),
    ],
)
def test_many_ranks_are_not_all_named(ranks: list[int], words: str) -> None:
    assert named(ranks) == words
