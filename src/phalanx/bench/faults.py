"""A job that `phalanx launch` keeps running while faults strike it, and what each fault cost.

    this process   start the launcher | read its lines and metrics.jsonl | strike | judge
    launcher       --ssh--> agents, ranks                                   ^ kill, stop, cut ...
    undisturbed    the same steps in one process, whose weights and losses must be equal

The bench harms nothing but its own job: it finds the processes by their working folder, which it
has made itself, and fills no disk but one that it has mounted there.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from phalanx.bench.fault_order import KINDS, Fault, Outcome, Seen, Strike, order_of, outcome_of
from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.tensor_file import open_file
from phalanx.config.fields import SEED, STEPS, Positional, Range
from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.launch.hosts import Host, parse_hosts
from phalanx.measure.logs import METRICS_FILE
from phalanx.report.output import values_of
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.units import MIB

SMALL: Final = (
    "train --precision float64 --device cpu --threads 1 --eval-every 0 --save-every 10 "
    "--shape.num-layers 2 --shape.hidden 32 --shape.num-heads 2 --shape.num-kv-heads 2 "
    "--shape.ffn 48 --shape.vocab-size 300 --shape.max-seq-len 64 --shape.dropout 0.1 "
    "--corpus.seq-len 32 --corpus.validation 0.1 --batch.global-size 12 --batch.microbatch 1"
)
"""The job if no other is given; 12 rows a step, which 1, 2, 3, 4 and 6 data ranks divide."""

MOST_APART: Final = 1e-10
"""Largest difference of losses and float64 weights from those of the undisturbed run."""

SETTLING_S: Final = 30.0
"""Time in which the processes of a host that a cut has separated must end, in seconds."""

DISK_BYTES: Final = 1 << 26
"""Size of the disk that the bench mounts to fill it."""

TICK_S: Final = 0.02

_PROCESSES: Final = """
import json, os, sys
own = os.readlink("/proc/self/ns/net")
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if os.readlink(f"/proc/{pid}/cwd") == sys.argv[1]:
            if os.readlink(f"/proc/{pid}/ns/net") == own and int(pid) != os.getpid():
                stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
                words = open(f"/proc/{pid}/cmdline").read().split("\\0")
                print(json.dumps([int(stat[19]), int(pid), int(stat[1]), words]))
    except OSError:
        pass
"""
"""Prints start time, pid, parent's pid and words of each process of a folder on this host."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig(ResultConfig):
    """Run a job while faults strike it in an order that --seed fixes; say what each one cost."""

    kinds: Annotated[tuple[str, ...], Positional("[KIND ...]")] = ()
    """Kinds of faults: rank, rank0, host, ssh, stop, cut, slow, disk, clock; if unset, those of
    the first six that the hosts allow."""
    hosts: str | None = None
    """Hosts and their ranks, as a:2,b:2; localhost with the ranks of the strategy if unset."""
    strategy: str = "dp4"
    """Strategy of the job at the start."""
    job: str = SMALL
    """The job in words after `phalanx`, without --strategy, --steps, --out and --resume."""
    steps: Annotated[int, STEPS] = 150
    """Optimizer steps of the job."""
    faults: Annotated[int, Range(1, 1000, "[]")] = 4
    """Number of faults."""
    seed: Annotated[int, SEED] = 0
    """Fixes which fault strikes when and whom."""
    for_s: Annotated[float, Range(0, 3600, "(]")] = 60.0
    """How long a cut, a slow link or a full disk lasts, in seconds."""
    mbit: Annotated[float, Range(0, ends="()")] = 1.0
    """Rate of a slow link, in Mbit/s."""
    ssh: str = "ssh"
    """The command ssh, with options of your own."""
    launch: str = ""
    """Further options of `phalanx launch`."""
    limit_s: Annotated[float, Range(0, ends="()")] = 240.0
    """Longest time without a new step, in seconds, after which the bench ends the job."""


