"""Faults planted between hosts in network namespaces: doctor and a run name each with its cure."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from namespaces import (
    HOSTS,
    SSH,
    SWITCH,
    THREE_HOSTS,
    ip,
    on_host,
    ssh_servers,
    switched,
)
from phalanx.planner import hardware

A, B = HOSTS
PORT = 29611
REFUSING = 'sh -c "echo Permission denied >&2; exit 255"'
"""An ssh that has no key of ours."""

pytestmark = pytest.mark.slow


def in_namespace(name: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", name, *words], check=True, timeout=20)


def write_hosts(*lines: str) -> None:
    """Write /etc/hosts of B, which asks for A."""
    text = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {B}", *lines, ""])
    (Path("/etc/netns") / B / "hosts").write_text(text)


def drop(*ports: int) -> None:
    """Let a firewall of A drop what it does not know, except connections to `ports`."""
    if shutil.which("nft") is None:
        pytest.skip("needs nft")
    known = f"tcp dport {{ 22, {', '.join(map(str, ports))} }} accept;"
    known += " ct state established,related accept; ip protocol tcp drop;"
    rules = f"table inet fire {{ chain inward {{ type filter hook input priority 0; {known} }}; }}"
    in_namespace(A, "nft", rules)


def limit(host: str, *words: str) -> None:
    """Limit what the switch sends to a host."""
    in_namespace(SWITCH, *f"tc qdisc add dev {host} root".split(), *words)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of host B, or of its link to A, and the words that name it.

    Attributes:
        plant: makes the fault in the namespaces.
        shell: commands that come before each process of B; {out} is the folder of the run.
        code: Python that comes before each command of phalanx on B; {folder} has fake packages.
        doctor: what doctor says on B, asked for A.
        run: what a run says, if other words.
    """

    doctor: str
    run: str = ""
    plant: Callable[[], object] = lambda: None
    shell: str = ""
    code: str = ""


FAULTS = {
    "unknown name": Fault(
        plant=write_hosts, doctor=f"the name {A} is unknown on {B}; in /etc/hosts of {B}, add"
    ),
    "127.0.1.1": Fault(
        plant=lambda: write_hosts(f"127.0.1.1 {A}"),
        doctor=f"{A} resolves to 127.0.1.1, {B} itself, on {B}; in /etc/hosts of {B}, replace",
    ),
    "no route": Fault(
        plant=lambda: in_namespace(B, *"ip route del 10.77.1.0/24".split()),
        doctor=rf"{B} has no route to {A} \(10.77.1.1\); give an interface of {B} an address",
    ),
    "dropped port": Fault(
        plant=drop, doctor=rf"to {A}:{PORT} .* a firewall drops them.*; on {A}, open all TCP ports"
    ),
    "dropped further ports": Fault(
        plant=lambda: drop(PORT),
        doctor=rf"to {A}:\d+ .* a firewall drops them.*; on {A}, open all TCP ports to 10.77.1.2",
    ),
    "MTU": Fault(
        plant=lambda: ip("-n", SWITCH, "link", "set", A, "mtu", "1400"),
        doctor=r"with more than 1348 bytes of data vanish, .*; set one MTU .* mtu 1400",
    ),
    "10 Mbit/s one way": Fault(
        plant=lambda: limit(A, *"tbf rate 10mbit burst 32kb latency 50ms".split()),
        doctor=rf"only the way from {B} to {A} is slow: try another cable",
    ),
    "clock": Fault(
        code="import time; real = time.time; time.time = lambda: real() + 3600",
        doctor=rf"the clock of {A} is 3,600 s behind .*; set both by: sudo timedatectl",
        run=rf"the clock of {B} is 3,600 s ahead .*; set both by: sudo timedatectl",
    ),
    "torch": Fault(
        code="import sys; sys.path.insert(0, '{folder}/torch')",
        doctor=rf"torch is 9.9.9 on {B}, but [\d.]+ on {A}; install the same",
        run=r"version of torch \([\d.]+ on rank 0, 9.9.9 on rank 1\); give all hosts the same",
    ),
    "phalanx": Fault(
        code="import sys; sys.path.insert(0, '{folder}/phalanx_train')",
        doctor=rf"phalanx is 9.9.9 on {B}, but [\d.]+ on {A}; install the same",
        run=r"version of phalanx \([\d.]+ on rank 0, 9.9.9 on rank 1\); give all hosts the same",
    ),
    "folder": Fault(
        shell="mount -t tmpfs none {out};",
        doctor=rf"{{out}} on {A} is not the folder of {B} with this name; share it",
        run=rf"{{out}}/checkpoints on {B} is not the folder that rank 0 writes to; give an --out",
    ),
    "full disk": Fault(
        shell="mount -t tmpfs -o size=8k none {out}; head -c 8192 /dev/zero > {out}/full;",
        doctor=rf"{{out}} on {B} has 0 bytes left.*; make room",
        run=r"cannot write to {out}: No space left on device; give another --out",
    ),
    "open files": Fault(
        shell="ulimit -n 200;",
        doctor=rf"may open 200 files on {B}; 4 ranks need \d+; on {B}, add",
        run=r"2 ranks need \d+ open files on rank 0, but it may open 200: .*; raise the limit",
    ),
}


