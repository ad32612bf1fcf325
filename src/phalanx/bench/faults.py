"""A job that `phalanx launch` keeps running while faults strike it, and what each fault cost.

    this process   start the launcher | read its lines and metrics.jsonl | strike | ... | compare
    launcher       --ssh--> agents --> ranks                                ^ kill, stop, cut ...
    undisturbed    the same steps in one process: losses and weights must be equal

The bench harms its own job alone: it knows the processes by their working folder, which it has
made, and fills no disk but one that it has mounted in that folder.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

from phalanx.bench.fault_order import KINDS, LOSING, Event, Fault, Strike, Timeline, order_of
from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.tensor_file import open_file
from phalanx.config.fields import SEED, STEPS, Positional, Range
from phalanx.errors import ConfigError, nearest
from phalanx.launch.hosts import Host, parse_hosts
from phalanx.measure.logs import METRICS_FILE
from phalanx.report.output import values_of
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.units import MIB
from phalanx.strategy import Strategy

SMALL: Final = (
    "train --precision float64 --device cpu --threads 1 --eval-every 0 --save-every 10 "
    "--data text.txt --corpus.seq-len 32 --corpus.validation 0.1 --corpus.cache cache "
    "--shape.num-layers 2 --shape.hidden 32 --shape.num-heads 2 --shape.num-kv-heads 2 "
    "--shape.ffn 48 --shape.vocab-size 300 --shape.max-seq-len 64 --shape.dropout 0.1 "
    "--batch.global-size 12 --batch.microbatch 1"
)
"""The job if no other is given: 12 rows a step, which 1, 2, 3, 4 and 6 data ranks divide."""

MOST_APART: Final = 1e-10
"""Largest difference from losses, relative, and float64 weights of the undisturbed run."""

SETTLING_S: Final = 30.0
"""Time in which the processes of a host that the job has lost must end, in seconds."""

DISK: Final = "size=64m"
"""Size of the disk that the bench mounts to fill it."""

_PROCESSES: Final = """
import json, os, sys
own = os.readlink("/proc/self/ns/net")
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        links = [os.readlink(f"/proc/{pid}/{name}") for name in ("cwd", "ns/net")]
        if links == [sys.argv[1], own] and int(pid) != os.getpid():
            stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
            words = open(f"/proc/{pid}/cmdline").read().replace("\\0", " ")
            print(json.dumps([int(stat[19]), int(pid), int(stat[1]), words]))
    except OSError:
        pass
