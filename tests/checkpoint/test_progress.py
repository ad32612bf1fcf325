"""How long the ranks of a save pause between two looks at each other."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.checkpoint import progress
from phalanx.checkpoint.progress import POLL_S, SaveProgress


class Clock:
    """A clock that only sleeping moves."""

    now_s = 100.0
    pauses_s: tuple[float, ...] = ()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses_s += (pause_s,)


class Waiting(SaveProgress):
    """What a rank knows of a save that ends at an instant of the clock."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        self._poll_s, self._number = POLL_S, 1
        self._clock, self._end_s = clock, clock.now_s + end_s

    def look(self, number: int) -> list[Any]:
        return [[int(self._clock.now_s >= self._end_s)]]


@pytest.mark.parametrize("wait_s", [0.0, 0.004, 0.1, 2.0])
def test_a_wait_is_no_tenth_longer_for_the_pauses(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    Waiting(clock, wait_s).wait_to_begin(1)
    late_s = clock.now_s - 100 - wait_s
    assert -1e-9 < late_s <= 0.1 * wait_s + 0.001
    assert max(clock.pauses_s, default=0) <= POLL_S


def test_a_long_wait_looks_at_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    Waiting(clock, 10.0).wait_to_begin(1)
    assert clock.pauses_s[-1] == POLL_S
    assert len(clock.pauses_s) < 10 / POLL_S + 60