class Site:
    """The hosts of a job, and what the bench can do to the job there."""

    def __init__(self, config: FaultsConfig, folder: Path) -> None:
        """Look which hosts are network namespaces of this machine."""
        from phalanx.strategy import Strategy

        num_ranks = Strategy.parse(config.strategy).num_ranks
        self.hosts = parse_hosts(config.hosts or f"localhost:{num_ranks}")
        self.folder, self.ssh = folder, shlex.split(config.ssh)
        self.launcher: subprocess.Popen[str] | None = None
        listed = _output("ip", "netns", "list") if shutil.which("ip") else ""
        names = {line.split()[0] for line in listed.splitlines() if line.strip()}
        self.links = {host.name: self._link(host.name, names) for host in self.hosts}
        self.pids: set[int] = set()

    @staticmethod
    def _link(name: str, namespaces: set[str]) -> tuple[str, str, str] | None:
        """Return a host's interface, and namespace and interface at its link's other end."""
        if name not in namespaces:
            return None
        for own in json.loads(_output("ip", "-j", "-n", name, "link")):
            for other in namespaces - {name}:
                for far in json.loads(_output("ip", "-j", "-n", other, "link")):
                    ends = (far["ifindex"], far.get("link_index"))
                    if (own.get("link_index"), own["ifindex"]) == ends:
                        return own["ifname"], other, far["ifname"]
        return None

    def allows(self, kind: str) -> str:
        """Return why a fault of this kind is impossible here; "" if it is possible."""
        if kind in ("cut", "slow") and None in self.links.values():
            plain = next(name for name, link in self.links.items() if link is None)
            return (
                f"the link of {plain} cannot be changed, which is no network namespace of this "
                "machine; the nearest is stop"
            )
        if kind in ("cut", "ssh") and all(host.is_local for host in self.hosts):
            return "all ranks are on this host, which needs no ssh; the nearest is host"
        if kind == "disk" and (os.geteuid() or not all(host.is_local for host in self.hosts)):
            return "a disk of its own needs root, and all ranks on this host; the nearest is stop"
        return ""

    def on(self, host: Host, *words: str) -> str:
        """Run a command on a host and return its output; "" if the host cannot be reached."""
        if not host.is_local:
            options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
            words = (*self.ssh, *options, host.target, shlex.join(words))
        return _output(*words)

    def processes(self, host: Host) -> list[tuple[int, int, int, list[str]]]:
        """Return start, pid, parent and words of each process of the job on a host, in order.

        The launcher and its children ssh, which are of no host, are left out.
        """
        lines = self.on(host, sys.executable, "-c", _PROCESSES, str(self.folder)).splitlines()
        listed = [tuple[Any, ...](json.loads(line)) for line in lines]
        launcher = 0 if self.launcher is None else self.launcher.pid
        kept = [
            each
            for each in listed
            if each[1] != launcher and not (each[2] == launcher and self.is_ssh(each[3]))
        ]
        self.pids |= {each[1] for each in kept}
        return sorted(kept)

    def is_ssh(self, words: Sequence[str]) -> bool:
        """Return whether these are the words of the command ssh."""
        return list(words[: len(self.ssh)]) == self.ssh

    def ranks(self) -> list[tuple[Host, int]]:
        """Return the host and pid of each rank, in the order of the ranks."""
        #   agent -> forkserver -> store (first host only), rank, rank ...      by start time
        pairs: list[tuple[Host, int]] = []
        for host in self.hosts:
            listed = self.processes(host)
            words = {pid: " ".join(each) for _, pid, _, each in listed}
            agents = {pid for pid in words if "phalanx.launch.agent" in words[pid]}
            servers = {pid for _, pid, parent, _ in listed if parent in agents}
            pairs += [
                (host, pid)
                for _, pid, parent, _ in listed
                if parent in servers and "forkserver" in words[pid] and parent in words
            ]
        return pairs[1:]

    def strike(self, fault: Fault, config: FaultsConfig) -> tuple[str, Callable[[], object] | None]:
        """Do what the fault says; return whom it struck, and what ends it."""
        kind = fault.kind
        if kind in ("rank", "rank0", "stop"):
            ranks = self.ranks()
            least = 1 if kind == "rank" and len(ranks) > 1 else 0
            number = 0 if kind == "rank0" else least + fault.victim % (len(ranks) - least)
            host, pid = ranks[number]
            self.on(host, "kill", "-STOP" if kind == "stop" else "-KILL", str(pid))
            return f"rank {number} on {host.name}", None
        if kind == "clock":
            (self.folder / "clock").write_text("3600")
            return "rank 0", (self.folder / "clock").unlink
        if kind == "disk":
            filler = self.folder / "disk" / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            return str(filler.parent), filler.unlink
        hosts = [host for host in self.hosts if self.processes(host)]
        if kind in ("ssh", "cut"):  # the launcher's own host has no link to the launcher
            hosts = [host for host in hosts if not host.is_local] or hosts
        host = hosts[fault.victim % len(hosts)]
        if kind == "host":
            pids = [str(pid) for _, pid, *_ in self.processes(host)]
            self.on(host, "kill", "-KILL", *pids)
            return host.name, None
        if kind == "ssh":
            assert self.launcher is not None
            for child in Path(f"/proc/{self.launcher.pid}/task").glob("*/children"):
                for pid in child.read_text().split():
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if self.is_ssh(words) and host.target in words:
                        os.kill(int(pid), signal.SIGKILL)
            return f"ssh to {host.name}", None
        assert (link := self.links[host.name]) is not None
        own, other, far = link
        if kind == "cut":
            _output("ip", "-n", other, "link", "set", far, "down")
            return host.name, lambda: _output("ip", "-n", other, "link", "set", far, "up")
        tc = ("tc", "-n", host.name, "qdisc")
        rate = f"tbf rate {config.mbit:g}mbit burst 16k latency 400ms".split()
        _output(*tc, "replace", "dev", own, "root", *rate)
        return host.name, lambda: _output(*tc, "del", "dev", own, "root")

    def left(self) -> list[str]:
        """Return what is left of the job on the hosts: processes, and files in memory or TMPDIR."""
        found = [f"process {pid} on {h.name}" for h in self.hosts for _, pid, *_ in self.processes(h)]
        for host in self.hosts:
            names = self.on(host, "ls", "-A", "/dev/shm").split()
            found += [
                f"{host.name}:/dev/shm/{name}"
                for name in names
                if any(word.isdecimal() and int(word) in self.pids for word in name.split("-"))
            ]
        return found + [str(path) for path in (self.folder / "tmp").iterdir()]


