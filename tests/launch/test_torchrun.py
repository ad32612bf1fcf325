"""Under torchrun: one message for one error, the same job on all ranks, no bound on preparation."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

import phalanx
from forked_torchrun import run_two
from phalanx.errors import ConfigError
from phalanx.launch import agreement, torchrun
from phalanx.launch.agreement import check_same
from phalanx.launch.failure import PeerFailed
from phalanx.launch.rank_env import RankEnv, read_rank_env
from ports import reserved_port

SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.torchrun import leave_failed, run_here

rank = int(os.environ["RANK"])

def prepare():
    if rank == 0:
        time.sleep(3.5)  # longer than the timeout of collectives
    return rank

def prepare_and_stop():
    if rank == 1:
        time.sleep(2)  # a beat
        os.kill(os.getpid(), signal.SIGSTOP)

def wait_in_vain(_):
    dist.barrier()
    if rank == 1:
        prepare_and_stop()
    dist.barrier()

def work(value):
    everyone = [None, None]
    dist.all_gather_object(everyone, value)
    return everyone

def end(_):
    PULSE.advice = lambda: "the last checkpoint"
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)  # the ranks have told each other of their processes
        os.kill(os.getpid(), signal.SIGKILL)
    with PULSE.handling_stop():
        time.sleep(100)

def orphan(_):
    open(f"{sys.argv[2]}/pid {os.getpid()}", "w").close()
    dist.barrier()
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def run(prepare, facts, work, timeout_s=3.0, threads=1):
    return run_here(prepare, facts, work, device="cpu", threads=threads, timeout_s=timeout_s)

try:
    if sys.argv[1] == "end":
        run(lambda: 0, lambda _: {}, end, timeout_s=60.0)  # for both to start
    if sys.argv[1] == "orphan":
        run(lambda: 0, lambda _: {}, orphan)
    if sys.argv[1] == "working":
        run(lambda: 0, lambda _: {}, wait_in_vain)
    if sys.argv[1] == "preparing":
        run(prepare_and_stop, lambda _: {}, work)
    for preparation in (prepare, lambda: rank):
        print(run(preparation, lambda _: {"steps": 7}, work), flush=True)
    facts = lambda value: {"text": f"text {value}", "steps": 7}
    run(lambda: rank, facts, work, threads=[1, None][rank])
except BaseException as error:
    leave_failed(error)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def start_two(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command itself, as users do."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_a_long_preparation_is_waited_for_a_second_run_joins_once_and_ranks_that_differ_are_named(
    script: str,
) -> None:
    done = run_two(script, "differ")
    assert done.stdout.count("[0, 1]") == 4, done.stderr
    assert done.returncode != 0
    message = "rank 1 would run a different job than rank 0: they differ in text (text 0 on rank "
    assert done.stderr.count(message) == 1
    assert f'File "{Path(phalanx.__file__).parent}' not in done.stderr  # no traceback of ours


@pytest.mark.slow
def test_the_signal_by_which_torchrun_ends_the_rest_is_no_request_to_stop(script: str) -> None:
    done = start_two(script, "end")
    assert "rank 0: rank 1 has ended, so the job ends\nthe last checkpoint\n" in done.stderr
    assert "the run ends after the current step" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("when", "doing"), [("preparing", "preparing"), ("working", "the work")])
def test_a_rank_that_is_stopped_is_named_and_killed(when: str, doing: str, script: str) -> None:
    done = run_two(script, when)
    said = rf"^rank 0: rank 1 on .* been stopped by a signal .* \(last heartbeat: {doing}"
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr
    # torchrun waits 30 s for a stopped process before it says this.
    assert "forcefully exiting" not in done.stderr


def test_the_ranks_of_a_torchrun_that_is_killed_end(script: str, tmp_path: Path) -> None:
    assert run_two(script, "orphan", str(tmp_path)).returncode == -signal.SIGKILL
    pids = [path.name.split()[1] for path in tmp_path.glob("pid *")]
    assert len(pids) == 2
    while any(not state.startswith("Z") for pid in pids for state in states(pid)):
        time.sleep(0.05)


def states(pid: str) -> list[str]:
    """The state of a process, if there is one."""
    words = ["ps", "-o", "stat=", "-p", pid]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


@pytest.fixture
def store_address() -> Generator[dict[str, str]]:
    with reserved_port() as port:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize(
    ("option", "message"),
    [("--data=/nope/nothing.txt", "/nope"), ("--optimizer.rl=1", "did you mean '--optimizer.lr'")],
)
def test_an_error_of_the_users_is_told_once(option: str, message: str, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'out'}"
    done = run_two("-m", "phalanx", "train", "--device=cpu", "--threads=1", out, option)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(ours) == 1 and ours[0].startswith("rank 0: ") and message in ours[0]
    assert f'File "{Path(phalanx.__file__).parent}' not in done.stderr  # no traceback of ours


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, r".*EADDRINUSE"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0x"}, r".*"),
        ({"RANK": "1", "MASTER_ADDR": "no.such.host.invalid"}, r".*no\.such\.host\.invalid"),
    ],
)
def test_ranks_that_cannot_meet(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "MASTER_PORT": port, **environment}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"cannot connect: {reason}.*within 1 s") as raised:
            torchrun.meet(read_rank_env(), 1)
    assert "\n" not in str(raised.value)


def test_a_rank_that_starts_after_torchrun_has_ended_says_so(
    store_address: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= store_address
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    gone = "does not answer: connection refused; torchrun on that host has ended"
    with pytest.raises(ConfigError, match=gone):
        torchrun.meet(read_rank_env(), 600)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="this host runs 3 ranks, but has 2 GPUs; start at most"):
        torchrun.run_here(lambda: 0, lambda _: {}, lambda value: value, device="cuda", threads=1)


def test_a_gpu_that_only_one_task_sees_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under srun --gpus-per-task=1."""
    chosen: list[int] = []
    gpus = ["gpu a", "gpu b", "gpu a"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    store = dist.HashStore()

    def take(rank: int, num_here: int) -> None:
        properties = SimpleNamespace(uuid=gpus[rank])
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
        place = RankEnv(rank, 3, rank, num_here)
        assert torchrun._use_device(place, "cuda") == "cuda"
        torchrun._take_gpu(place, store)

    take(0, 3)
    take(1, 3)
    assert chosen == [0, 0]
    with pytest.raises(ConfigError, match="this host runs 3 ranks, but has 1 GPUs"):
        take(2, 3)
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 would use the same GPU.*set LOCAL_RANK"):
        take(2, 1)


def test_ranks_that_would_prepare_end_if_another_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    taken = ConfigError("ranks 0 and 1 would use the same GPU")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "_use_device", lambda *_: "cuda")
    monkeypatch.setattr(torchrun, "meet", lambda *_: store)
    monkeypatch.setattr(torchrun, "_take_gpu", Mock(side_effect=taken))
    with pytest.raises(ConfigError, match="the same GPU"):
        torchrun.run_here(lambda: 0, lambda _: {}, lambda value: value, threads=1)
    with pytest.raises(PeerFailed, match="another rank could not prepare"):
        agreement.agree(RankEnv(0, 2, 0, 1), store, lambda: 0, lambda _: {})


