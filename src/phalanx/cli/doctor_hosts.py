"""`phalanx doctor --peer` and `--hosts`: check hosts and the links of all pairs of them.

An agent answers on each host: in this process, at `phalanx doctor --listen`, or started by ssh as
`python -m phalanx.cli.doctor_hosts`. A request and an answer are a JSON object, one a line:

    {"do": "way", "peer": "b"}    ->    {"answer": [{"check": "name", "text": "b is 10.0.0.2", ...
"""

from __future__ import annotations

import itertools
import json
import os
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from phalanx.account import host as memory
from phalanx.errors import ConfigError
from phalanx.launch import link
from phalanx.launch.agent import versions
from phalanx.launch.hosts import Host, LaunchRequest
from phalanx.launch.launcher import agent_command, why_no_agent
from phalanx.launch.link import Finding, Responder
from phalanx.launch.local import num_cores
from phalanx.planner import calibration_file
from phalanx.planner.calibration_file import Calibration
from phalanx.planner.machine import Level, Link
from phalanx.report.output import values_of
from phalanx.report.tabular import Line, Table
from phalanx.report.terminal import Terminal
from phalanx.report.units import GIB, MIB, size_text, time_text
from phalanx.storage import existing

if TYPE_CHECKING:
    from phalanx.cli.doctor import DoctorConfig

TORCH_S: Final = 60.0
"""Longest time, in seconds, of the checks that load torch."""

BANDWIDTH: Final = {"seconds": 1.0, "num_bytes": 1 << 40, "tries": 2}

LONGEST: Final = 1 << 16
"""Most characters of a request."""

MARK: Final = ".phalanx-doctor-"
"""Begin of the name of a file that shows whether hosts see one folder."""

Values = dict[str, Any]
Actions = Mapping[str, Callable[..., Any]]
Findings = list[tuple[str, Finding]]
"""Findings, each of a host, "a", or of a link, "a b"."""


# What an agent does.


def facts(out: str) -> Values:
    """Return name, versions and limits of this host, without loading torch."""
    package_versions, folder = versions(), existing(Path(out))
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with suppress(metadata.PackageNotFoundError):
            package_versions["NCCL"] = metadata.version(package)
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text()
        package_versions["driver"] = " ".join(re.findall(r" (\d+\.[\d.]+) ", driver)[:1])
    return {
        "name": socket.gethostname(),
        "versions": package_versions,
        "num_cores": num_cores(),
        "memory_bytes": memory.free_memory_bytes(),
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(folder).free,
    }


_responders: list[Responder] = []


def respond(ports: list[int]) -> list[int]:
    """Answer the checks of other hosts at the free ones among `ports` only."""
    while _responders:
        _responders.pop().close()
    for port in ports:
        with suppress(OSError):
            _responders.append(Responder(port))
    return [responder.port for responder in _responders]


def mark(folder: str, name: str) -> str:
    """Write a file of 4 KiB, or remove it if it exists; return why not, or ""."""
    path = Path(folder) / name
    try:
        path.unlink() if path.exists() else path.write_bytes(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def sees(folder: str, name: str) -> bool:
    """Return whether the folder has a file that `mark` wrote; a network disk has some time."""
    until_s = time.monotonic() + link.LIMIT_S
    while name.startswith(MARK) and Path(folder).is_dir() and time.monotonic() < until_s:
        if name in os.listdir(folder):
            return True
        time.sleep(0.1)
    return False


def in_torch(**arguments: Any) -> Values:
    """Return the result of `_in_torch` from a process of its own, or its error."""
    command = [sys.executable, "-P", "-m", "phalanx.cli.doctor_hosts", json.dumps(arguments)]
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": arguments["interface"]}
    environment = os.environ | {name: value for name, value in variables.items() if value}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_S, env=environment
        )
        lines = (done.stderr if done.returncode else done.stdout).splitlines()
        return {"error": lines[-1]} if done.returncode else json.loads(lines[-1])
    return {"error": f"it has not ended in {TORCH_S:g} s"}