@pytest.fixture
def hosts() -> Generator[None]:
    with switched(HOSTS), ssh_servers(HOSTS):
        yield


def phalanx(host: str, *words: str, shell: str = "", code: str = "") -> list[str]:
    """Return the command of phalanx on a host, below commands of a shell and statements."""
    code += "\nimport sys\nfrom phalanx.cli.main import main\nsys.exit(main())"
    command = shlex.join([sys.executable, "-c", code, *words])
    return on_host(host, "unshare", "-m", "sh", "-c", f"{shell} exec {command}")


def ask(host: str, *words: str, ssh: str = SSH, shell: str = "", code: str = "") -> tuple[int, str]:
    """Run doctor on a host; return its exit code and its findings, a line each."""
    done = subprocess.run(
        phalanx(host, "doctor", *words, "--ssh", ssh, "--json", shell=shell, code=code),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout, done.stderr
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 100
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    return done.returncode, "\n".join(
        f"{each['text']}; {each['cure']}" if each["cure"] else each["text"] for each in findings
    )


def until_named(words: str, commands: Sequence[list[str]]) -> str:
    """Run ranks until one prints the words, or all have ended; return the output until then."""
    processes = [
        subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for each in commands
    ]
    lines: list[str] = []
    is_over, num_open = threading.Event(), len(processes)

    def read(process: subprocess.Popen[str]) -> None:
        nonlocal num_open
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if re.search(words, line):
                    is_over.set()
        num_open -= 1
        if not num_open:
            is_over.set()

    threads = [threading.Thread(target=read, args=(each,)) for each in processes]
    for thread in threads:
        thread.start()
    is_over.wait(240)
    for process, thread in zip(processes, threads, strict=True):
        process.kill()
        process.wait()
        thread.join()
    return "".join(lines)


def ranks(folder: Path, shell: str = "", code: str = "") -> list[list[str]]:
    """Return the commands of a run of two ranks; the second is on B."""
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    model = "--shape.num-layers 1 --shape.hidden 16 --shape.num-heads 2 --shape.num-kv-heads 1 "
    model += "--shape.head-dim 8 --shape.ffn 24 --shape.vocab-size 300 --corpus.seq-len 24 "
    model += "--batch.global-size 8 --batch.microbatch 2 --eval-every 0 --threads 1 --device cpu"
    words = f"train --strategy dp2 --steps 2 --data {folder}/text.txt --out {folder}/out {model}"
    commands: list[list[str]] = []
    for rank, host in enumerate(HOSTS):
        variables = f"export RANK={rank} WORLD_SIZE=2 MASTER_ADDR={A} MASTER_PORT={PORT} "
        variables += f"XDG_CACHE_HOME={folder}/cache-{rank};"
        own = (shell, code) if rank else ("", "")
        commands.append(phalanx(host, *words.split(), shell=variables + own[0], code=own[1]))
    return commands


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("hosts")
def test_a_fault_is_named_by_doctor_and_by_a_run(name: str, tmp_path: Path) -> None:
    fault, out = FAULTS[name], tmp_path / "out"
    out.mkdir()
    for package in ("torch", "phalanx_train"):
        folder = tmp_path / package / f"{package}-9.9.9.dist-info"
        folder.mkdir(parents=True)
        name_of = package.replace("_", "-")
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name_of}\nVersion: 9.9.9\n"
        )
    fault.plant()
    shell, code = fault.shell.format(out=out), fault.code.format(folder=tmp_path)
    words = ["--peer", A, "--port", str(PORT), "--out", str(out)]
    exit_code, findings = ask(B, *words, shell=shell, code=code)
    assert exit_code == 1
    assert re.search(fault.doctor.replace("{out}", str(out)), findings), findings
    commands = ranks(tmp_path, shell, code)
    if name in ("full disk", "open files"):  # rank 0 writes, and has most connections
        commands = ranks(tmp_path)
        commands[0] = [each.replace("export", f"{shell} export", 1) for each in commands[0]]
    of_run = (fault.run or fault.doctor).replace("{out}", str(out))
    printed = until_named(of_run, commands)
    assert re.search(of_run, printed), printed