def test_a_rank_that_meets_the_end_of_the_store_has_lost_a_peer() -> None:
    with pytest.raises(PeerFailed, match="the rank that hosts the store has ended"):
        with agreement.failing_together(RankEnv(1, 2, 0, 1), dist.HashStore()):
            raise dist.DistNetworkError("Connection reset by peer")


STOPPING = """
import sys, time
from phalanx.launch import torchrun
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.torchrun import run_here

torchrun.TOGETHER_S = 1.0

def work(value):
    with PULSE.handling_stop():
        print("begun", value, flush=True)
        while not PULSE.stop_signal:
            time.sleep(0.1)
    print(PULSE.stop_signal, flush=True)
    time.sleep(100)

run_here(lambda: 5, lambda _: {}, work, device="cpu", threads=1, timeout_s=30.0)
"""


def test_a_signal_is_heeded_by_a_rank_and_a_later_one_ends_it(
    store_address: dict[str, str],
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", **store_address}  # of Slurm: without LOCAL_RANK
    with subprocess.Popen(
        [sys.executable, "-c", STOPPING],
        env={**os.environ, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == "begun 5\n"
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGINT)  # from the terminal and from torchrun: one request
            assert job.stdout.readline() in ("15\n", "2\n")  # whichever Python handles first
            time.sleep(1.0)
            job.send_signal(signal.SIGTERM)
            words = job.communicate(timeout=60)[1]
        finally:
            job.kill()
    assert job.returncode == 128 + signal.SIGTERM
    assert words.count("a second signal after 1 s ends it at once") == 1


def test_all_ranks_that_differ_are_named() -> None:
    check_same([{"a": 1}, {"a": 1}])
    with pytest.raises(ConfigError, match=r"^ranks 1, 3 would .* a \(1 on rank 0, 2 on rank 1\)"):
        check_same([{"a": 1}, {"a": 2}, {"a": 1}, {"a": 3}])


def test_two_versions_are_no_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first = dist.HashStore(), threading.current_thread()

    def version(package: str) -> str:
        build = "cpu" if threading.current_thread() is first else "cu128"
        return f"{package == 'phalanx-train' and build}+{build}"

    def agreed(rank: int) -> int:
        return agreement.agree(RankEnv(rank, 2, 0, 1), store, lambda: rank, lambda _: {})

    monkeypatch.setattr(agreement.metadata, "version", version)
    with ThreadPoolExecutor() as other:
        second = other.submit(agreed, 1)
        differ = r"they differ in version of phalanx \(cpu on rank 0, cu128 on rank 1\);"
        with pytest.raises(ConfigError, match=differ):
            agreed(0)
        with pytest.raises(PeerFailed):
            second.result()


def test_ranks_dealt_out_over_hosts_one_by_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, places = dist.HashStore(), {0: ("a", 0), 1: ("b", 0), 2: ("a", 1), 3: ("b", 1)}
    hosts: dict[int | None, str] = {}
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: hosts[threading.get_ident()])

    def agreed(rank: int) -> object:
        host, local_rank = places[rank]
        hosts[threading.get_ident()] = host
        try:
            return agreement.agree(
                RankEnv(rank, 4, local_rank, 2), store, lambda: rank, lambda _: {}
            )
        except (ConfigError, PeerFailed) as error:
            return error

    with ThreadPoolExecutor(4) as ranks:
        ends = list(ranks.map(agreed, places))
    assert [type(end) for end in ends] == [PeerFailed, PeerFailed, ConfigError, ConfigError]
    assert "LOCAL_RANK 1 of a is rank 2, but rank 1 is on b: the ranks of a host" in str(ends[2])


def test_ranks_that_a_launcher_binds_to_cores_use_these(monkeypatch: pytest.MonkeyPatch) -> None:
    store, mine = dist.HashStore(), threading.local()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine.cores)

    def cores_of(rank: int, cores: set[int], before: int) -> int:
        mine.cores = cores
        prefixed = dist.PrefixStore(str(before), store)
        return agreement.own_cores(RankEnv(rank, 4, rank, 4), prefixed)

    for number, (masks, expected) in enumerate(
        [
            ([set(range(16))] * 4, [4, 4, 4, 4]),  # torchrun
            ([{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9}], [3, 3, 3, 1]),  # srun --cpus-per-task
            ([{0, 1}, {0, 1}, {2, 3}, {2, 3}], [1, 1, 1, 1]),  # mpirun --bind-to socket
        ]
    ):
        with ThreadPoolExecutor(4) as ranks:
            assert list(ranks.map(cores_of, range(4), masks, [number] * 4)) == expected