def _in_torch(arguments: Values) -> Values:
    """Time messages of gloo, and with GPUs of NCCL, from each host to each, as one of the ranks.

    Returns `environment`, and by backend and target's rank `links`: seconds and bytes per second.
    """
    import torch
    import torch.distributed as dist

    from phalanx.comm import join
    from phalanx.measure.environment import environment

    rank, num, sizes = arguments["rank"], arguments["num"], arguments["sizes"]
    result: Values = {"environment": environment(), "links": {}}
    if num == 1:
        return result
    address, port = arguments["address"], arguments["port"]
    store = dist.TCPStore(address, port, num, rank == 0, wait_for_workers=False)
    store.add("GPUs", int(torch.cuda.is_available()))
    for backend, device in (("gloo", "cpu"), ("NCCL", "cuda")):
        own_store = dist.PrefixStore(backend, store)
        join.join(rank, num, store=own_store, device=device, timeout_s=TORCH_S / 2)
        has_gpus = store.add("GPUs", 0) == num  # before the last barrier: rank 0 has the store
        for source, target in itertools.permutations(range(num), 2):
            if rank not in (source, target):
                continue
            num_bytes = min(sizes[source][target], 1 << 25)
            whole = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
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


OF_STRANGERS: Final[Actions] = {
    "hello": lambda: "phalanx",
    **{of.__name__: of for of in (facts, respond, sees, in_torch)},
    **{of.__name__: of for of in (link.way, link.reach)},
}
"""What `--listen` does for whoever reaches its port: nothing that changes this host, or sends data
to a third."""

ACTIONS: Final[Actions] = OF_STRANGERS | {
    of.__name__: of for of in (mark, link.passing, link.bandwidth)
}
"""Name -> what an agent does for its own doctor."""


def answer(requests: Iterable[str], answers: IO[str], actions: Actions) -> None:
    """Do what each line asks, until the lines end."""
    for line in requests:
        answers.write(json.dumps({"answer": act(actions, **json.loads(line))}) + "\n")
        answers.flush()


def act(actions: Actions, do: str, **arguments: Any) -> Any:
    """Return what an action returns, as plain values; of a generator, the list of its findings."""
    result = actions[do](**arguments)
    return values_of([*result] if isinstance(result, Iterator) else result)


def listen(port: int, terminal: Terminal) -> None:
    """Answer one `--peer` after another, until a signal ends this process.

    Raises:
        ConfigError: another process has the port.
    """
    try:
        listener = link.listening(port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at port {port}: {error.strerror}; give another to both (--port)"
        ) from None
    peer = f"phalanx doctor --peer {socket.gethostname()} --port {port}"
    terminal.say(f"listening; on the other host: {peer}")
    while True:
        connection, (address, *_) = listener.accept()
        terminal.say(f"{address.removeprefix('::ffff:')} asks")
        # No stranger's words end this process, or hold it for long.
        with connection, connection.makefile("rw") as lines, suppress(Exception):
            connection.settimeout(link.LIMIT_S)
            answer([lines.readline(LONGEST)], lines, OF_STRANGERS)
            connection.settimeout(TORCH_S)
            answer(iter(partial(lines.readline, LONGEST), ""), lines, OF_STRANGERS)
        respond([])


# What the doctor asks.