def move_clock(_kind: str, _values: Mapping[str, Any]) -> None:
    """Move `time.time` of this process by the seconds in the file "clock", as a --log-to of a job.

    Neither the kernel's clock moves, nor monotonic clocks, nor those of torch's C++.
    """
    with suppress(OSError):
        shift_s = float(Path("clock").read_text())
        time.time = lambda: time.time_ns() / 1e9 + shift_s


def run(config: FaultsConfig, say: PrintLine) -> BenchResult:
    """Run the job under faults, and compare it with an undisturbed one.

    Raises:
        ConfigError: a kind of fault is unknown, or impossible on these hosts.
    """
    with working_folder() as folder:
        site = Site(config, folder)
        kinds = config.kinds or [each for each in list(KINDS)[:6] if not site.allows(each)]
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"'{kind}' is no kind of fault{nearest(kind, KINDS)}")
            if why := site.allows(kind):
                raise ConfigError(f"no fault {kind}: {why}")
        order = order_of(config.seed, kinds, config.faults, config.steps)
        if config.job == SMALL:
            text = "".join(f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(2000))
            (folder / "text.txt").write_text(text)
        words = [*shlex.split(config.job), f"--steps={config.steps}"]
        if config.job == SMALL:
            words += [f"--data={folder}/text.txt", f"--corpus.cache={folder}/cache"]
        say("the undisturbed run, in one process ...")
        alone = folder / "undisturbed"
        one = [sys.executable, "-m", "phalanx", *words, "--strategy=dp1", f"--out={alone}"]
        done = subprocess.run(one, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"the job fails without any fault: {done.stderr.strip()[-600:]}")
        (folder / "disk").mkdir()
        if has_disk := "disk" in kinds:
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder / "disk"], check=True)
        try:
            out = folder / "disk" / "run"
            if "clock" in kinds:
                words.append("--log-to=phalanx.bench.faults:move_clock")
            seen, strikes, exit_code, said = disturb(config, site, [*words, f"--out={out}"], order, say)
            left = wait_until_nothing_is_left(site)
            wrong = judge(seen, out, alone) if exit_code == 0 else [f"the job ended with {exit_code}"]
            wrong += [f"left: {each}" for each in left]
        finally:
            if has_disk:
                _output("umount", "-l", str(folder / "disk"))
    ends = [*(strike.at_s for strike in strikes[1:]), seen.steps[-1][0] + 1 if seen.steps else 0.0]
    outcomes = [outcome_of(seen, *pair) for pair in zip(strikes, ends, strict=False)]
    wrong += [f"{len(order) - len(strikes)} faults never struck"] * (len(strikes) < len(order))
    return result_of(config, seen, outcomes, wrong, said)