"""
"""Prints start time, pid, parent and words of each process in a folder and network namespace."""


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
    """How long a cut, a slow link, a full disk or a moved clock lasts, in seconds."""
    undisturbed: str | None = None
    """Folder of an undisturbed run of the same job, which is run first if there is none."""
    mbit: Annotated[float, Range(0, ends="()")] = 1.0
    """Rate of a slow link, in Mbit/s."""
    ssh: str = "ssh"
    """The command ssh, with options of your own."""
    launch: str = "--min-ranks=1"
    """Options of `phalanx launch`, beside --hosts, --ssh and --restarts."""
    limit_s: Annotated[float, Range(0, ends="()")] = 240.0
    """Time without a new step, in seconds, after which the bench ends the job."""


class Site:
    """The hosts of a job, and what the bench can do to the job there.

    Attributes:
        launcher: pid of the launcher; 0 before it has started.
        links: host -> its interface, and namespace and interface at the other end of its link;
            None for a host that is no network namespace of this machine.
        joins: commands that have asked the launcher to take a host in.
        environ: environment of the launcher, with a TMPDIR of its own.
    """

    def __init__(self, config: FaultsConfig, folder: Path) -> None:
        self.config, self.folder, self.ssh = config, folder, shlex.split(config.ssh)
        num_ranks = Strategy.parse(config.strategy).num_ranks
        self.hosts = parse_hosts(config.hosts or f"localhost:{num_ranks}")
        self.launcher = 0
        self.joins: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "TMPDIR": f"{folder}/tmp", "XDG_RUNTIME_DIR": f"{folder}/tmp"}
        self.links: dict[str, tuple[str, str, str] | None] = {}
        listed = _output("ip", "netns", "list") if shutil.which("ip") else ""
        for name in (host.name for host in self.hosts):
            self.links[name] = None
            if re.search(rf"^{re.escape(name)}\b", listed, re.MULTILINE):
                #   2: v0@if3: <BROADCAST ... \n  link/ether ... link-netns switch
                links = _output("ip", "-n", name, "link")
                if ends := re.search(r"^\d+: (\S+)@if(\d+):.*\n.* link-netns (\S+)", links, re.M):
                    far = re.search(
                        rf"^{ends[2]}: ([^@:]+)", _output("ip", "-n", ends[3], "link"), re.M
                    )
                    self.links[name] = ends[1], ends[3], "" if far is None else far[1]

    def refusal(self, kind: str) -> str:
        """Return why a fault of a kind is impossible on these hosts; "" if it is possible."""
        if kind not in KINDS:
            return f"'{kind}' is no kind of fault{nearest(kind, KINDS)}; {', '.join(KINDS)} are"
        is_here = all(host.is_local for host in self.hosts)
        plain = [name for name, link in self.links.items() if link is None]
        if kind in ("cut", "slow") and plain:
            return f"no {kind}: {plain[0]} is no network namespace of this machine; try stop"
        if kind in ("cut", "ssh") and is_here:
            return f"no {kind}: all ranks are on this host; the nearest is host"
        if kind == "disk" and not (is_here and os.geteuid() == 0):
            return "no disk: it needs root to mount one, and all ranks on this host; try stop"
        return ""

    def on(self, host: Host, *words: str) -> str:
        """Return what a command prints on a host; "" if the host cannot be reached."""
        if not host.is_local:
            options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
            words = (*self.ssh, *options, host.target, shlex.join(words))
        return _output(*words)

    def processes(self, host: Host) -> list[tuple[int, int, int, str]]:
        """Return start, pid, parent and words of each process of the job on a host, in order.

        Launcher and its ssh are left out, which are the job's on no host.
        """
        lines = self.on(host, sys.executable, "-c", _PROCESSES, str(self.folder)).splitlines()
        listed = sorted(tuple[Any, ...](json.loads(line)) for line in lines)
        ssh = " ".join(self.ssh)
        return [
            (start, pid, parent, words)
            for start, pid, parent, words in listed
            if pid != self.launcher and not (parent == self.launcher and words.startswith(ssh))
        ]

    def ranks(self) -> list[tuple[Host, int]]:
        """Return the host and pid of each rank, in the order of the ranks."""
        #   agent -> forkserver -> store (of the first host), rank, rank ...    by start time
        pairs: list[tuple[Host, int]] = []
        for host in self.hosts:
            listed = self.processes(host)
            agents = {pid for _, pid, _, words in listed if "phalanx.launch.agent" in words}
            servers = {pid for _, pid, parent, _ in listed if parent in agents}
            pairs += [(host, pid) for _, pid, parent, _ in listed if parent in servers]
        return pairs[1:]

    def strike(self, fault: Fault) -> tuple[str, Callable[[], object] | None] | None:
        """Do what a fault says; return whom it struck, and what ends it if it lasts.

        Returns None, and does nothing, while the job has no such rank or host, as in a restart.
        """
        kind, folder = fault.kind, self.folder
        if kind in ("rank", "rank0", "stop"):
            if not (ranks := self.ranks()):
                return None
            least = int(kind == "rank" and len(ranks) > 1)
            number = 0 if kind == "rank0" else least + fault.victim % (len(ranks) - least)
            host, pid = ranks[number]
            self.on(host, "kill", "-STOP" if kind == "stop" else "-KILL", str(pid))
            return f"rank {number} on {host.name}", None
        if kind == "clock":
            (folder / "clock").write_text("3600")
            return "rank 0", lambda: (folder / "clock").write_text("0")
        if kind == "disk":
            filler = folder / "disk" / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            return "the run's folder", filler.unlink
        hosts = [host for host in self.hosts if self.processes(host)]
        if kind in ("ssh", "cut"):  # the launcher needs no link to its own host
            hosts = [host for host in hosts if not host.is_local]
        if not hosts:
            return None
        host = hosts[fault.victim % len(hosts)]
        if kind == "host":
            self.on(host, "kill", "-KILL", *(str(pid) for _, pid, *_ in self.processes(host)))
            return host.name, None
        if kind == "ssh":
            for children in Path(f"/proc/{self.launcher}/task").glob("*/children"):
                for pid in children.read_text().split():
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if words[: len(self.ssh)] == self.ssh and host.target in words:
                        os.kill(int(pid), signal.SIGKILL)
            return f"ssh to {host.name}", None
        link = self.links[host.name]
        assert link is not None
        interface, other, far = link
        if kind == "cut":
            cut = ("ip", "-n", other, "link", "set", far)
            _output(*cut, "down")

            def mend() -> None:
                _output(*cut, "up")
                join = (sys.executable, "-m", "phalanx", "launch", f"--join={host}")
                self.joins.append(subprocess.Popen(join, env=self.environ, stdout=2))

            return host.name, mend
        rate = f"root tbf rate {self.config.mbit:g}mbit burst 16k latency 400ms"
        queue_of = ("tc", "-n", host.name, "qdisc")
        _output(*queue_of, "replace", "dev", interface, *rate.split())
        return host.name, lambda: _output(*queue_of, "del", "dev", interface, "root")

    def left(self) -> set[str]:
        """Return what is left of the job: processes, folders in memory, files in its TMPDIR."""
        left = {str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir()}
        for host in self.hosts:
            left |= {f"process {pid} on {host.name}" for _, pid, *_ in self.processes(host)}
            names = self.on(host, "ls", "/dev/shm", "/proc").split()
            agents = [name for name in names if re.match(r"phalanx-\d+-", name)]
            left |= {f"/dev/shm/{each}" for each in agents if each.split("-")[1] not in names}
        return left


def move_clock(_kind: str, _values: Mapping[str, Any]) -> None:
    """Move `time.time` of rank 0, whose --log-to this is, by the seconds in the file "clock".

    The kernel's clock stays, and so do monotonic clocks, and those that C++ reads.
    """
    with suppress(OSError):
        shift_s = float(Path("clock").read_text())
        time.time = lambda: time.time_ns() / 1e9 + shift_s


def run(config: FaultsConfig, say: PrintLine) -> BenchResult:
    """Run the job while faults strike it, and compare it with an undisturbed run.

    Raises:
        ConfigError: a kind of fault is impossible on these hosts, or the job fails without faults.
    """
    folder = Path(tempfile.mkdtemp(prefix="phalanx-faults-")).resolve()
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("tmp", "disk"):
            (folder / name).mkdir()
        lines = (f"The square of {n} is {n * n}, and its cube {n**3}.\n" for n in range(2000))
        (folder / "text.txt").write_text("".join(lines))
        site = Site(config, folder)
        kinds = config.kinds or [kind for kind in LOSING if not site.refusal(kind)]
        if refusals := list(filter(None, map(site.refusal, kinds))):
            raise ConfigError(refusals[0])
        words = [*shlex.split(config.job), f"--steps={config.steps}"]
        words += ["--log-to=phalanx.bench.faults:move_clock"] * ("clock" in kinds)
        if "disk" in kinds:
            mount = ["mount", "-t", "tmpfs", "-o", DISK, "none", str(folder / "disk")]
            subprocess.run(mount, check=True)
            cleanup.callback(_output, "umount", "-l", str(folder / "disk"))
        alone, out = folder / "undisturbed", folder / "disk" / "run"
        if config.undisturbed is not None:
            alone = Path(config.undisturbed)
        if not alone.exists():
            say("an undisturbed run in one process ...")
            command = [sys.executable, "-m", "phalanx", *words, "--strategy=dp1", f"--out={alone}"]
            command += ["--batch.microbatch=12"] * (config.job == SMALL)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"the job fails without a fault: {done.stderr.strip()[-600:]}")
        before = site.left()
        order = order_of(config.seed, kinds, config.faults, config.steps)
        seen, strikes, wrong = disturb(site, [*words, f"--out={out}"], out, order, say)
        until_s = time.monotonic() + SETTLING_S
        while (left := site.left() - before) and time.monotonic() < until_s:
            time.sleep(0.5)
        wrong += [] if wrong else differences(seen, out, alone)
        wrong += [f"left: {each}" for each in sorted(left)]
    return _result(config, seen, strikes, wrong)


def disturb(
    site: Site, words: Sequence[str], out: Path, order: Sequence[Fault], say: PrintLine
) -> tuple[Timeline, list[Strike], list[str]]:
    """Run a job by `phalanx launch`, and let each fault strike when the job has recovered.

    Args:
        site: where the job runs.
        words: the job's words, which write the run to `out`.
        out: folder of the run.
        order: the faults.
        say: prints the launcher's lines on losses, and the faults.

    Returns:
        What was seen, the faults that struck, and why the run is not whole, if it is not.
    """
    config, seen, strikes, said = site.config, Timeline(), list[Strike](), list[str]()
    hosts = ",".join(str(host) for host in site.hosts)
    launch = [sys.executable, "-m", "phalanx", "launch", f"--hosts={hosts}", f"--ssh={config.ssh}"]
    launch += [f"--restarts={2 * len(order) + 2}", f"--env=TMPDIR={site.folder}/tmp"]
    launch += [*shlex.split(config.launch), "--", *words]
    launch += [f"--strategy={config.strategy}", "--resume=auto"]
    lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            launch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=site.folder, env=site.environ,
        )  # fmt: skip

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put((time.monotonic(), line.decode(errors="replace").rstrip()))

        threading.Thread(target=read, daemon=True).start()
        site.launcher = process.pid
        return process

    process, left, offset, heard_s = start(), list(order), 0, time.monotonic()
    end: Callable[[], object] | None = None  # of the last fault, while it lasts
    try:
        while True:
            code = process.poll()
            time.sleep(0.02)
            now_s = time.monotonic()
            while not lines.empty():
                at_s, line = lines.get()
                said.append(line)
                #   phalanx: lost: rank 2 on b was ended by signal SIGKILL
                #   phalanx: restart 1 of 6: dp4 on a:2,b:2, from the last state of RUN
                #   phalanx: join: dp4 on a:2,b:2, from the last state of RUN
                if event := re.match(r"phalanx: (lost|restart|join)\b", line):
                    seen.events.append((at_s, cast(Event, event[1]), line))
                    say(line)
            with suppress(FileNotFoundError), (out / METRICS_FILE).open("rb") as file:
                file.seek(offset)
                for line in file.readlines():
                    if line.endswith(b"\n"):
                        offset += len(line)
                        seen.add(now_s, json.loads(line))
                        heard_s = now_s
            if end is not None and now_s > strikes[-1].until_s:
                end()
                end = None
            if code is not None:
                if end is not None:
                    continue
                if not code or not strikes or strikes[-1].fault.kind != "disk":
                    break
                process, heard_s = start(), now_s  # a full disk ends a job; a free one can go on
            elif now_s - heard_s > config.limit_s:
                said.append(f"no new step for {config.limit_s:g} s")
                break
            elif heard_s == now_s and left and seen.last_step >= left[0].step:
                if strikes and not seen.has_recovered(strikes[-1]):
                    continue
                time.sleep(left[0].pause * seen.step_s)
                now_s, load = time.monotonic(), os.getloadavg()[0]
                if (struck := site.strike(left[0])) is not None:
                    who, end = struck
                    until_s = now_s if end is None else now_s + config.for_s
                    strikes.append(Strike(left.pop(0), who, now_s, until_s, load))
                    say(f"after step {seen.last_step}: {strikes[-1].fault.kind}, {who}")
    finally:
        if end is not None:
            end()
        process.send_signal(signal.SIGINT)
        for each in (process, *site.joins):
            with suppress(subprocess.TimeoutExpired):
                each.wait(15)
            each.kill()
            each.wait()
    wrong = [f"{len(left)} faults never struck"] if left else []
    if process.returncode:
        wrong += [f"the job ended with {process.returncode}:", *said[-12:]]
    return seen, strikes, wrong


def differences(seen: Timeline, out: Path, undisturbed: Path) -> list[str]:
    """Return what differs from the undisturbed run: steps, samples, losses and weights."""
    wrong, alone = list[str](), Timeline()
    for line in (undisturbed / METRICS_FILE).read_text().splitlines():
        alone.add(0.0, json.loads(line))
    if list(seen.final) != list(alone.final):
        wrong.append(f"steps are missing: {sorted({*alone.final} - {*seen.final})}")
    for step, record in alone.final.items():
        other = seen.final.get(step, record)
        is_near = math.isclose(other["loss"], record["loss"], rel_tol=MOST_APART)
        if not is_near or other["tokens"] != record["tokens"]:
            wrong.append(f"the loss of step {step} is {other['loss']}, not {record['loss']}")
            break
    folders = [manifest.find(run) for run in (out, undisturbed)]
    abouts = [manifest.read(folder) for folder in folders]
    if abouts[0].consumed != abouts[1].consumed:
        wrong.append(f"{abouts[0].consumed} samples were taken, not {abouts[1].consumed}")
    tensors = [index.read(*each) for each in zip(folders, (a.files for a in abouts), strict=True)]
    for name in tensors[1]:
        if name.startswith("model."):
            one, other = (
                index.load_full(lambda file, folder=folder: open_file(folder / file), each, name)
                for folder, each in zip(folders, tensors, strict=True)
            )
            if not (apart := float((one - other).abs().max())) <= MOST_APART:
                wrong.append(f"{name} differs by {apart:.3g}")
    return wrong


def _result(
    config: FaultsConfig, seen: Timeline, strikes: Sequence[Strike], wrong: Sequence[str]
) -> BenchResult:
    """Return the table of what each fault cost, the totals and the verdict."""
    steps = seen.steps()
    ends = [*(strike.at_s for strike in strikes[1:]), math.inf]
    costs = [seen.cost_of(*pair) for pair in zip(strikes, ends, strict=True)]
    whole_s = steps[-1][0] - steps[0][0] if steps else 0.0
    lost_s = whole_s - seen.useful_s
    useful = seen.useful_s / whole_s if whole_s else 0.0
    again_bytes, repeated = sum(c.again_bytes for c in costs), sum(c.repeated for c in costs)
    heads = (
        *("fault", "whom", Number("step", "d"), Number("detected s", ".1f")),
        *(Number("next step s", ".1f"), Number("again", "d"), Number("lost s", ".1f")),
        *(Number("again MiB", ".2f", MIB), "then", Number("load", ".1f")),
    )
    rows = [tuple(vars(cost).values()) for cost in costs]
    total = (
        f"lost {lost_s:.1f} s of {whole_s:.1f} s: {useful:.0%} useful; {repeated} steps repeated, "
        f"for which a rank sent {again_bytes / MIB:.2f} MiB again"
    )
    verdict = "as undisturbed: each sample once, losses and weights within 1e-10; nothing is left"
    return BenchResult(
        name=f"faults-{config.strategy}-{config.seed}",
        shown=[
            Table(f"Faults of {config.strategy}, seed {config.seed}", heads, rows),
            total,
            *([Line(each, "red") for each in wrong] or [verdict]),
        ],
        values={
            **{name: getattr(config, name) for name in ("strategy", "hosts", "seed", "for_s")},
            "faults": [values_of(cost) for cost in costs],
            "steps": len(seen.final),
            "step_s": seen.step_s,
            "seconds": whole_s,
            "lost_s": lost_s,
            "useful": useful,
            "repeated": repeated,
            "again_bytes": again_bytes,
            "wrong": list(wrong),
        },
        exit_code=int(bool(wrong)),
    )


def _output(*words: str) -> str:
    """Return what a command prints; "" if it does not end within 20 s."""
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout
    return ""