class AgentClient:
    """The agent of a host, which this process asks; without a connection, it is this process."""

    def __init__(self, name: str, connection: socket.socket | None = None) -> None:
        self.name = name
        self._lines = None
        if connection is not None:  # a host that is lost without a word ends the wait for it
            connection.settimeout(2 * TORCH_S)
            self._lines = connection.makefile("rw")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return what an action returns on the host.

        Raises:
            OSError: the host, or its agent, has gone.
        """
        if self._lines is None:
            return act(ACTIONS, do, **arguments)
        self._lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self._lines.flush()
        for line in self._lines:
            if line.startswith('{"answer": '):  # a login shell may print other lines
                return json.loads(line)["answer"]
        raise ConnectionResetError(f"the agent on {self.name} has ended")

    def findings(self, do: str, peer: str, **arguments: Any) -> Findings:
        """Return the findings of a check of the link from the host to another."""
        answers = self.ask(do, peer=peer, **arguments)
        answers = answers if isinstance(answers, list) else [answers]
        return [(f"{self.name} {peer}", Finding(**each)) for each in answers]


def by_port(name: str, port: int) -> AgentClient | None:
    """Return the agent of `phalanx doctor --listen` on a host, if it listens."""
    with suppress(OSError, ValueError):
        connection = socket.create_connection((name, port), link.LIMIT_S)
        agent = AgentClient(name, connection)
        connection.settimeout(link.LIMIT_S)
        if agent.ask("hello") == "phalanx":
            connection.settimeout(2 * TORCH_S)
            return agent
    return None


def by_ssh(host: Host, ssh: str) -> tuple[AgentClient | None, Finding]:
    """Start an agent on a host, in the folder and by the Python of this process."""
    folder, (connection, other_end) = os.getcwd(), socket.socketpair()
    request = LaunchRequest(hosts=(host,), command=(), folder=folder, ssh=tuple(shlex.split(ssh)))
    command = agent_command(host, request, module="phalanx.cli.doctor_hosts")
    with other_end:
        process = subprocess.Popen(
            command,
            stdin=other_end.fileno(),
            stdout=other_end.fileno(),
            stderr=subprocess.PIPE,
            text=True,
        )
    agent, code = AgentClient(host.name, connection), None
    try:
        agent.ask("hello")
        return agent, Finding("ssh", f"{host.name} is reached without a password")
    except TimeoutError:
        process.kill()
    except OSError:
        code = process.wait()
    why = why_no_agent(host, code, process.communicate()[1], folder)
    cure = f"{why}; or start by hand on {host.name}: phalanx doctor --listen"
    return None, Finding("ssh", f"no agent starts on {host.name}", cure=cure, is_end=True)


class Examination:
    """The checks of hosts and of the links of all their pairs, each printed as it is made.

    Attributes:
        findings: all findings so far.
        hosts: the facts of each host that has an agent, by its name in the job.
        links: measured values of each ordered pair of hosts, by name.
    """

    def __init__(self, hosts: Iterable[Host], config: DoctorConfig, terminal: Terminal) -> None:
        """Prepare the checks of hosts, by the options of the command line."""
        self._known = {host.name: host for host in hosts}
        self._config, self._terminal = config, terminal
        self._agents = {each.name: AgentClient(each.name) for each in hosts if each.is_local}
        self._broken: set[frozenset[str]] = set()
        self.findings: Findings = []
        self.hosts: dict[str, Values] = {}
        self.links: dict[tuple[str, str], Values] = {}

    def as_dict(self) -> Values:
        """Return the document for --json: hosts, links, findings and the number of faults."""
        return {
            "hosts": self.hosts,
            "links": [{"from": a, "to": b, **values} for (a, b), values in self.links.items()],
            "findings": [{"of": of, **vars(finding)} for of, finding in self.findings],
            "num_faults": sum(bool(finding.cure) for _, finding in self.findings),
        }

    def _show(self, findings: Iterable[tuple[str, Finding]]) -> None:
        """Print findings, check by check: each fault with its cure, the others in short."""
        findings = [*findings]
        self.findings += findings
        for of, each in findings:
            a, _, b = of.partition(" ")
            if each.is_end:
                self._broken.add(frozenset((a, b)))
            elif each.check == "TCP":
                self.links[a, b]["TCP"] = each.values["to_bytes_per_s"]
                self.links[b, a]["TCP"] = each.values["from_bytes_per_s"]
            elif {a, b} <= {*self._known}:
                self.links.setdefault((a, b), {}).update(each.values)
        for check in dict.fromkeys(each.check for _, each in findings):
            of_check = [each for _, each in findings if each.check == check]
            sound = [each.text for each in of_check if not each.cure]
            if len(sound) > 4:
                sound = [f"{len(sound)} of {len(of_check)}, such as: {sound[0]}"]
            rows = [("ok", "green", "\n".join(sound))] if sound else []
            faults = [f"{each.text}\ncure: {each.cure}" for each in of_check if each.cure]
            for word, style, text in (*rows, *(("FAULT", "bold red", text) for text in faults)):
                cells = [Line(word.ljust(5), style), Line(check.ljust(10)), text]
                self._terminal.show(Table("", ("", "", ""), [cells]))

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of hosts with agents, between which nothing is broken so far."""
        names = [name for name in self._known if name in self._agents]
        return [
            pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in self._broken
        ]

    def run(self) -> None:
        """Make all checks; a link that one check breaks has no later ones.

        Raises:
            OSError: a host is lost meanwhile.
        """
        config, agents = self._config, self._agents
        local = AgentClient(next(iter(agents), socket.gethostname()))
        # From this host to each, which needs no agent there; then an agent on each.
        for name, host in self._known.items():
            if name not in agents:
                self._show(local.findings("way", name))
                if frozenset((local.name, name)) not in self._broken:
                    self._start_agent(local.name, host)
        both = [pair for a, b in self._pairs() for pair in ((a, b), (b, a))]
        ways = [agents[a].findings("way", b) for a, b in both if (a, b) not in self.links]
        self._show(each for way in ways for each in way)
        if len(agents) < 2:
            return
        asked = {name: agent.ask("facts", out=config.out) for name, agent in agents.items()}
        self.hosts = {name: asked[name] for name in self._known if name in asked}
        self._show(self._of_hosts())
        # The port of the store, and one that the kernel chooses, as for gloo and NCCL.
        ports = {
            name: agent.ask("respond", ports=[config.port, 0]) for name, agent in agents.items()
        }
        reached: Findings = []
        for a, b in self._pairs():
            for source, target in ((a, b), (b, a)):
                for port in ports[target]:
                    address = self.links[source, target]["address"]
                    reached += agents[source].findings("reach", target, address=address, port=port)
                    if reached[-1][1].is_end:
                        break
        self._show(reached)
        for check, options in (("passing", {}), ("bandwidth", BANDWIDTH)):
            measured: Findings = []
            for a, b in self._pairs():  # one of a pair asks, for both ways
                at = {"address": self.links[a, b]["address"], "port": ports[b][-1]}
                measured += agents[a].findings(check, b, **at, **options)
            self._show(measured)
        for agent in agents.values():
            agent.ask("respond", ports=[])
        self._measure_in_torch(next(iter(ports.values()))[-1])

    def _start_agent(self, local: str, host: Host) -> None:
        may_listen, port = self._config.peer is not None, self._config.port
        agent = by_port(host.name, port) if may_listen else None
        if agent is None:
            agent, finding = by_ssh(host, self._config.ssh)
            self._show([(f"{local} {host.name}", finding)])
            if agent is None and may_listen:  # does a firewall drop the port of --listen?
                *_, last = link.way(host.name, port)
                self._show([(f"{local} {host.name}", last)])
        if agent is not None:
            self._agents[host.name] = agent

    def _of_hosts(self) -> Iterator[tuple[str, Finding]]:
        """Compare versions, limits and the folder of the run between the hosts."""
        from phalanx.comm.join import num_files

        (first, facts_of_first), *others = self.hosts.items()
        for name, its in others:
            if its["name"] == facts_of_first["name"]:
                text = f"the host name of {first} and {name} is {its['name']}"
                cure = "sudo hostnamectl set-hostname ANOTHER on one, and in /etc/hosts"
                yield name, Finding("name", text, cure)
            both = facts_of_first["versions"], its["versions"]
            for package in both[0] | both[1]:
                one, other = (each.get(package, "missing") for each in both)
                if one != other and package != "driver":
                    text = f"{package} is {one} on {first}, but {other} on {name}"
                    cure = "install the same on both, for example by a copy of the environment"
                    yield name, Finding("versions", text, cure)
        texts = [", ".join(map(" ".join, its["versions"].items())) for its in self.hosts.values()]
        yield "", Finding("versions", "\n".join(dict.fromkeys(texts)))
        total = sum(self._known[of].num_ranks or its["num_cores"] for of, its in self.hosts.items())
        most, least = min((its["most_files"], name) for name, its in self.hosts.items())
        needed = num_files({"dp": total}, total, "cpu")
        text = f"a process may open {most:,} files on {least}; {total} ranks need {needed:,}"
        cure = f"on {least}, add '* hard nofile {max(4096, needed)}' to /etc/security/limits.conf"
        cure = f"{cure}, and log in again" if most < needed else ""
        yield least, Finding("files", text, cure)
        for name, its in self.hosts.items():
            gib = its["memory_bytes"] / GIB
            text = f"{name}: {its['num_cores']} cores, {gib:.1f} GiB of free memory"
            yield name, Finding("machine", text)
        # The folder of the run is one on all hosts, if all see a file that one of them writes.
        owner = next(iter(self._agents))  # this host, if it takes part
        folder, file = self.hosts[owner]["folder"], f"{MARK}{secrets.token_hex(8)}"
        why = self._agents[owner].ask("mark", folder=folder, name=file)
        for host, its in self.hosts.items():
            text, cure = f"{folder} on {host} has {size_text(its['free_bytes'])} left", ""
            if its["free_bytes"] < 100 * MIB or (host == owner and why):
                text += f": {why}" if host == owner and why else ""
                cure = "make room, or give another folder (--out)"
            elif not why and not self._agents[host].ask("sees", folder=folder, name=file):
                text = f"{folder} on {host} is not the folder of {owner} with this name"
                cure = (
                    f"share it, such as by NFS (on {owner} a line of /etc/exports, on {host} sudo "
                    f"mount {owner}:{folder} {folder}), or give a shared folder (--out)"
                )
            yield host, Finding("folder", text, cure)
        if not why:
            self._agents[owner].ask("mark", folder=folder, name=file)

    def _measure_in_torch(self, port: int) -> None:
        """Ask all hosts at once for devices, backends, and the links as gloo and NCCL use them."""
        names, links = [*self.hosts], self.links
        is_whole = 1 < len(names) == len(self._known) and not self._broken
        rates = [[links.get((a, b), {}).get("TCP", 0) for b in names] for a in names]
        sizes = [[int(max(rate / 4, 1 << 18)) for rate in of] for of in rates]
        requests = [
            {
                "interface": links[name, names[not rank]]["interface"] if is_whole else "",
                "address": links[name, names[0]]["address"] if is_whole and rank else "127.0.0.1",
                **{"rank": rank, "num": len(names) if is_whole else 1},
                **{"port": port, "sizes": sizes},
            }
            for rank, name in enumerate(names)
        ]
        with ThreadPoolExecutor(len(names)) as threads:
            asked = [
                threads.submit(self._agents[name].ask, "in_torch", **request)
                for name, request in zip(names, requests, strict=True)
            ]
        findings: Findings = []
        for name, values in zip(names, (each.result() for each in asked), strict=True):
            if "error" in values:
                cure = "a rank of gloo or NCCL fails so in a run too; see docs/debugging.md"
                finding = Finding("backends", f"{name}: {values['error']}", cure=cure)
                findings.append((name, finding))
                continue
            environment = self.hosts[name]["environment"] = values["environment"]
            backends = ", ".join(of for of, has in environment["backends"].items() if has)
            gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or "no GPU"
            findings.append((name, Finding("backends", f"{name}: {backends}; {gpus}")))
            for backend, timed in values["links"].items():
                for other, latency_and_rate in timed.items():
                    links[name, names[int(other)]][backend] = latency_and_rate
        for (a, b), backend in itertools.product(self._pairs(), ("gloo", "NCCL")):
            if backend in (to := links[a, b]) and backend in (back := links[b, a]):
                text = link.both_ways(a, b, to[backend][1], back[backend][1])
                findings.append((f"{a} {b}", Finding(backend, text)))
        self._show(findings)

    def matrix(self) -> Table:
        """Return round trip and bandwidth of TCP from each host to each, and the slowest link."""
        rates = {pair: values["TCP"] for pair, values in self.links.items() if "TCP" in values}
        texts = {"median_s": time_text, "TCP": link.rate_text}
        rows = [
            [source, *(
                ", ".join(text(of[name]) for name, text in texts.items() if name in of)
                for of in (self.links.get((source, target), {}) for target in self.hosts)
            )]
            for source in self.hosts
        ]  # fmt: skip
        note = ""
        if rates:
            source, target = min(rates, key=lambda pair: rates[pair])
            note = f"slowest: {source} to {target}, {link.rate_text(rates[source, target])}"
        title = "Round trip, and bandwidth from each host (row) to each"
        return Table(title, ["", *self.hosts], rows, note=note)

    def keep(self, path: Path) -> None:
        """Write the slowest link into a calibration file, which `phalanx plan --cluster` reads.

        Raises:
            ConfigError: not all links are measured.
        """
        num_hosts, links = len(self._known), [*self.links.values()]
        backend = "NCCL" if all("NCCL" in each for each in links) else "gloo"
        timed = [each[backend] for each in links if backend in each]
        if not timed or len(timed) != num_hosts * (num_hosts - 1):
            raise ConfigError(f"{path} is not written: the faults above keep links unmeasured")
        environment = next(iter(self.hosts.values()))["environment"]
        gpus, cpu = environment["gpus"], environment["cpu"]
        num_here = len(gpus) if backend == "NCCL" else cpu["num_cores"]
        # The ranks of a host share its link.
        num_sharing = max(1, len(gpus), *(host.num_ranks for host in self._known.values()))
        between = Link(
            name=f"{backend} between hosts",
            bandwidth=min(rate for _, rate in timed) / num_sharing,
            latency_s=max(latency_s for latency_s, _ in timed),
            source="measured by phalanx doctor",
            date=time.strftime("%Y-%m"),
        )
        machine = Calibration(
            kind="gpu" if backend == "NCCL" else "cpu",
            device_name=gpus[0]["name"] if backend == "NCCL" else cpu["name"],
            num_here=num_here,
            num_hosts=num_hosts,
            levels=(Level(name="cluster", devices=num_hosts * num_here, link=between),),
        )
        calibration_file.keep(path, machine)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(f"{json.dumps(_in_torch(json.loads(sys.argv[1])))}\n")
        sys.stdout.flush()
    else:
        answer(sys.stdin, sys.stdout, ACTIONS)
    os._exit(0)
