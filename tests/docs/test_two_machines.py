"""docs/two_machines.md: its files and commands agree, its figures hold, and its script runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface
from pathlib import Path

import pytest
import yaml
from blocks import BLOCKS as ALL
from blocks import ROOT, Block, blocks_of
from test_run_blocks import TINY

from phalanx.cli.main import main

PAGE = ROOT / "docs/two_machines.md"
SCRIPT = ROOT / "examples/two_machines.sh"
BLOCKS = blocks_of(PAGE)
ADDRESSES = {"node1": "192.168.1.11", "node2": "192.168.1.12"}
ROUTER = "192.168.1.1"


def file_of(path: str) -> str:
    """Return the lines of the page for a file of the system."""
    return next(block.text for block in BLOCKS if block.language == "text" and block.mark == path)


def commands(program: str) -> list[list[str]]:
    """Return the words of each command of the page that runs a program, without sudo."""
    shells = [block for block in BLOCKS if block.language in ("sh", "console")]
    lines = [line for block in shells for line in block.commands()]
    parts = [part.strip() for line in lines for part in re.split("&&", line)]
    return [
        words for part in parts if (words := shlex.split(part.removeprefix("sudo ")))[0] == program
    ]


def test_the_files_of_the_page_agree_on_the_addresses() -> None:
    hosts = dict(line.split()[::-1] for line in file_of("/etc/hosts").splitlines())
    assert hosts == ADDRESSES
    assert all(ip_address(address).is_private for address in hosts.values())
    plan = yaml.safe_load(next(block.text for block in BLOCKS if block.language == "yaml"))
    assert set(plan) == {"network"}
    assert set(plan["network"]) == {"version", "ethernets"} and plan["network"]["version"] == 2
    [card] = plan["network"]["ethernets"].values()
    assert card == {
        "dhcp4": False,
        "addresses": [f"{ADDRESSES['node1']}/24"],
        "routes": [{"to": "default", "via": ROUTER}],
        "nameservers": {"addresses": [ROUTER]},
    }
    [own] = map(ip_interface, card["addresses"])
    assert all(ip_address(other) in own.network for other in [*hosts.values(), ROUTER])
    assert file_of("/etc/exports").startswith(f"/srv/phalanx {ADDRESSES['node2']}(rw,")
    server, folder, kind, _, dump, check = file_of("/etc/fstab").split()
    assert (server, folder, kind, dump, check) == (
        "node1:/srv/phalanx",
        "/srv/phalanx",
        "nfs",
        "0",
        "0",
    )


def test_the_commands_that_change_a_system_have_the_addresses_and_names() -> None:
    assert ["hostnamectl", "set-hostname", "node1"] in commands("hostnamectl")
    modify, up = commands("nmcli")
    assert modify[:3] == ["nmcli", "connection", "modify"]
    assert up == ["nmcli", "connection", "up", modify[3]]
    assert dict(zip(modify[4::2], modify[5::2], strict=True)) == {
        "ipv4.method": "manual",
        "ipv4.addresses": f"{ADDRESSES['node1']}/24",
        "ipv4.gateway": ROUTER,
        "ipv4.dns": ROUTER,
    }
    other = ADDRESSES["node2"]
    assert commands("ufw") == [["ufw", "allow", "from", other]]
    assert f"--add-source={other}" in commands("firewall-cmd")[0]


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "sh"], ids=lambda block: block.where
)
def test_a_shell_accepts_the_commands(block: Block) -> None:
    done = subprocess.run(["sh", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_a_gigabit_follows_from_its_formulas() -> None:
    rows = re.findall(r"^\| `([\w.-]+)`[^|]*\|(.* s) \|$", PAGE.read_text(), re.MULTILINE)
    sizes = {"demo": 5_080_832, "gpt2-124m": 124_439_808, "llama3-1b": 1_235_814_400}
    assert [name for name, _ in rows] == list(sizes)
    for name, cells in rows:
        of_page = [float(cell.removesuffix(" s")) for cell in map(str.strip, cells.split("|"))]
        parameters, bytes_per_s = sizes[name], 117_685_305
        expected = [
            *(width * parameters / bytes_per_s for width in (4, 2)),
            *(6 * parameters * 8192 / rate for rate in (1e12, 1e14)),
        ]
        assert of_page == pytest.approx(expected, rel=0.006)


LAUNCHES = [
    pytest.param(command, id=f"{block.where}: {command}")
    for block in ALL
    if block.language == "sh"
    for command in block.commands()
    if command.startswith("phalanx launch ") and "--join" not in command
]


@pytest.mark.parametrize("command", LAUNCHES)
def test_the_launches_of_the_documents_are_legal(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, train = (shlex.split(each) for each in command.split(" -- "))
    assert main([*launch[1:], "--dry-run", "--", *train]) == 0
    assert "each host runs" in capsys.readouterr().out or "--print" in launch
    if "--config" not in train:
        assert main([*train, "--show-config"]) == 0


def run_script(tmp_path: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a command for node1, or without; skip where it may make no hosts."""
    done = subprocess.run(
        ["sh", str(SCRIPT), *words],
        cwd=tmp_path,
        env={**os.environ, "PHALANX_BIN": str(Path(sys.executable).parent), **settings},
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode == 2 and done.stderr.startswith("two_machines.sh: "):
        pytest.skip(done.stderr)
    return done


def processes_in(namespace: str) -> Iterator[Path]:
    """Yield the processes in a network namespace, such as net:[4026532]."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") == namespace:
                yield process
        except OSError:
            continue  # it has ended


LOOK = """
hostname; readlink /proc/self/ns/net; cat /etc/hosts; ping -c 2 -i 0.1 node2 || echo no ping
touch /srv/phalanx/seen; ssh node2 'hostname; readlink /proc/self/ns/net; ls /srv/phalanx'
"""


def test_the_script_makes_the_hosts_of_the_page_and_removes_them(tmp_path: Path) -> None:
    done = run_script(tmp_path, "sh", "-c", LOOK)
    name, namespace, *_ = lines = done.stdout.splitlines()
    assert name == "node1"
    assert set(file_of("/etc/hosts").splitlines()) < set(lines)
    if shutil.which("ping"):
        assert re.search(r"2 packets transmitted, 2 received", done.stdout)
    if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"):
        assert done.returncode == 0, done.stderr
        assert lines[-3] == "node2" and lines[-2] != namespace and lines[-1] == "seen"
        assert not [*processes_in(lines[-2])]
    assert not [*processes_in(namespace)]
    assert not Path("/srv/phalanx/seen").exists()


def test_ctrl_c_removes_the_hosts(tmp_path: Path) -> None:
    words = (
        "trap 'echo heeded; exit 7' INT; readlink /proc/self/ns/net; while :; do sleep 0.1; done"
    )
    with subprocess.Popen(
        # A shell cannot trap a signal that it inherits as ignored, as jobs in the background do.
        ["env", "--default-signal=INT", "sh", str(SCRIPT), "sh", "-c", words],
        env={**os.environ, "PHALANX_BIN": str(Path(sys.executable).parent)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        namespace = job.stdout.readline().strip()
        if not namespace:
            pytest.skip("needs the right to make namespaces")
        assert [*processes_in(namespace)]
        os.killpg(job.pid, signal.SIGINT)
        assert job.stdout.read() == "heeded\n"  # the command ends by itself first
    assert job.returncode == 130
    assert not [*processes_in(namespace)]


@pytest.mark.slow  # doctor, launch and torchrun start on both hosts
def test_the_script_checks_the_way_and_trains_with_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/squares.txt").write_text("".join(f"{n}**2 = {n * n}\n" for n in range(2000)))
    words = "train --strategy dp2 --steps 3 --data notes --threads 1 --eval-samples 8"
    done = run_script(tmp_path, TRAIN=f"{words}{TINY}")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^(node\d)\$ (?:(phalanx \w+|torchrun)(.*))$", done.stdout, re.MULTILINE)
    programs = [(host, program) for host, program, _ in shown]
    has_ssh = ("node1", "phalanx launch") in programs
    assert has_ssh or "sshd is not installed" in done.stdout
    if has_ssh:
        doctor, launch, *_ = (f"{program}{words}" for _, program, words in shown)
        assert doctor.split() in commands("phalanx")
        assert "-- train" in launch
        of_page = next(words for words in commands("phalanx") if words[1] == "launch")
        assert launch.split()[: of_page.index("train")] == of_page[: of_page.index("train")]
        assert "[0 node1] checkpoint  /srv/phalanx/first/checkpoints/step-00000003" in done.stdout
    assert programs[-2:] == [("node2", "torchrun"), ("node1", "torchrun")]
    [of_page] = commands("torchrun")
    until = of_page.index("train")
    for host, _, text in shown[-2:]:
        words = shlex.split(text)
        rank = words.index("--node-rank") + 1
        assert words[rank] == str(int(host[-1]) - 1)
        words[rank] = "0"
        assert {*words[: words.index("train")]} == {*of_page[1:until]}
    assert "\ncheckpoint  /srv/phalanx/second/checkpoints/step-00000003" in done.stdout
