"""`phalanx doctor --peer` and `--hosts`: check hosts and the links of all pairs of them.

An agent runs on each host: in this process, at `phalanx doctor --listen`, or started by ssh
(`python -m phalanx.cli.doctor_hosts`). It answers one JSON object a line with another:

    {"do": "way", "peer": "b", "port": null}    ->    {"answer": [{"check": "name", ...}, ...]}
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import secrets
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import IO, Any, Final

from phalanx.account import host as memory
from phalanx.errors import ConfigError
from phalanx.launch import link
from phalanx.launch.link import Finding, Responder
from phalanx.launch.local import num_cores
from phalanx.planner import calibration_file
from phalanx.planner.calibration_file import Calibration
from phalanx.planner.machine import Level, Link
from phalanx.report.tabular import Cell, Line, Table
from phalanx.report.terminal import Terminal
from phalanx.report.units import GIB, size_text, time_text
from phalanx.storage import existing

PORT: Final = 29500
"""Port of `--listen`, and by default of the store of torchrun."""

BANDWIDTH_S: Final = 1.2
"""Seconds of a bandwidth measurement of one way."""

SHOWN: Final = 4
"""Most sound findings of one check that are printed."""

TORCH_S: Final = 60.0
"""Longest time, in seconds, of the checks that load torch."""

LEAST_FREE: Final = 100 << 20
"""Bytes below which a disk counts as full."""

MARK: Final = ".phalanx-doctor-"
"""Begin of the name of a file that shows hosts that they see one folder."""

Values = dict[str, Any]


# What an agent does.


def facts(out: str) -> Values:
    """Return name, versions and limits of this host, without loading torch."""
    versions: dict[str, str] = {"Python": platform.python_version()}
    for name in ("phalanx-train", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with suppress(metadata.PackageNotFoundError):
            short = {"phalanx-train": "phalanx", "torch": "torch"}.get(name, "NCCL")
            versions[short] = metadata.version(name)
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        versions["driver"] = next(iter(re.findall(r"\d+\.\d+(?:\.\d+)?", text)), "unknown")
    folder = existing(Path(out))
    return {
        "name": socket.gethostname(),
        "versions": versions,
        "num_cores": num_cores(),
        "memory_bytes": memory.free_memory_bytes(),
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(folder).free,
    }


_responders: list[Responder] = []


def respond(ports: list[int]) -> list[int]:
    """Answer the checks of other hosts, at the ports that are free; return them."""
    for port in ports:
        with suppress(OSError):
            _responders.append(Responder(port))
    return [responder.port for responder in _responders]


def way(peer: str) -> list[Values]:
    """Return the findings of `link.way`."""
    return [asdict(finding) for finding in link.way(peer)]


def passing(peer: str, address: str, port: int) -> list[Values]:
    """Return the findings of `link.passing`."""
    try:
        return [asdict(finding) for finding in link.passing(peer, address, port)]
    except OSError:
        return [asdict(link.reach(peer, address, port, is_alive=True))]


def bandwidth(peer: str, address: str, port: int) -> list[Values]:
    """Return the finding of `link.bandwidth`."""
    return [asdict(link.bandwidth(peer, address, port, BANDWIDTH_S, 1 << 40))]


def reach(peer: str, address: str, port: int) -> list[Values]:
    """Return the finding of `link.reach`."""
    return [asdict(link.reach(peer, address, port, is_alive=True))]


def free_port() -> int:
    """Return a port at which nobody listens."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def mark(folder: str, name: str) -> str:
    """Create an empty file, or remove it if it exists; return why not, or ""."""
    path = Path(folder) / name
    try:
        if path.exists():
            path.unlink()
        else:
            path.write_bytes(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def sees(folder: str, name: str) -> bool:
    """Return whether the folder has a file of this name; a network disk has some time."""
    until_s = time.monotonic() + link.LIMIT_S
    while name.startswith(MARK) and Path(folder).is_dir():
        if name in os.listdir(folder):
            return True
        if time.monotonic() > until_s:
            break
        time.sleep(0.1)
    return False


def in_torch(**arguments: Any) -> Values:
    """Return the environment, and the rates that `_in_torch` measures, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else "", json.dumps(arguments)]
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": arguments["interface"]}
    environment = {**os.environ, **{name: text for name, text in variables.items() if text}}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it has not ended in {TORCH_S:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _in_torch(arguments: Values) -> Values:
    """Time messages of gloo, and with GPUs of NCCL, from each host to each, as one of the ranks."""
    import torch
    import torch.distributed as dist

    from phalanx.comm import join
    from phalanx.measure.environment import environment

    rank, num, sizes = arguments["rank"], arguments["num"], arguments["sizes"]
    result: Values = {"environment": environment(), "links": {}}
    if num == 1:
        return result
    store = dist.TCPStore(
        arguments["address"], arguments["port"], num, rank == 0, wait_for_workers=False
    )
    store.add("GPUs", int(torch.cuda.is_available()))
    for backend, device in (("gloo", "cpu"), ("NCCL", "cuda")):
        own_store = dist.PrefixStore(backend, store)
        join.join(rank, num, store=own_store, device=device, timeout_s=TORCH_S / 2)
        has_gpus = store.add("GPUs", 0) == num  # before the last barrier: rank 0 has the store
        for source, target in permutations(range(num), 2):
            if rank not in (source, target):
                continue
            whole = torch.zeros(sizes[source][target], dtype=torch.uint8, device=device)
            small, times_s = whole[:1].clone(), list[float]()
            for turn in range(12):  # the first message opens the connection
                message = whole if turn % 4 == 3 else small
                begun_s = time.perf_counter()
                if rank == source:
                    dist.send(message, target)
                    dist.recv(small, target)
                else:
                    dist.recv(message, source)
                    dist.send(small, source)
                small.sum().item()  # on a GPU, the answer has arrived now
                times_s.append(time.perf_counter() - begun_s)
            if rank == source:
                latency_s = statistics.median(times_s[4:7] + times_s[8:11]) / 2
                fastest_s = max(min(times_s[7], times_s[11]) - latency_s, 1e-6)
                links = result["links"].setdefault(backend, {})
                links[target] = (latency_s, whole.nbytes / fastest_s)
        dist.barrier()
        if not has_gpus:
            break
        dist.destroy_process_group()
    return result


ACTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    of.__name__: of
    for of in (*(facts, respond, way, reach, passing, bandwidth, mark, sees, free_port, in_torch),)
}
"""Name -> what an agent does."""

OF_STRANGERS: Final = {*ACTIONS} - {"mark"}
"""What `--listen` does for whoever reaches its port: nothing that changes this host."""


def answer(requests: IO[str], answers: IO[str], allowed: Iterable[str]) -> None:
    """Do what each line asks, until the lines end."""
    for line in requests:
        request: Values = json.loads(line)
        name = request.pop("do")
        if name not in allowed:
            break
        answers.write(json.dumps({"answer": ACTIONS[name](**request)}) + "\n")
        answers.flush()


def listen(port: int, terminal: Terminal) -> None:
    """Answer one `--peer` after another, until a signal ends this process.

    Raises:
        ConfigError: another process has the port.
    """
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen at port {port}: {error.strerror}; give another to both (--port)"
        ) from None
    terminal.say(
        f"listening at port {port}; on the other host: phalanx doctor --peer "
        f"{socket.gethostname()}{'' if port == PORT else f' --port {port}'}"
    )
    while True:
        connection, (address, *_) = listener.accept()
        with connection, connection.makefile("rw") as lines:
            connection.settimeout(link.LIMIT_S)  # whoever does not ask at once is no doctor
            with suppress(OSError, ValueError, TypeError):
                if json.loads(lines.readline()) == {"do": "hello"}:
                    lines.write(json.dumps({"answer": "phalanx"}) + "\n")
                    lines.flush()
                    connection.settimeout(None)
                    terminal.say(f"{address} asks")
                    answer(lines, lines, OF_STRANGERS)


# What the doctor asks.


class Agent:
    """The agent of a host, which this process asks; without streams, this process is the agent."""

    def __init__(self, name: str, streams: tuple[IO[str], IO[str]] | None = None) -> None:
        self.name = name
        self._streams = streams
        self.facts: Values = {}
        self.ports: list[int] = []

    def ask(self, action: str, **arguments: Any) -> Any:
        """Return what an action returns on the host.

        Raises:
            OSError: the host, or its agent, has gone.
        """
        if self._streams is None:
            return ACTIONS[action](**arguments)
        answers, requests = self._streams
        requests.write(json.dumps({"do": action, **arguments}) + "\n")
        requests.flush()
        for line in answers:
            if line.startswith('{"answer": '):  # a login shell may print other lines
                return json.loads(line)["answer"]
        raise ConnectionResetError(f"the agent on {self.name} has ended")


def by_port(name: str, port: int) -> Agent | None:
    """Return the agent of `phalanx doctor --listen` on a host, if it listens."""
    with suppress(OSError, ValueError):
        connection = socket.create_connection((name, port), link.LIMIT_S)
        lines = connection.makefile("rw")
        agent = Agent(name, (lines, lines))
        connection.settimeout(link.LIMIT_S)
        if agent.ask("hello") == "phalanx":
            connection.settimeout(None)
            return agent
    return None


def by_ssh(name: str, ssh: str) -> tuple[Agent | None, Finding]:
    """Start an agent on a host, in the folder and by the Python of this process."""
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    command = f"cd {folder} 2>/dev/null; exec {python} -m phalanx.cli.doctor_hosts"
    words = [*shlex.split(ssh), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", name, command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    agent = Agent(name, (process.stdout, process.stdin))
    try:
        agent.ask("respond", ports=[])
        return agent, Finding(check="ssh", text=f"to {name} without a password")
    except OSError:
        _, words_of_ssh = process.communicate()
        return None, link.ssh_finding(name, process.returncode, words_of_ssh, sys.executable)


class Examination:
    """The checks of hosts and of the links of all their pairs, each printed as it is made."""

    def __init__(
        self,
        names: Sequence[str],
        num_ranks: Mapping[str, int],
        terminal: Terminal,
        *,
        ssh: str,
        port: int,
        out: str,
        may_listen: bool,
    ) -> None:
        """Prepare the checks.

        Args:
            names: the hosts, by their names in the job.
            num_ranks: host -> its ranks; other hosts have one for each core.
            terminal: where to print.
            ssh: the command ssh.
            port: port of the job's store, and of `phalanx doctor --listen`.
            out: folder of the run, which all hosts must share.
            may_listen: whether a user may have started the agent of another host.
        """
        self._names, self._num_ranks, self._terminal = names, num_ranks, terminal
        self._ssh, self._port, self._out, self._may_listen = ssh, port, out, may_listen
        self._broken: set[str] = set()
        self._agents: dict[str, Agent] = {}
        self._address: dict[tuple[str, str], str] = {}
        self.findings: list[tuple[str, Finding]] = []
        self.hosts: dict[str, Values] = {}
        self.links: dict[tuple[str, str], Values] = {}

    @property
    def num_faults(self) -> int:
        """The number of findings with a cure."""
        return sum(bool(finding.cure) for _, finding in self.findings)

    def _show(self, findings: Iterable[tuple[str, Finding]]) -> None:
        """Print findings, check by check: each fault with its cure, the others in short."""
        findings = [*findings]
        self.findings += findings
        for check in dict.fromkeys(finding.check for _, finding in findings):
            of_check = [(where, each) for where, each in findings if each.check == check]
            sound = [each.text for _, each in of_check if not each.cure]
            if len(sound) > SHOWN:
                sound = [f"{len(sound)} of {len(of_check)}, such as: {sound[0]}"]
            rows = [("ok", "green", "\n".join(sound))] if sound else []
            for where, each in of_check:
                if each.cure:
                    rows.append(("FAULT", "bold red", f"{each.text}\ncure: {each.cure}"))
                if each.is_end:
                    self._broken.add(where)
            for word, style, text in rows:
                cells = [Line(word.ljust(5), style), Line(check.ljust(10)), text]
                self._terminal.show(Table("", ("", "", ""), [cells]))

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the ordered pairs of hosts with an agent, between which nothing is broken."""
        names = [name for name in self._names if name in self._agents]
        is_broken = {where for pair in self._broken for where in (pair, _turned(pair))}
        return [pair for pair in permutations(names, 2) if " ".join(pair) not in is_broken]

    def _add_way(
        self, source: str, target: str, findings: Sequence[Finding]
    ) -> list[tuple[str, Finding]]:
        values = {name: value for each in findings for name, value in each.values.items()}
        self._address[source, target] = values.get("address", "")
        self.links[source, target] = values
        return [(f"{source} {target}", each) for each in findings]

    def run(self) -> None:
        """Make all checks; a link that an earlier check breaks has no later ones.

        Raises:
            OSError: a host is lost meanwhile.
        """
        self._agents = {name: Agent(name) for name in self._names if is_local(name)}
        local = next(iter(self._agents), socket.gethostname())
        # From this host to each, which needs no agent there; then an agent on each.
        for other in self._names:
            if other not in self._agents:
                self._show(self._add_way(local, other, [*link.way(other)]))
                if f"{local} {other}" not in self._broken:
                    self._start_agent(local, other)
        findings: list[tuple[str, Finding]] = []
        for source, target in self._pairs():
            if (source, target) not in self.links:
                answers = self._agents[source].ask("way", peer=target)
                findings += self._add_way(source, target, [Finding(**each) for each in answers])
        self._show(findings)
        asked = {name: agent.ask("facts", out=self._out) for name, agent in self._agents.items()}
        self.hosts = {name: asked[name] for name in self._names if name in asked}
        self._show(self._of_hosts())
        for action in ("reach", "passing", "bandwidth"):
            findings = []
            # The port of the store, and one that the kernel chooses as for gloo and NCCL.
            ports = {
                name: agent.ask("respond", ports=[self._port, 0])
                for name, agent in self._agents.items()
            }
            for source, target in self._pairs():
                if action != "reach" and self._names.index(source) > self._names.index(target):
                    continue  # one host of a pair asks, for both ways
                address = self._address[source, target]
                for port in ports[target] if action == "reach" else ports[target][-1:]:
                    answers = self._agents[source].ask(
                        action, peer=target, address=address, port=port
                    )
                    findings += [(f"{source} {target}", Finding(**each)) for each in answers]
            self._show(findings)
            for where, finding in findings:
                if finding.check == "TCP":
                    a, b = where.split(" ")
                    self.links[a, b]["TCP"] = finding.values["to_bytes_per_s"]
                    self.links[b, a]["TCP"] = finding.values["from_bytes_per_s"]
        self._measure_in_torch()

    def _start_agent(self, local: str, name: str) -> None:
        agent, finding = by_port(name, self._port) if self._may_listen else None, None
        if agent is None:
            agent, finding = by_ssh(name, self._ssh)
            self._show([(f"{local} {name}", finding)])
        if agent is not None:
            self._agents[name] = agent
        elif self._may_listen:  # is it that nobody listens, or that a firewall drops the port?
            self._show((f"{local} {name}", each) for each in [*link.way(name, self._port)][-1:])

    def _of_hosts(self) -> Iterable[tuple[str, Finding]]:
        """Compare versions, limits and the folder of the run between the hosts."""
        first, *others = self.hosts
        for name in others:
            if self.hosts[name]["name"] == self.hosts[first]["name"]:
                yield (
                    name,
                    Finding(
                        check="name",
                        text=f"the host name of {first} and {name} is {self.hosts[name]['name']}",
                        cure="sudo hostnamectl set-hostname ANOTHER on one, and in /etc/hosts",
                    ),
                )
            versions, theirs = self.hosts[first]["versions"], self.hosts[name]["versions"]
            for package in [each for each in versions | theirs if each != "driver"]:
                pair = [each.get(package, "none").partition("+")[0] for each in (versions, theirs)]
                if package == "Python":
                    pair = [each.rpartition(".")[0] for each in pair]
                if pair[0] != pair[1]:
                    yield (
                        name,
                        Finding(
                            check="versions",
                            text=f"{package} is {pair[0]} on {first}, {pair[1]} on {name}",
                            cure=f"install the same on both, for example {package} {pair[0]} on "
                            f"{name}; a copy of the whole environment at the same path is simplest",
                        ),
                    )
        texts = [", ".join(map(" ".join, each["versions"].items())) for each in self.hosts.values()]
        yield "", Finding(check="versions", text=" | ".join(dict.fromkeys(texts)))
        from phalanx.comm.join import num_files

        total = sum(self._num_ranks.get(n) or h["num_cores"] for n, h in self.hosts.items())
        needed = num_files({"dp": total}, total, "cpu")
        least = min(self.hosts, key=lambda name: self.hosts[name]["most_files"])
        most = self.hosts[least]["most_files"]
        cure = (
            f"on {least}, add '* hard nofile {max(4096, needed)}' to /etc/security/limits.conf, "
            "and log in again"
        )
        yield (
            least,
            Finding(
                check="files",
                text=f"a process may open {most:,} files on {least}; {total} ranks need {needed:,}",
                cure=cure if most < needed else "",
            ),
        )
        for name, asked in self.hosts.items():
            free = f"{asked['memory_bytes'] / GIB:.1f} GiB of free memory"
            yield name, Finding(check="machine", text=f"{name}: {asked['num_cores']} cores, {free}")
        yield from self._of_folder()

    def _of_folder(self) -> Iterable[tuple[str, Finding]]:
        """Check that the folder of --out is one on all hosts, by a file, and that it has space."""
        marker = next((n for n in self.hosts if is_local(n)), next(iter(self.hosts)))
        folder, name = self.hosts[marker]["folder"], f"{MARK}{secrets.token_hex(8)}"
        why = self._agents[marker].ask("mark", folder=folder, name=name)
        for host, facts_of in self.hosts.items():
            free, cure = facts_of["free_bytes"], ""
            if free < LEAST_FREE or (host == marker and why):
                text = f"{folder} on {host} has {size_text(free)} left{why and f': {why}'}"
                cure = (
                    "make room (`du -xh --max-depth=1` lists what is large), or give another --out"
                )
            elif not why and not self._agents[host].ask("sees", folder=folder, name=name):
                text = f"{folder} on {host} is not the folder that {marker} has under this name"
                cure = (
                    f"share one disk: on {marker} `sudo exportfs -o rw,no_root_squash "
                    f"{host}:{folder}`, on {host} `sudo mount {marker}:{folder} {folder}`; or give "
                    "an --out on a disk that all hosts share"
                )
            else:
                text = f"{folder} on {host} has {size_text(free)} left"
            yield host, Finding(check="folder", text=text, cure=cure)
        if not why:
            self._agents[marker].ask("mark", folder=folder, name=name)

    def _measure_in_torch(self) -> None:
        """Ask all hosts at once for devices, backends and the rates of gloo and NCCL."""
        names, pairs = [*self.hosts], self._pairs()
        is_whole = len(pairs) == len(self._names) * (len(self._names) - 1)
        sizes = [
            [min(max(int(self.links.get((a, b), {}).get("TCP", 0) / 4), 1 << 18), 1 << 25)
             for b in names] for a in names
        ]  # fmt: skip
        port = self._agents[names[0]].ask("free_port")
        with ThreadPoolExecutor(len(names)) as threads:
            asked = [
                threads.submit(
                    self._agents[name].ask,
                    "in_torch",
                    rank=rank,
                    num=len(names) if is_whole else 1,
                    sizes=sizes,
                    address=self._address[name, names[0]] if rank else "127.0.0.1",
                    port=port,
                    interface=self.links[name, names[rank == 0]]["interface"] if is_whole else "",
                )
                for rank, name in enumerate(names)
            ]
            results = [each.result() for each in asked]
        for name, result in zip(names, results, strict=True):
            if "error" in result:
                text = f"gloo on {name} does not connect: {result['error']}"
                self._show([(name, Finding(check="gloo", text=text, cure="see the checks above"))])
                continue
            environment = self.hosts[name]["environment"] = result["environment"]
            backends = ", ".join(of for of, has in environment["backends"].items() if has)
            gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or "no GPU"
            self._show([(name, Finding(check="backends", text=f"{name}: {backends}; {gpus}"))])
            for backend, rates in result["links"].items():
                for other, values in rates.items():
                    self.links[name, names[int(other)]][backend] = values
        for a, b in pairs if is_whole else []:
            for backend in ("gloo", "NCCL"):
                if a < b and backend in self.links[a, b] and backend in self.links[b, a]:
                    to, back = (self.links[pair][backend][1] for pair in ((a, b), (b, a)))
                    text = link.both_ways(a, b, to, back)
                    self._show([(f"{a} {b}", Finding(check=backend, text=text))])

    def matrix(self) -> Table:
        """Return the round trip and bandwidth from each host to each."""
        rows = []
        for source in self.hosts:
            cells: list[Cell] = [Line(source, "bold")]
            for target in self.hosts:
                values: Values = self.links.get((source, target), {})
                parts = []
                if "median_s" in values:
                    parts.append(time_text(values["median_s"]))
                if "TCP" in values:
                    parts.append(link.rate_text(values["TCP"]))
                cells.append(", ".join(parts) if source != target else "-")
            rows.append(cells)
        rated = {pair: values["TCP"] for pair, values in self.links.items() if "TCP" in values}
        note = ""
        if rated:
            source, target = min(rated, key=lambda pair: rated[pair])
            slowest = link.rate_text(rated[source, target])
            note = f"slowest: from {source} to {target}, {slowest}"
        return Table(
            "Round trip and TCP from each host (row) to each", ["", *self.hosts], rows, note=note
        )

    def as_dict(self) -> Values:
        """Return the document for --json: hosts, links, findings and the number of faults."""
        return {
            "hosts": self.hosts,
            "links": [{"from": a, "to": b, **values} for (a, b), values in self.links.items()],
            "findings": [{"of": where, **asdict(finding)} for where, finding in self.findings],
            "num_faults": self.num_faults,
        }

    def keep(self, path: Path) -> None:
        """Write the slowest link into a calibration file, which `phalanx plan --cluster` reads.

        Raises:
            ConfigError: not all links are measured.
        """
        is_known = len(self.links) == len(self._names) * (len(self._names) - 1)
        backend = "NCCL" if all("NCCL" in each for each in self.links.values()) else "gloo"
        if not is_known or not all(backend in each for each in self.links.values()):
            raise ConfigError(f"{path} is not written: the faults above keep links unmeasured")
        first = self.hosts[self._names[0]]["environment"]
        gpus = first["gpus"]
        num_here = len(gpus) if backend == "NCCL" else first["cpu"]["num_cores"]
        rates = [each[backend] for each in self.links.values()]
        num_sharing = max([1, *self._num_ranks.values()] if backend == "gloo" else [num_here])
        between = Link(
            name=f"{backend} between hosts",
            bandwidth=min(rate for _, rate in rates) / num_sharing,
            latency_s=max(latency_s for latency_s, _ in rates),
            source="measured by phalanx doctor",
            date=time.strftime("%Y-%m"),
        )
        num_hosts = len(self._names)
        level = Level(name="cluster", devices=num_hosts * num_here, link=between)
        machine = Calibration(
            kind="gpu" if backend == "NCCL" else "cpu",
            device_name=gpus[0]["name"] if backend == "NCCL" else first["cpu"]["name"],
            num_here=num_here,
            num_hosts=num_hosts,
            levels=(level,),
        )
        calibration_file.keep(path, machine)


def is_local(name: str) -> bool:
    """Return whether this process runs on the host `name`."""
    return name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0])


def main() -> None:
    """Be the agent that `by_ssh` starts, or the process of `in_torch`."""
    if len(sys.argv) > 1:
        print(json.dumps(_in_torch(json.loads(sys.argv[1]))), flush=True)
        os._exit(0)
    answer(sys.stdin, sys.stdout, ACTIONS)
    os._exit(0)


if __name__ == "__main__":
    main()


def _turned(pair: str) -> str:
    return " ".join(reversed(pair.split(" ")))
