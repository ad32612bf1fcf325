"""Jobs of one process each, and what serves them."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from phalanx.errors import RankFailed, TrainingError
from phalanx.launch import heartbeat_monitor, local
from phalanx.launch.separate_jobs import run_supervised

pytestmark = pytest.mark.fresh_ranks


def give(value: int) -> int:
    return value


def stand() -> None:
    while True:
        time.sleep(1)


def stop() -> None:
    time.sleep(1.5)  # a beat
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("no more")


def test_what_serves_others_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LEAVING_S", 0.1)
    assert run_supervised([("a", give, (3,)), ("b", give, (4,))], [("c", stand, ())]) == [3, 4]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_stopped_process_is_called_by_its_name(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "STOPPED_S", 0.0)  # at the first look after it
    said = rf"worker 2 on {socket.gethostname()} \(process \d+\) has been stopped by a signal"
    with pytest.raises(TrainingError, match=said):
        run_supervised([("worker 2", stop, ())], timeout_s=4)
    assert capfd.readouterr().err.startswith("phalanx: worker 2 on ")


def test_a_process_that_fails_is_called_by_its_name() -> None:
    with pytest.raises(RankFailed, match=r"^worker 1 failed first:\n(.*\n)*RuntimeError: no more$"):
        run_supervised([("worker 0", stand, ()), ("worker 1", fail, ())])
