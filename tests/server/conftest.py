"""Roles in threads of this process keep time ten times as fast: what they do is the same."""

from __future__ import annotations

import pytest

from phalanx.server import coordinator, replica, requests, role, task_scheduler, tasks, wire

CLOCKS = {"HELLO_S": 0.05, "AGAIN_S": 0.05, "LONGEST_AGAIN_S": 0.4, "BEAT_S": 0.05, "TICK_S": 0.01}
"""Seconds of constants of the modules of a job."""


@pytest.fixture
def fast_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have roles and workers ask again, beat and look up ten times as often."""
    for module in (coordinator, replica, requests, role, task_scheduler, tasks, wire):
        for name, seconds in CLOCKS.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, seconds)
