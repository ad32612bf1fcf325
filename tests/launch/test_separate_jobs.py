"""Jobs of one process each, and what serves them."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from phalanx.errors import RankFailed, TrainingError
from phalanx.launch import heartbeat_monitor, local
from phalanx.launch.heartbeat import PULSE, Beat
from phalanx.launch.heartbeat_monitor import HeartbeatMonitor
from phalanx.launch.local import Work, run_supervised

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


def stop_by_the_second_process(folder: Path) -> int:
    """Wait for a request to stop; the first process is killed when it has one."""
    with PULSE.handling_stop():
        is_first = not (folder / "begun").exists()
        (folder / "begun").touch()
        while not PULSE.stop_signal:
            time.sleep(0.01)
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return PULSE.stop_signal


def test_a_process_that_replaces_one_is_asked_to_stop_as_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = HeartbeatMonitor.record

    def hear_and_stop(self: HeartbeatMonitor, rank: int, beat: Beat) -> None:
        hear(self, rank, beat)
        if self.handles_stop() and not is_asked:
            is_asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    is_asked: list[bool] = []
    monkeypatch.setattr(HeartbeatMonitor, "record", hear_and_stop)
    works: list[Work] = [("worker 0", stop_by_the_second_process, (tmp_path,))]
    assert run_supervised(works, max_restarts=1) == [signal.SIGTERM]


def test_a_process_that_fails_is_called_by_its_name() -> None:
    with pytest.raises(RankFailed, match=r"^worker 1 failed first:\n(.*\n)*RuntimeError: no more$"):
        run_supervised([("worker 0", stand, ()), ("worker 1", fail, ())])
