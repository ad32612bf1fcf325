"""Several hosts, as network namespaces: they find each other, and name one that is cut off."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from namespaces import HOSTS, ip
from phalanx.errors import ConfigError, TrainingError
from phalanx.launch import watch
from phalanx.launch.failure import PeerFailed
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import Beat
from phalanx.launch.heartbeat_monitor import SILENT_S, HeartbeatMonitor
from phalanx.launch.interface import address_towards, interface_of
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.watch import Watch

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.torchrun import leave, leave_failed, run_here

def work(_):
    PULSE.advice = lambda: "the last checkpoint"
    dist.all_reduce(torch.zeros(1))
    Path(sys.argv[1], f"rank-{os.environ['RANK']}").touch()
    # As for the writer of a checkpoint: no timeout of a collective ends it.
    threading.Event().wait()

# The timeout is of ranks that have started.
rank = int(os.environ["RANK"])
Path(sys.argv[1], f"started-{rank}").touch()
while not Path(sys.argv[1], f"started-{1 - rank}").exists():
    time.sleep(0.05)
try:
    run_here(lambda: 0, lambda _: {}, work, device="cpu", threads=1, timeout_s=3.0)
    leave(0)
except BaseException as error:
    leave_failed(error)
"""


@pytest.mark.slow
def test_hosts_meet_by_the_right_interface_and_each_names_the_one_that_is_cut_off(
    switch: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    jobs: list[subprocess.Popen[str]] = []
    for rank, name in enumerate(HOSTS):
        place = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR={HOSTS[0]} MASTER_PORT=29611"
        command = f"{sys.executable} {script} {tmp_path}"
        job = subprocess.Popen(
            [*f"ip netns exec {name} unshare --uts sh -c".split(),
             f"hostname {name}; {place} TORCH_CPP_LOG_LEVEL=ERROR exec {command}"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        jobs.append(job)
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.glob("rank-*"))) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1.0)  # a beat
    ip("-n", switch, "link", "set", HOSTS[1], "down")
    for rank, job in enumerate(jobs):
        words = job.communicate(timeout=5 + 10 + 30)[1]
        assert job.returncode == 1, words
        if rank == 0:
            assert re.search(rf"rank 1 on {HOSTS[1]} \(process \d+\) has sent no heartbeat", words)
        else:
            assert f"{HOSTS[1]} has not reached the job's store at {HOSTS[0]}:" in words
        assert words.splitlines()[-1] == "the last checkpoint"
        assert len(words.splitlines()) <= 4


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def watch_of() -> Callable[[int], Watch]:
    """Return a function that watches as a rank of a job of three, of which 0 and 1 share a host."""
    store = new_store()
    envs = [RankEnv(0, 3, 0, 2), RankEnv(1, 3, 1, 2), RankEnv(2, 3, 0, 1)]
    return lambda rank: Watch(store.clone(), envs[rank], timeout_s=30)


