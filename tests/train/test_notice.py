"""What a run says while it works for long: above its bar, and without calling it a hang."""

from __future__ import annotations

import io
import time

import pytest
import torch.distributed as dist

from phalanx.launch.heartbeat import PULSE
from phalanx.measure.logs import LiveDisplay
from phalanx.report.terminal import Terminal
from phalanx.train import notice


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def test_a_notice_stands_above_the_bar_and_not_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "PATIENCE_S", 0.0)
    file = io.StringIO()
    display = LiveDisplay(Terminal(file, is_terminal=True, width=80), 5)
    with notice.notice_if_slow("the model writes a sample"):
        while "sample" not in file.getvalue():
            time.sleep(0.01)
    display.close()
    before, _, after = file.getvalue().partition("the model writes a sample ...")
    assert before.endswith("\x1b[2K"), "the bar is erased first"
    assert after.startswith("\n")


def test_ranks_that_compile_are_not_taken_for_a_hang() -> None:
    for is_asked in (True, False):
        with notice.compiling(is_asked):
            assert PULSE.beat().waits == is_asked
        assert not PULSE.beat().waits