@pytest.mark.usefixtures("hosts")
def test_no_ssh_key_is_named(tmp_path: Path) -> None:
    exit_code, findings = ask(A, "--peer", B, "--out", str(tmp_path), ssh=REFUSING)
    assert exit_code == 1
    assert f"host {B}: ssh is not let in; give it your key by: ssh-copy-id {B}" in findings
    launch = ["launch", "--hosts", f"{A}:1,{B}:1", "--ssh", REFUSING, "--", "train"]
    done = subprocess.run(phalanx(A, *launch), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert f"host {B}: ssh is not let in; give it your key by: ssh-copy-id {B}" in done.stderr


@pytest.mark.usefixtures("hosts")
def test_launch_starts_no_rank_on_this_host_in_place_of_another() -> None:
    write_hosts(f"127.0.1.1 {A}")
    launch = ["launch", "--hosts", f"{A}:1,{B}:1", "--ssh", SSH, "--", "train"]
    done = subprocess.run(phalanx(B, *launch), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert f"the name {A} resolves to 127.0.1.1, {B} itself, on {B}; in" in done.stderr


def test_three_hosts_without_a_fault(tmp_path: Path) -> None:
    a, b, c = THREE_HOSTS
    with switched(THREE_HOSTS), ssh_servers(THREE_HOSTS):
        limit(c, *"tbf rate 100mbit burst 32kb latency 50ms".split())
        in_namespace(
            c, *"tc qdisc add dev v0 root tbf rate 100mbit burst 32kb latency 50ms".split()
        )
        file = tmp_path / "cluster.json"
        words = ["--hosts", f"{a}:2,{b}:2,{c}:2", "--out", str(tmp_path), "--write", str(file)]
        done = subprocess.run(
            phalanx(a, "doctor", *words, "--ssh", SSH, "--json"),
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    document = json.loads(done.stdout.splitlines()[-1])
    assert len(document["links"]) == 6 and document["num_faults"] == 0
    slow = [each for each in document["links"] if c in (each["from"], each["to"])]
    assert all(each["TCP"] < 105e6 / 8 < 150e6 / 8 < 1e9 for each in slow)
    slowest = re.search(r"slowest: (\S+) to (\S+), ", done.stdout)
    assert slowest is not None and c in slowest.groups()
    cluster = hardware.cluster(str(file))
    assert cluster.num_devices >= 3
    assert cluster.levels[-1].link.bandwidth < 105e6 / 8 / 2  # each of two ranks has a half


RECEIVE = """
import socket, time
listener = socket.create_server(("", 7070))
print("listening", flush=True)
stream, _ = listener.accept()
first = total = 0
while data := stream.recv(1 << 20):
    first = first or time.perf_counter()
    total += len(data)
print(total / (time.perf_counter() - first))
"""
SEND = """
import socket, sys
stream = socket.create_connection((sys.argv[1], 7070))
for _ in range(int(sys.argv[2])):
    stream.sendall(bytes(1 << 17))
"""


@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
@pytest.mark.usefixtures("hosts")
def test_bandwidth_is_that_of_a_plain_stream(rate: str, tmp_path: Path) -> None:
    for name in HOSTS:
        limit(name, *f"tbf rate {rate} burst 128kb latency 50ms".split())
    receiver = subprocess.Popen(
        on_host(B, sys.executable, "-c", RECEIVE), stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    num = 100 if rate == "100mbit" else 1000
    subprocess.run(on_host(A, sys.executable, "-c", SEND, B, str(num)), check=True, timeout=60)
    plain = float(receiver.communicate(timeout=60)[0])
    words = ["doctor", "--peer", B, "--out", str(tmp_path), "--ssh", SSH, "--json"]
    done = subprocess.run(phalanx(A, *words), capture_output=True, text=True, timeout=240)
    links = json.loads(done.stdout.splitlines()[-1])["links"]
    assert [each["TCP"] for each in links] == pytest.approx([plain, plain], rel=0.1)
