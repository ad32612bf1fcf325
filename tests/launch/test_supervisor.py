"""A rank that stands still is named with where it stands, and ends the job with the timeout."""

import ctypes
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from marks import by_hand
from phalanx.errors import Interrupted, RankFailed, TrainingError
from phalanx.launch import heartbeat_monitor, local
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import PULSE, Beat
from phalanx.launch.local import Supervisor, run_ranks
from phalanx.launch.pipe import RankPipe

pytestmark = pytest.mark.fresh_ranks


def stop_rank(stopped: int) -> None:
    with PULSE.doing("forward of step 7"):
        if dist.get_rank() == stopped:
            time.sleep(1.5)  # a beat
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_at_once_and_ends_the_job(
    stopped: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_monitor, "STOPPED_S", 0.0)  # at the first look after it
    with pytest.raises(TrainingError) as caught:
        run_ranks(stop_rank, 2, stopped, timeout_s=4)
    words = rf"rank {stopped} on .* \(process \d+\) has been stopped by a signal for \d+ s "
    caught.match(words)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and "continues it" in told[0]
    assert f"rank {stopped} on {socket.gethostname()} (process" in told[0]


def test_a_signal_meets_ranks_as_they_are_and_not_as_they_were() -> None:
    """Those that began their steps while the parent had no time to listen will heed it."""
    ours, theirs = Pipe()
    store = dist.HashStore()
    for beat in (Beat(), Beat(), Beat(handles_stop=True)):
        Feed(store, 0).send(beat)
    process: Any = SimpleNamespace(pid=os.getpid(), sentinel=os.pipe()[0])
    supervisor = Supervisor([(process, RankPipe(ours))], [signal.SIGTERM], store, 100.0)
    with ThreadPoolExecutor() as parent:
        result = parent.submit(supervisor.watch)
        while not theirs.poll(0.1):
            assert not result.done(), result.exception()
        assert theirs.recv() == signal.SIGTERM
        theirs.send(("result", 7))
        assert result.result() == [7]
    supervisor.raise_unheeded([])
    with pytest.raises(Interrupted, match=r"^interrupted$"):
        supervisor.raise_unheeded([signal.SIGINT])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_has_sent_half_a_message_keeps_its_parent_from_nothing(is_killed: bool) -> None:
    """A signal ends the job of one that was stopped; one that was killed has failed."""
    ours, theirs = Pipe()
    os.write(theirs.fileno(), b"\0\0\1\0 a message")
    signals = [] if is_killed else [signal.SIGTERM]
    process: Any = SimpleNamespace(
        pid=os.getpid(), sentinel=os.pipe()[0], exitcode=-signal.SIGKILL, join=lambda _: None
    )
    if is_killed:
        theirs.close()
    with pytest.raises(RankFailed if is_killed else Interrupted, match=r"SIG(KILL|TERM)"):
        Supervisor([(process, RankPipe(ours))], signals, dist.HashStore(), 100.0).watch()


def wait_for_a_sleeper() -> None:
    with PULSE.doing("data of step 3"):
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.all_reduce(torch.zeros(1))


@pytest.mark.slow
def test_the_timeout_says_where_each_rank_stands(capfd: pytest.CaptureFixture[str]) -> None:
    """It pins the words by which gloo says that a rank did not come."""
    with pytest.raises(TrainingError) as caught:
        run_ranks(wait_for_a_sleeper, 2, timeout_s=4)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("rank 0 has waited in vain for another rank")
    assert "  rank 1: data of step 3" in lines
    assert any("in wait_for_a_sleeper" in line for line in lines)
    assert "Traceback (most recent call last):" in lines and "gloo" in lines[-1]
    assert capfd.readouterr().err == ""


def test_a_rank_that_never_sends_a_heartbeat_is_named() -> None:
    ours, theirs = Pipe()
    process: Any = SimpleNamespace(pid=os.getpid(), sentinel=os.pipe()[0])
    supervisor = Supervisor([(process, RankPipe(ours))], [], dist.HashStore(), 1.0)
    with ThreadPoolExecutor() as parent:
        result = parent.submit(supervisor.watch)
        wait([result], timeout=30)
        theirs.send(("result", 7))  # else a parent that watches no lease would wait for ever
        with pytest.raises(TrainingError, match=rf"rank 0 .*process {os.getpid()}.* no heartbeat"):
            result.result()


def hold_the_lock() -> None:
    if dist.get_rank() == 1:
        while True:
            ctypes.PyDLL(None).pause()  # no other thread of this rank runs
    dist.all_reduce(torch.zeros(1))


def test_a_rank_that_does_not_answer_is_named() -> None:
    with pytest.raises(TrainingError, match=r"rank 1 on .* \(process \d+\) has sent no heartbeat"):
        run_ranks(hold_the_lock, 2, timeout_s=4)


def begin_late() -> None:
    time.sleep(1.5)  # a beat


@pytest.mark.parametrize(("limit_s", "num_said"), [(-1.0, 1), by_hand(1000.0, 0)])
def test_ranks_that_take_long_to_begin_are_announced_once(
    limit_s: float, num_said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STARTING_S", limit_s)
    said: list[int] = []
    run_ranks(begin_late, 1, say_starting=lambda: said.append(1), threads=1)
    assert len(said) == num_said
