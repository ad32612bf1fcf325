"""The launcher with agents of its own protocol, which start no ranks; and with ranks of this host.

Hosts in network namespaces are in test_launch_hosts.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.launch import launcher
from phalanx.launch.agent import versions
from phalanx.launch.hosts import Host, LaunchRequest, parse_hosts
from phalanx.launch.launcher import JobLauncher

FAKE = Path(__file__).parents[1] / "fake_agent.py"

Scenario = dict[str, Any]
Launch = Callable[..., int]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """Launch a command on hosts that `scenarios` describes: a host's generations, or more."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(launcher, "TOGETHER_S", 0.2)
    monkeypatch.setattr(launcher, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(launcher, "PEERS_S", 20.0)
    monkeypatch.setattr(Host, "is_local", False)
    monkeypatch.setattr(JobLauncher, "_addresses", lambda *_: ["10.0.0.1"])

    def run(hosts: str, scenarios: dict[str, Scenario], *command: str, **more: Any) -> int:
        def agent_command(host: Host, request: LaunchRequest, connect_s: float) -> list[str]:
            assert request.folder == "/here"
            assert connect_s > 0
            known = {"versions": versions(), "log": str(tmp_path / "log")}
            name = f"{host.name} again" if connect_s == launcher.AGAIN_S else host.name
            text = json.dumps(known | scenarios.get(name, {}))
            return [sys.executable, str(FAKE), host.name, text]

        monkeypatch.setattr(launcher, "agent_command", agent_command)
        words = command or ("train", "--strategy", "dp4")
        request = LaunchRequest(hosts=parse_hosts(hosts), command=words, folder="/here", **more)
        return JobLauncher(request).run()

    return run


def sent(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    return [line for line in lines if line["is"] == kind]


def starts(tmp_path: Path) -> list[dict[str, Any]]:
    return sorted(
        sent(tmp_path, "start"), key=lambda each: (each["launched"]["generation"], each["first"])
    )


def ended(*codes: int, first: int = 0) -> list[Scenario]:
    return [{"is": "ended", "rank": first + at, "code": code} for at, code in enumerate(codes)]


def text(rank: int, words: str, stream: int = 1) -> Scenario:
    return {"is": "text", "rank": rank, "stream": stream, "text": words}


REPORT = {"is": "report", "value": {"strategy": "dp4", "run": "/runs/x", "global_rows": 12}}


def test_all_ranks_of_all_hosts_are_one_job(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a = {"generations": [[text(0, "one\ntwo\n"), *ended(0, 0)]]}
    b = {"generations": [[text(3, "three\n", 2), *ended(0, 0, first=2)]]}
    assert launch("a:2,b:2", {"a": a, "b": b}, variables=(("X", "1"),)) == 0
    output = capfd.readouterr()
    assert output.out == "[0 a] one\n[0 a] two\n"
    assert output.err == "[3 b] three\n"
    begun = starts(tmp_path)
    assert [(each["host"], each["first"], each["num_here"]) for each in begun] == [
        ("a", 0, 2),
        ("b", 2, 2),
    ]
    variables = begun[0]["variables"]
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [variables[name] for name in names] == ["4", "10.0.0.1", "1"]
    assert begun[1]["variables"] == variables
    assert all(each["variables"] == {"X": "1"} for each in sent(tmp_path, "settings"))


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (
            {"exit_code": 255, "errors": "ssh: Could not resolve hostname b: Name or service"},
            "host b: its name is unknown; add it to /etc/hosts",
        ),
        (
            {"exit_code": 255, "errors": "ssh: connect to host b port 22: Connection refused"},
            "host b: it refuses ssh; start an ssh server there",
        ),
        (
            {"exit_code": 255, "errors": "kim@b: Permission denied (publickey)."},
            "host b: ssh is not let in; give it your key by: ssh-copy-id kim@b",
        ),
        (
            {"exit_code": 2, "errors": "sh: 1: cd: can't cd to /here"},
            "it has no folder /here; make it",
        ),
        (
            {"exit_code": 127, "errors": "sh: 1: exec: /x/python: not found"},
            f"it has no {sys.executable}; install the same environment",
        ),
        ({"exit_code": 1, "errors": "x: No module named phalanx"}, "it has no phalanx; install it"),
        ({"versions": versions() | {"torch": "1.0"}}, "host b has torch 1.0, but this machine has"),
        ({"why_unreached": "timed out"}, "host b does not reach 10.0.0.1, port 1: timed out; open"),
    ],
)
def test_a_host_that_cannot_take_part_is_named_before_any_rank_starts(
    b: Scenario, message: str, launch: Launch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        launch("a:2,kim@b:2", {"b": b})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sent(tmp_path, "start") == []


def test_an_error_of_the_program_ends_the_job_with_its_code(launch: Launch, tmp_path: Path) -> None:
    generations = [[REPORT, *ended(0, 3)]]
    assert launch("a:2", {"a": {"generations": generations}}, restarts=5) == 3
    assert len(sent(tmp_path, "start")) == 1


def test_a_port_in_use_is_named(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host a cannot host the store .* in use; .* --port"):
        launch("a:2", {"a": {"store": "address already in use"}}, port=80)
    assert sent(tmp_path, "start") == []


def test_an_error_that_follows_a_lost_peer_is_an_error_of_the_program(launch: Launch) -> None:
    generations = [[REPORT, *ended(75, 255)]]  # 255 is sys.exit(-1)
    assert launch("a:2", {"a": {"generations": generations}}, restarts=1) == 255


def test_errors_of_an_agent_are_whole_lines(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = ("one ", "line\nno end")
    words = [{"is": "errors", "text": part} for part in parts]
    assert launch("a:2", {"a": {"generations": [[*words, {"is": "exit"}]]}}) == 1
    assert capfd.readouterr().err.splitlines()[:2] == ["[a] one line", "[a] no end"]


def test_without_restarts_a_killed_rank_ends_the_job(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    generations = [[REPORT, *ended(-9, -35)]]
    assert launch("a:2", {"a": {"generations": generations}}) == 1
    lost = "lost: rank 0 on a was ended by signal SIGKILL; rank 1 on a was ended by signal 35"
    assert capfd.readouterr().err == f"phalanx: {lost}\n"


def test_a_lost_rank_begins_the_next_generation_on_the_same_hosts(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A rank that has lost its peer ends with 75, which is no error of its own.
    step = {"is": "step", "rank": 0, "value": 8}
    generations = [[REPORT, *ended(75), {"is": "later"}, *ended(-9, first=1)], [step, *ended(0, 0)]]
    b = {"generations": [[], ended(0, 0, first=2)]}
    assert launch("a:2,b:2", {"a": {"generations": generations}, "b": b}, restarts=1) == 0
    second = [each for each in starts(tmp_path) if each["launched"]["generation"] == 1]
    assert [each["host"] for each in second] == ["a", "b"]
    launched = second[0]["launched"]
    assert [launched[name] for name in ("strategy", "first", "run")] == ["dp4", "dp4", "/runs/x"]
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [
        "phalanx: lost: rank 1 on a was ended by signal SIGKILL",
        "phalanx: restart 1 of 1: dp4 on a:2,b:2, from the last state of /runs/x",
    ]
    assert lines[2].startswith("phalanx: step 8 is done, ")


@pytest.mark.parametrize("how", ["exit", "silence"])
def test_a_lost_host_is_left_out_if_it_does_not_answer_again(
    how: str, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "SILENT_S", 2.0)
    scenarios: dict[str, Scenario] = {
        "a": {"generations": [[], ended(0, 0)]},
        "b": {"generations": [[REPORT, {"is": how}]]},
        "b again": {"exit_code": 255, "errors": "ssh: connect to host b: Connection refused"},
        "c": {"generations": [[], ended(0, first=2)]},
    }
    assert launch("a:2,b:1,c:1", scenarios, restarts=1) == 0
    second = [each for each in starts(tmp_path) if each["launched"]["generation"] == 1]
    assert [(each["first"], each["num_here"], each["launched"]["strategy"]) for each in second] == [
        (0, 2, "dp3"),
        (2, 1, "dp3"),
    ]


def test_a_host_whose_ssh_alone_was_lost_takes_part_again(launch: Launch, tmp_path: Path) -> None:
    scenarios: dict[str, Scenario] = {
        "a": {"generations": [[], ended(0, 0)]},
        "b": {"generations": [[REPORT, {"is": "exit"}]]},
        "b again": {"generations": [ended(0, 0, first=2)]},
    }
    assert launch("a:2,b:2", scenarios, restarts=1) == 0
    second = starts(tmp_path)[2:]
    assert [(each["host"], each["launched"]["strategy"]) for each in second] == [
        ("a", "dp4"),
        ("b", "dp4"),
    ]


def test_too_few_ranks_end_the_job(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    scenarios: dict[str, Scenario] = {
        "b": {"generations": [[REPORT, {"is": "exit"}]]},
        "b again": {"exit_code": 255},
    }
    assert launch("a:2,b:2", scenarios, restarts=3) == 1
    ends = "the job ends: 2 ranks are left, --min-ranks is 3; /runs/x has its last state"
    assert ends in capfd.readouterr().err


def test_the_first_signal_goes_to_the_ranks(launch: Launch, tmp_path: Path) -> None:
    assert launch("a:2", {"a": {"generations": [[{"is": "terminate the launcher"}]]}}) == 143
    assert [each["signum"] for each in sent(tmp_path, "signal")] == [signal.SIGTERM]
    assert launch("a:2", {"a": {"is_terminated_at_store": True}}) == 143


def test_a_host_joins_at_the_end_of_a_step(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenarios = {
        "a": {"generations": [[REPORT], ended(0, 0, 0, 0)], "save_s": 2.0},
        "b": {"generations": [ended(0, 0, first=4)]},
        "c": {"generations": [ended(0, 0, first=4)]},
    }
    answers: dict[str, str] = {}

    def join(name: str) -> None:
        while not list(launcher.control_folder().glob("*.sock")):
            time.sleep(0.05)
        answers[name] = launcher.join(Host(name, 2), None)

    threads = [threading.Thread(target=join, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    assert launch("a:4", scenarios) == 0
    for thread in threads:
        thread.join()
    assert answers == {"a": "host a takes part in the job already", "b": "", "c": ""}
    # A second signal would end the ranks before they have saved.
    assert [each["host"] for each in sent(tmp_path, "signal")].count("a") == 1
    second = [each for each in starts(tmp_path) if each["launched"]["generation"] == 1]
    assert [(each["num_here"], each["launched"]["strategy"]) for each in second] == [
        (4, "dp6"),
        (2, "dp6"),
    ]
    with pytest.raises(ConfigError, match="none; expected one"):
        launcher.join(Host("b"), None)


def test_the_command_line_says_what_it_would_run_and_what_it_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/secret")
    assert main(["launch", "--hosts", "kim@b:2", "--dry-run", "--", "train", "--steps", "2"]) == 0
    output = capsys.readouterr().out
    assert "each host runs its ranks of phalanx train --steps 2, in " in output
    assert "ssh -T -o BatchMode=yes -o ConnectTimeout=10 kim@b" in output
    assert "NCCL_DEBUG" in output
    assert "WARN" not in output
    assert "/secret" not in output
    for words, message in (
        (["--hosts", "a", "--", "serve", "x"], "the command after -- is 'serve x'; expected train"),
        (["--", "train"], "expected either --hosts a:2,b:2 or --hostfile FILE"),
        (["--hosts", "a", "--env", "NO_SUCH", "--", "train"], "write NO_SUCH=VALUE"),
        (["--hosts", "b:1", "--ssh", "no-ssh", "--", "train"], "command no-ssh cannot be run"),
    ):
        assert main(["launch", *words]) == 2
        assert message in capsys.readouterr().err


SCRIPT = """
import os, sys, time
import torch
import phalanx
run = phalanx.init("dp2")
print(f"rank {os.environ['RANK']} of generation {os.environ['TORCHELASTIC_RESTART_COUNT']}")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.environ["RANK"] == "1" and os.kill(os.getpid(), 9)
run.comm.all_reduce(torch.ones(1), "job")
sys.stdout.write("no end of line")
"""


def test_a_killed_rank_of_this_host_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "launch", "--hosts", "localhost:2"]
    job = subprocess.run(
        [*command, "--restarts", "1", "--", "run", "script.py", "--device", "cpu"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "lost: rank 1 on localhost was ended by signal SIGKILL" in job.stderr
    lines = [line for line in job.stdout.splitlines() if "generation 0" not in line]
    assert sorted(lines) == [
        "[0] no end of line",
        "[0] rank 0 of generation 1",
        "[1] no end of line",
        "[1] rank 1 of generation 1",
    ]


def processes(job: str) -> set[int]:
    """Return the processes of the user that have an environment variable JOB of this value."""
    alive: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"JOB={job}".encode() in (folder / "environ").read_bytes():
                alive.add(int(folder.name))
    return alive


@pytest.mark.slow
def test_a_stopped_rank_ends_when_agent_and_launcher_are_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, phalanx\nphalanx.init('dp2')\nprint(os.getpid())\nos.kill(os.getpid(), 19)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "launch", "--hosts", "localhost:2", "--", "run",
         "script.py", "--device", "cpu"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "JOB": str(tmp_path)},
    )  # fmt: skip
    assert job.stdout is not None
    ranks = [int(job.stdout.readline().split()[1]) for _ in range(2)]
    words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in processes(str(tmp_path))}
    agents = [pid for pid, line in words.items() if "phalanx.launch.agent" in line]
    assert set(ranks) <= words.keys()
    for pid in (*agents, job.pid):
        os.kill(pid, signal.SIGKILL)
    job.communicate()
    while processes(str(tmp_path)):
        time.sleep(0.1)
