"""`phalanx server`, and workers that find it: processes of a job on several hosts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from namespaces import HOSTS, kill_all_on
from namespaces import switch as switch
from phalanx.cli.main import main
from phalanx.config import BatchConfig, TrainConfig
from phalanx.config.file import to_toml
from phalanx.config.schema import ServerConfig
from phalanx.config.validate import check
from phalanx.errors import ConfigError
from phalanx.train.job.resume import stored_settings
from phalanx.train.run import train
from small_run import losses, small_run


def test_a_secret_is_its_owners_alone_and_is_not_overwritten(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    assert main(["server", "secret", "--secret", str(file)]) == 0
    text = file.read_text()
    assert len(bytes.fromhex(text)) == 32 and file.stat().st_mode & 0o777 == 0o600
    assert main(["server", "secret", "--secret", str(file)]) == 2
    assert "cannot be created: File exists" in capfd.readouterr().err and file.read_text() == text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "ROLE is missing; expected: phalanx server secret|coordinator|scheduler|server"),
        (["queen"], "ROLE is queen"),
        (["coordinator"], "--secret is missing; phalanx server coordinator needs it"),
        (["server", "--secret", "S"], "--address is missing"),
        (["server", "--secret", "S", "--address", "tcp://127.0.0.1:*"], "--coordinator is missing"),
        (
            ["coordinator", "--secret", "none.txt", "--address", "tcp://127.0.0.1:*"],
            "phalanx server secret",
        ),
        (
            ["coordinator", "--secret", "S", "--address", "tcp://192.0.2.1:80"],
            "this host cannot listen",
        ),
        (["coordinator", "--secret", "S", "--address", "tcp://0.0.0.0:*"], "is any address of"),
        (["coordinator", "--secret", "S", "--address", "ipc:///tmp/a"], "expected tcp://HOST:PORT"),
        (
            [
                "server",
                "--secret",
                "S",
                "--address",
                "tcp://127.0.0.1:*",
                "--coordinator",
                "tcp://0.0.0.0:7000",
            ],
            "coordinator is tcp://0.0.0.0:7000",
        ),
    ],
)
def test_what_a_role_lacks_is_named(
    words: list[str], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "S").write_text("ab" * 32)
    assert main(["server", *words]) == 2
    assert expected in re.sub(r"\s+", " ", capfd.readouterr().err)
    assert [*tmp_path.iterdir()] == [tmp_path / "S"], "it leaves nothing behind"


@pytest.mark.parametrize(
    ("strategy", "server", "words"),
    [
        ("dp2:ps", {"worker": 1}, "server.worker is 1, but server.coordinator is unset"),
        ("dp2", {"coordinator": "a", "worker": 1, "secret": "b"}, "the nearest is dp2:ps"),
        ("dp2:ps", {"coordinator": "a", "worker": 2, "secret": "b"}, "of dp2:ps are 0 to 1"),
    ],
)
def test_a_worker_of_no_job_is_refused(
    strategy: str, server: dict[str, object], words: str
) -> None:
    given: dict[str, object] = {"strategy": strategy, "server": ServerConfig(**server)}  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(TrainConfig(**given))  # pyright: ignore[reportArgumentType]


class Hosts:
    """Processes of `phalanx` on two hosts, and what they have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: str, *words: str) -> None:
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "phalanx", *words]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.made[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, words: str) -> str:
        """Return the text of a process when it has said something."""
        until_s = time.monotonic() + 120
        while words not in (text := self.text(name)):
            assert time.monotonic() < until_s and self.made[name].poll() is None, text
            time.sleep(0.1)
        return text

    def end(self) -> None:
        for process in self.made.values():
            process.kill()
            process.wait()


def connected_by_tcp(pids: dict[str, int]) -> dict[str, set[str]]:
    """Return of each process those to which it has a TCP connection, as the kernel knows.

    A connection is from the process of its socket to the one that listens at the other end.
    """
    tables: dict[str, list[list[str]]] = {}
    for name, pid in pids.items():
        found = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
        inodes = {each[8:-1] for each in found if each.startswith("socket:[")}
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
        tables[name] = [line for line in lines if line[9] in inodes]
    listens, established = "0A", "01"
    where = {line[1]: name for name, of in tables.items() for line in of if line[3] == listens}
    return {
        name: {where[line[2]] for line in of if line[3] == established and line[2] in where}
        for name, of in tables.items()
    }


