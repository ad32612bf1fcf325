"""`phalanx launch` on hosts of their own, in network namespaces, with real ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from namespaces import SSH, THREE_HOSTS, cut, kill_all_on, on_host, pids_on, ssh_servers, switched
from phalanx.config import BatchConfig, TrainConfig
from phalanx.config.fields import settings, value_at
from phalanx.config.file import to_toml
from small_run import losses, small_run

A, B, C = THREE_HOSTS
STEPS = 60

Servers = dict[str, subprocess.Popen[bytes]]


@pytest.fixture
def servers() -> Generator[Servers]:
    with switched(THREE_HOSTS), ssh_servers((A, B)) as running:
        yield running


def launch(folder: Path, hosts: str, *words: str) -> subprocess.Popen[str]:
    """Launch on host A what `words` say; standard error goes to standard output."""
    command = [sys.executable, "-m", "phalanx", "launch", "--ssh", SSH, "--hosts", hosts, *words]
    return subprocess.Popen(
        on_host(A, *command),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
    )  # fmt: skip


def words_of(host: str) -> dict[int, str]:
    """Return the commands that run on a host, except its ssh server, by process."""
    running: dict[int, str] = {}
    for pid in pids_on(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if "ssh_server" not in words:
            running[pid] = words
    return running


def training(folder: Path, out: str, steps: int = STEPS, **more: object) -> list[str]:
    """Return the words of a small training of three data ranks, which saves every fifth step."""
    batch = BatchConfig(global_size=12, microbatch=2)
    config = small_run(folder, batch=batch, save="every=5", **more)
    values = {each.key: value_at(config, each.key) for each in settings(TrainConfig)}
    usual = {key: value_at(TrainConfig(), key) for key in values}
    changed = {key: value for key, value in values.items() if value != usual[key] and key != "out"}
    (folder / "job.toml").write_text(to_toml(changed))
    return ["train", "--config", "job.toml", "--steps", f"{steps}", "--out", out]


def wait_for(job: subprocess.Popen[str], words: str) -> str:
    """Read the output of a job to the line that has `words`; return what was read."""
    assert job.stdout is not None
    read = ""
    for line in job.stdout:
        read += line
        if words in line:
            return read
    raise AssertionError(read)


def test_unreachable_hosts_are_named_before_any_rank_starts(
    servers: Servers, tmp_path: Path
) -> None:
    job = launch(tmp_path, f"{A}:1,{B}:1,{C}:1,nowhere:1", "--", "train")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert f"host {C}: it refuses ssh; start an ssh server there" in output
    assert "host nowhere: its name is unknown; add it to /etc/hosts" in output
    assert words_of(B) == {}
    assert list(tmp_path.glob("runs")) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{A: 3}, {A: 2, B: 1}, {A: 1, B: 1, C: 1}])
def test_hosts_give_the_losses_of_torchrun_to_the_bit(
    ranks: dict[str, int], servers: Servers, tmp_path: Path
) -> None:
    with ssh_servers([C]):
        hosts = ",".join(f"{host}:{number}" for host, number in ranks.items())
        job = launch(tmp_path, hosts, "--", *training(tmp_path, "launched", steps=6))
        output, _ = job.communicate(timeout=240)
        assert job.returncode == 0, output
        assert [words_of(host) for host in THREE_HOSTS] == [{}, {}, {}]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "10.77.1.1"]
    torchrun += ["--master-port", "29511", "--nnodes", f"{len(ranks)}"]
    jobs = [
        subprocess.Popen(
            on_host(
                host,
                *torchrun,
                *("--node-rank", f"{node}", "--nproc-per-node", f"{number}", "-m", "phalanx"),
                *training(tmp_path, "torchrun", steps=6),
            ),
            cwd=tmp_path,
        )
        for node, (host, number) in enumerate(ranks.items())
    ]
    assert [job.wait(240) for job in jobs] == [0] * len(jobs)
    assert losses(tmp_path / "launched") == losses(tmp_path / "torchrun")
    assert len(losses(tmp_path / "launched")) == 6


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_of_all_hosts_and_names_the_checkpoint(
    servers: Servers, tmp_path: Path
) -> None:
    job = launch(tmp_path, f"{A}:1,{B}:1", "--", *training(tmp_path, "run", steps=5000))
    wait_for(job, "] step ")
    [launcher] = [pid for pid, words in words_of(A).items() if " launch --ssh" in words]
    os.kill(launcher, signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "last checkpoint: run/checkpoints/step-" in output
    assert (words_of(A), words_of(B)) == ({}, {})


def kill_host(servers: Servers) -> None:
    servers[B].kill()
    kill_all_on(B)


def kill_ssh(servers: Servers) -> None:
    for pid, words in words_of(A).items():
        if "ssh_client" in words and f" {B} exec" in words:
            os.kill(pid, signal.SIGKILL)


def cut_host(servers: Servers) -> None:
    cut(B)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strategy"), [(kill_host, "dp2"), (kill_ssh, "dp3"), (cut_host, "dp2")]
)
def test_a_job_takes_all_its_steps_although_it_loses_a_host(
    fault: Callable[[Servers], None], strategy: str, servers: Servers, tmp_path: Path
) -> None:
    words = training(tmp_path, "run")
    job = launch(tmp_path, f"{A}:2,{B}:1", "--restarts", "1", "--", *words)
    while not (tmp_path / "run/checkpoints/step-00000005").exists():
        assert job.poll() is None
        time.sleep(0.1)
    fault(servers)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert f"phalanx: restart 1 of 1: {strategy} on {A}:2" in output
    assert len(losses(tmp_path / "run")) >= STEPS
    if fault is cut_host:  # its agent has ended its ranks, which cannot reach the launcher
        assert words_of(B) == {}
    assert_undisturbed(tmp_path)


@pytest.mark.slow
def test_a_job_takes_all_its_steps_although_its_launcher_is_lost_with_its_host(
    servers: Servers, tmp_path: Path
) -> None:
    with ssh_servers([C]):
        words = ["--restarts", "1", "--min-ranks", "2", "--", *training(tmp_path, "run")]
        job = launch(tmp_path, f"{A}:1,{B}:1,{C}:1", *words)
        while not (tmp_path / "run/checkpoints/step-00000005").exists():
            assert job.poll() is None
            time.sleep(0.1)
        servers[A].kill()
        kill_all_on(A)
        job.communicate(timeout=60)
        while not (tmp_path / "run/launch.log").exists() or words_of(B):
            time.sleep(0.5)  # the launcher on B ends the agents when the job has ended
        assert words_of(C) == {}
    log = (tmp_path / "run/launch.log").read_text()
    assert f"phalanx: restart 1 of 1: dp2 on {B}:1,{C}:1, from the last state of " in log
    assert_undisturbed(tmp_path)


def assert_undisturbed(folder: Path) -> None:
    """Compare the last loss of a run with one process of the same batches, in float64."""
    plain = subprocess.run(
        [sys.executable, "-m", "phalanx", *training(folder, "plain"), "--strategy", "dp1"],
        cwd=folder, capture_output=True, timeout=240,
    )  # fmt: skip
    assert plain.returncode == 0
    assert losses(folder / "run")[-1] == pytest.approx(losses(folder / "plain")[-1], rel=1e-10)