@contextmanager
def working_folder() -> Generator[Path]:
    """A folder of the job, by which its processes are known; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-faults-")).resolve()
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def disturb(
    config: FaultsConfig, site: Site, words: list[str], order: Sequence[Fault], say: PrintLine
) -> tuple[Seen, list[Strike], int, list[str]]:
    """Run the job by `phalanx launch` and let the faults strike.

    Returns:
        What was seen, the faults that struck, the exit code, and the launcher's lines.
    """
    seen, strikes, said = Seen(), list[Strike](), list[str]()
    left, ends = list(order), list[tuple[float, Strike, Callable[[], object]]]()
    lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
    hosts = ",".join(str(host) for host in site.hosts)
    options = f"--restarts={2 * len(order) + 2} --min-ranks=1 {config.launch}"
    launch = [sys.executable, "-m", "phalanx", "launch", f"--hosts={hosts}", f"--ssh={config.ssh}"]
    launch += [*shlex.split(options), "--", *words]
    launch += [f"--strategy={config.strategy}", "--resume=auto"]
    out = Path(next(word for word in words if word.startswith("--out="))[6:])
    offset, progress_s = 0, time.monotonic()

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            launch,
            cwd=site.folder,
            env={**os.environ, "TMPDIR": str(site.folder / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put((time.monotonic(), line.rstrip()))

        threading.Thread(target=read, daemon=True).start()
        return process

    site.launcher = process = start()
    try:
        while (code := process.poll()) is None or not lines.empty() or ends:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            while not lines.empty():
                at_s, line = lines.get()
                said.append(line)
                if is_loss(line):
                    seen.losses.append((at_s, line))
                    say(line)
            before = seen.last_step
            with suppress(FileNotFoundError), (out / METRICS_FILE).open("rb") as file:
                file.seek(offset)
                for line in file:
                    if line.endswith(b"\n"):
                        offset += len(line)
                        seen.add(now_s, json.loads(line))
            if seen.last_step > before:
                progress_s = now_s
            for end in [each for each in ends if each[0] <= now_s]:
                ends.remove(end)
                end[2]()
            if code is not None:
                if ends or not strikes or strikes[-1].fault.kind != "disk" or not code:
                    continue  # the disk becomes free, or the job is over
                strikes[-1].by_bench = True
                site.launcher = process = start()
            elif now_s - progress_s > config.limit_s:
                raise TimeoutError
            is_ready = not strikes or seen.has_recovered(strikes[-1])
            if left and is_ready and seen.last_step >= left[0].step:
                fault = left.pop(0)
                time.sleep(fault.pause * seen.step_s)
                at_s, load = time.monotonic(), os.getloadavg()[0]
                who, end_fault = site.strike(fault, config)
                lasts_s = config.for_s if end_fault is not None else 0.0
                strikes.append(Strike(fault, who, at_s, at_s + lasts_s, load))
                if end_fault is not None:
                    ends.append((at_s + lasts_s, strikes[-1], end_fault))
                say(f"step {seen.last_step}: {fault.kind}, {who}")
    except TimeoutError:
        said.append(f"no new step for {config.limit_s:g} s after step {seen.last_step}")
    finally:
        for _, _, end_fault in ends:
            end_fault()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()
    return seen, strikes, -1 if said and said[-1].startswith("no new step") else process.returncode, said


def is_loss(line: str) -> bool:
    """Return whether a line of the launcher says that it noticed a loss."""
    return "lost" in line


def wait_until_nothing_is_left(site: Site) -> list[str]:
    """Wait until nothing of the job is left on its hosts, at most SETTLING_S; return the rest."""
    until_s = time.monotonic() + SETTLING_S
    while (left := site.left()) and time.monotonic() < until_s:
        time.sleep(0.5)
    return left


def judge(seen: Seen, out: Path, undisturbed: Path) -> list[str]:
    """Return what differs from the undisturbed run: steps, samples, losses and weights."""
    wrong: list[str] = []
    alone = Seen()
    for line in (undisturbed / METRICS_FILE).read_text().splitlines():
        alone.add(0.0, json.loads(line))
    if list(seen.final) != list(alone.final):
        missing = sorted(set(alone.final) - set(seen.final))
        wrong.append(f"steps {missing} are missing" if missing else "steps out of order")
    for step, record in alone.final.items():
        other = seen.final.get(step, record)
        apart = abs(other["loss"] - record["loss"]) / abs(record["loss"])
        if apart > MOST_APART or other["tokens"] != record["tokens"]:
            wrong.append(f"step {step}: loss {other['loss']} instead of {record['loss']}")
            break
    ours, theirs = manifest.find_and_read(out), manifest.find_and_read(undisturbed)
    if ours.about.consumed != theirs.about.consumed:
        wrong.append(f"{ours.about.consumed} samples instead of {theirs.about.consumed}")
    if (apart := weights_apart(ours.folder, theirs.folder)) > MOST_APART:
        wrong.append(f"weights differ by {apart:.3g}")
    return wrong


def weights_apart(ours: Path, theirs: Path) -> float:
    """Return the largest difference of two checkpoints' weights."""
    read = [index.read(folder, manifest.read(folder).files) for folder in (ours, theirs)]
    if {*read[0]} != {*read[1]}:
        raise CheckpointError(f"{ours} and {theirs} have other tensors")
    apart = 0.0
    for name in read[0]:
        if name.startswith("model."):
            one, other = (
                index.load_full(lambda file, folder=folder: open_file(folder / file), each, name)
                for folder, each in zip((ours, theirs), read, strict=True)
            )
            apart = max(apart, float((one - other).abs().max()))
    return apart