@pytest.mark.slow
@pytest.mark.fresh_ranks
@pytest.mark.usefixtures("switch")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_job_on_two_hosts_computes_what_one_process_does(is_killed: bool, tmp_path: Path) -> None:
    """Each host has a group of workers; one host is killed on the way.

    Strangers speak to the coordinator meanwhile: without keys, and with another job's.
    """
    config = small_run(tmp_path, batch=BatchConfig(global_size=12, microbatch=2), steps=30)
    train(TrainConfig(**{**vars(config), "out": str(tmp_path / "alone")}))
    (tmp_path / "job.toml").write_text(to_toml(stored_settings(config)))
    secret = ("--secret", str(tmp_path / "secret"))
    assert main(["server", "secret", *secret]) == 0
    where = "tcp://10.77.1.1:7100"
    hosts = Hosts(tmp_path)
    first, second = HOSTS
    member = (*secret, "--coordinator", where, "--address")
    try:
        journal = ("--journal", str(tmp_path / "journal"))
        words = ("server", "coordinator", *secret, "--address", where, *journal)
        hosts.start("coordinator", first, *words, "--num-groups", "2")
        for number, host in enumerate(HOSTS):
            own = (*member, f"tcp://10.77.1.{number + 1}:*")
            group = ("--group", str(1 - number))  # a worker is of the group of its host
            hosts.start(f"scheduler{number}", host, "server", "scheduler", *own, *group)
            hosts.start(f"server{number}", host, "server", "server", *own)
        hosts.wait_for("coordinator", "at tcp://10.77.1.1:7100")
        strange = "import socket\ns = socket.create_connection(('10.77.1.1', 7100))\n"
        strange += "s.sendall(b'GET / HTTP/1.1' * 300)"
        command = ["ip", "netns", "exec", second, sys.executable, "-c", strange]
        subprocess.run(command, check=True, timeout=60)
        for worker, host in enumerate(HOSTS):
            own = ("--out", str(tmp_path / f"run{worker}"), "--server.secret", secret[1])
            asked = ("--server.coordinator", where, "--server.worker", str(worker))
            words = ("train", "--config", str(tmp_path / "job.toml"), "--strategy", "dp2:ps")
            hosts.start(f"worker{worker}", host, *words, *own, *asked)
        run = tmp_path / "run0"
        while not (run / "metrics.jsonl").exists() or len(losses(run)) < 5:
            time.sleep(0.05)
            assert hosts.made["worker0"].poll() is None, hosts.text("worker0")
        roles, servers = list(hosts.made)[:5], {"server0", "server1"}
        pids = {name: each.pid for name, each in hosts.made.items()}
        for number in range(2):
            log = (tmp_path / f"run{number}" / "logs" / f"rank-{number}.log").read_text()
            pids[f"worker{number}"] = int(re.findall(r"rank \d, process (\d+)", log)[-1])
        found = connected_by_tcp(pids)
        due = {f"worker{n}": {"coordinator", *servers, f"scheduler{n}"} for n in range(2)}
        due |= {name: {"coordinator"} for name in ("scheduler0", "scheduler1")}
        due |= {name: {"coordinator", *servers} - {name} for name in servers}
        assert found == {**due, "coordinator": set[str]()}
        if is_killed:
            kill_all_on(second)
            roles = [name for name in roles if not name.endswith("1")]
        for name in [*roles, "worker0", *["worker1"] * (not is_killed)]:
            assert hosts.made[name].wait(300) == 0, hosts.text(name)
        assert is_killed or "worker 1 is done; worker 0 has the summary" in hosts.text("worker1")
        assert "refused" not in hosts.text("coordinator")
        assert all("the job has ended" in hosts.text(name) for name in roles)
        ours, alone = losses(tmp_path / "run0"), losses(tmp_path / "alone")
        torch.testing.assert_close(ours, alone, rtol=1e-10, atol=0)
    finally:
        hosts.end()


@pytest.mark.slow
def test_strangers_do_not_end_a_role_of_the_command_nor_fill_its_log(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    secret = ("--secret", str(tmp_path / "secret"))
    assert main(["server", "secret", *secret]) == 0
    journal = ("--journal", str(tmp_path / "journal"))
    command = [sys.executable, "-m", "phalanx", "server", "coordinator", *secret, *journal]
    with (tmp_path / "coordinator.log").open("ab") as file:
        hosts.made["coordinator"] = subprocess.Popen(
            [*command, "--address", "tcp://127.0.0.1:*"], stdout=file, stderr=file
        )
    try:
        text = hosts.wait_for("coordinator", "at tcp://")
        port = int(re.findall(r"at tcp://127.0.0.1:(\d+)", text)[-1])
        for _ in range(1000):
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        hosts.made["coordinator"].terminate()
        assert hosts.made["coordinator"].wait(60) == 0
        text = hosts.text("coordinator")
        assert "ended by a signal" in text and len(text.splitlines()) < 10
    finally:
        hosts.end()