@pytest.mark.slow
def test_a_rank_that_is_not_heard_of_is_named_once_a_host(
    watch_of: Callable[[int], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STORE_BEAT_S", 2.0)
    monkeypatch.setattr(watch, "SILENT_S", 6.0)  # a busy machine may hold a heartbeat back
    first, second, _ = (watch_of(rank) for rank in range(3))  # the third sends no more
    lost = RuntimeError("Connection closed by peer")
    with first, second, ThreadPoolExecutor() as threads:
        of_second = threads.submit(second.error_to_raise, lost, True)
        judged = first.error_to_raise(lost, True)
        assert isinstance(judged, TrainingError)
        who = rf"rank 2 on {socket.gethostname()} \(process {os.getpid()}\) has sent no heartbeat"
        assert re.match(rf"{who} .*; rank 0 has waited in vain for another rank$", str(judged))
        assert isinstance(of_second.result(), PeerFailed)


def test_who_did_not_listen_holds_nobody_for_silent(
    watch_of: Callable[[int], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("phalanx.launch.lease.time.monotonic", lambda: clock[0])
    first, second, _ = (watch_of(rank) for rank in range(3))
    first._listen(True)  # it stood still for a moment
    clock[0] = 5.0
    first._listen(False)
    clock[0] = 3600.0  # of steps, in which it had no reason to ask
    assert first._monitor.silent(30, first._heard()) == []
    first._listen(True)
    assert first._monitor.silent(30, first._heard()) == []
    for clock[0] in range(3604, 3640, 4):
        first._monitor.clock.tick()
    second._feed.send(Beat())
    first._listen(True)
    assert first._monitor.silent(30, first._heard()) == [0, 2]


def test_the_others_of_a_host_read_all_only_where_the_first_is_not_heard_of(
    watch_of: Callable[[int], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[range]()
    first, second, _ = (watch_of(rank) for rank in range(3))
    monkeypatch.setattr(Feed, "read", spied(Feed.read, read))

    def look(is_first_there: bool) -> bool:
        second._monitor.clock.now_s += SILENT_S + 1
        if is_first_there:
            first._feed.send(Beat())
        for _ in range(2):
            second._listen(True)
        return second._is_reporter()

    assert not look(True) and set(read) == {range(1)}
    assert second._monitor.silent(1.0, second._heard()) == []
    assert look(False) and read[-1] == range(3)
    assert not look(True)
    assert second._monitor.silent(1.0, second._heard()) == []  # of the others it hears no more


def test_ranks_that_send_no_first_heartbeat_are_named_after_the_timeout(
    watch_of: Callable[[int], Watch],
) -> None:
    second = watch_of(1)  # rank 0, the first of its host, would report for it
    second._exchange_beats()
    assert second._missing_message() == "" and not second._is_reporter()
    second._clock.now_s = 31.0
    second._exchange_beats()
    assert second._missing_message().startswith("ranks 0, 2 have sent no heartbeat: ")
    assert second._is_reporter()


def test_who_was_stopped_itself_holds_nobody_for_silent(
    watch_of: Callable[[int], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("phalanx.launch.lease.time.monotonic", lambda: clock[0])
    first, _, _ = (watch_of(rank) for rank in range(3))
    first._listen(True)
    clock[0] = 3600.0
    for watched in (first._clock, first._monitor.clock):
        watched.tick()
    assert first._lost(SILENT_S) == first._monitor.timeout_message(first._heard()) == ""


def spied(
    read: Callable[[Feed, range, HeartbeatMonitor], None], seen: list[range]
) -> Callable[[Feed, range, HeartbeatMonitor], None]:
    def spy(feed: Feed, ranks: range, monitor: HeartbeatMonitor) -> None:
        seen.append(ranks)
        read(feed, ranks, monitor)

    return spy


def test_among_thousands_an_old_beat_is_no_silence() -> None:
    few, many = (Watch(new_store(), RankEnv(0, number, 0, 1), 60) for number in (3, 4096))
    assert few._monitor.silent_s == SILENT_S
    # Beats come as seldom as they are read, so one may be twice as old.
    assert many._monitor.silent_s > 2 * many._interval_s > SILENT_S


def test_an_error_that_all_meet_is_told_once_a_host(watch_of: Callable[[int], Watch]) -> None:
    first, second, third = (watch_of(rank) for rank in range(3))
    error = ConfigError("the loss is nan")
    assert first.error_to_raise(error, False) is error
    assert isinstance(second.error_to_raise(error, False), PeerFailed)
    assert third.error_to_raise(error, False) is error
    other = ConfigError("the disk is full")
    assert watch_of(1).error_to_raise(other, False) is other
    with third:  # a rank that only lost its peers says whose error it was
        judged = watch_of(2)
        with judged:
            words = str(judged.error_to_raise(RuntimeError("reset"), True))
    assert words.startswith(f"rank 0 on {socket.gethostname()} failed first: the loss is nan")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for as Linux has them")
def test_the_interface_of_an_address() -> None:
    assert interface_of(address_towards("127.0.0.1")) == "lo"
    assert interface_of("192.0.2.77") is None
    assert address_towards("no.such.host.invalid") == ""
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None
