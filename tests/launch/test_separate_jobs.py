"""Jobs of one process each, and what serves them."""

import time

import pytest

from phalanx.launch import local
from phalanx.launch.separate_jobs import run_supervised

pytestmark = pytest.mark.fresh_ranks


def give(value: int) -> int:
    return value


def stand() -> None:
    while True:
        time.sleep(1)


def test_what_serves_others_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LEAVING_S", 0.1)
    assert run_supervised([(give, (3,)), (give, (4,))], [(stand, ())]) == [3, 4]