class Left(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize(
    ("kind", "has_left", "exit_code"),
    [(ConfigError, True, 141), (ConfigError, False, 2), (SystemExit, False, 141)],
)
def test_a_pipe_that_broke_elsewhere_silences_no_error(
    kind: type[BaseException],
    has_left: bool,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    error = kind("no such text")
    error.__context__ = BrokenPipeError()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("phalanx.launch.torchrun.leave", leave)
    monkeypatch.setattr("phalanx.launch.torchrun.reader_has_left", lambda: has_left)
    monkeypatch.setattr("phalanx.launch.torchrun.ignore", lambda: None)  # this process goes on
    with pytest.raises(Left) as left:
        torchrun.leave_failed(error)
    assert left.value.args == (exit_code,)
    assert ("rank 0: no such text" in capsys.readouterr().err) == (exit_code == 2)


@pytest.mark.slow
def test_a_host_that_does_not_recognise_itself_serves_the_endpoint_where_it_is_told(
    store_address: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line `127.0.1.1 NAME` in /etc/hosts this takes `--rdzv-conf is_host=1`."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    monkeypatch.setattr(
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend._matches_machine_hostname",
        lambda _: False,
    )
    endpoint = ":".join(store_address.values())
    said = {"read_timeout": 1}
    params = [
        RendezvousParameters("c10d", endpoint, "job", 2, 2, **said, **more)
        for more in ({}, {"is_host": "1"})
    ]
    with pytest.raises(RendezvousConnectionError):
        create_backend(params[0])
    serving = create_backend(params[1])
    create_backend(params[0])  # of the other host, now that somebody serves it
    del serving