def result_of(
    config: FaultsConfig,
    seen: Seen,
    outcomes: Sequence[Outcome],
    wrong: Sequence[str],
    said: Sequence[str],
) -> BenchResult:
    """Return the table of what each fault cost, the totals and the verdict."""
    heads = ("fault", "struck", Number("step", "d"), Number("detected s", ".1f"))
    heads += (Number("next step s", ".1f"), Number("repeated", "d"), Number("lost s", ".1f"))
    heads += (Number("again MiB", ".2f", MIB), "then", Number("load", ".1f"))
    rows = [
        (o.kind, o.who, o.step, o.detected_s, o.next_step_s, o.repeated, o.lost_s, o.again_bytes)
        + (o.strategy, o.load)
        for o in outcomes
    ]
    lost_s = sum(each.lost_s for each in outcomes)
    whole_s = seen.steps[-1][0] - seen.steps[0][0] if seen.steps else 0.0
    useful = max(0.0, 1 - lost_s / whole_s) if whole_s else 0.0
    totals = {
        "steps": seen.last_step,
        "seconds": whole_s,
        "lost_s": lost_s,
        "goodput": useful,
        "step_s": seen.step_s,
        "repeated": sum(each.repeated for each in outcomes),
        "again_bytes": sum(each.again_bytes for each in outcomes),
    }
    verdict = "equal to the undisturbed run: each sample once, losses and weights within 1e-10; nothing is left"
    if any(each.fault_kind == "clock" for each in ()):  # pragma: no cover
        pass
    parts = [
        Table(f"Faults of {config.strategy}, seed {config.seed}", heads, rows),
        f"lost {lost_s:.1f} of {whole_s:.1f} s; useful {useful:.0%}; {totals['repeated']} steps "
        f"repeated, for which a rank sent {totals['again_bytes'] / MIB:.2f} MiB again",
        *(Line(each, "red") for each in wrong),
        *([verdict] if not wrong else said[-12:]),
    ]
    return BenchResult(
        name=f"faults-{config.strategy}-{config.seed}",
        shown=parts,
        values={
            **{name: getattr(config, name) for name in ("strategy", "hosts", "seed", "for_s")},
            "outcomes": [values_of(each) for each in outcomes],
            "totals": totals,
            "wrong": list(wrong),
        },
    )
