"""A job that `phalanx launch` keeps running while faults strike it, and what each fault cost.

    launcher      --ssh--> agents --> ranks         x fault   ! the launcher detects a loss
    steps         1 2 3 ... L x        !         F ... L  L+1 ...    records as they appear
                              |detected|next step|again |
                            |<----------- lost --------->|           minus one step's time
    undisturbed   1 2 3 ... in one process: losses and weights must be equal

The bench harms its own job alone: it knows the processes by their working folder, which it has
made, and fills no disk but one that it has mounted in that folder.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.tensor_file import open_file
from phalanx.config.fields import SEED, STEPS, Positional, Range
from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.launch.hosts import Host, parse_hosts
from phalanx.measure.logs import METRICS_FILE
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.units import MIB
from phalanx.strategy import Strategy

KINDS: Final = ("rank", "rank0", "host", "ssh", "stop", "cut", "slow", "disk", "clock")

LOSING: Final = KINDS[:6]
"""Kinds by which a job loses ranks, which the launcher must detect."""

SMALL: Final = (
    "train --precision float64 --device cpu --threads 1 --eval-every 0 --save every=10 "
    "--no-shared-memory "  # namespaces of one machine share memory, hosts do not
    "--log-to phalanx.bench.faults:on_record "
    "--data text.txt --corpus.seq-len 32 --corpus.validation 0.1 --corpus.cache cache "
    "--shape.num-layers 2 --shape.hidden 32 --shape.num-heads 2 --shape.num-kv-heads 2 "
    "--shape.ffn 48 --shape.vocab-size 300 --shape.max-seq-len 64 --shape.dropout 0.1 "
    "--batch.global-size 12 --batch.microbatch 1"
)
"""The job if no other is given: 12 rows a step, which 1, 2, 3, 4 and 6 data ranks divide."""

MOST_APART: Final = 1e-10
"""Largest difference from losses, relative, and float64 weights of the undisturbed run."""

SETTLING_S, SILENT_S = 30.0, 300.0
"""Seconds in which a lost host's processes must end, and without a step that end the bench."""

PACE_S: Final = 0.5
"""Least time of a step of the small job under faults that last, so that the job outlasts them."""

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
    """kill -9 of a rank, rank0, all processes of a host, or the launcher's ssh; stop: SIGSTOP of a
    rank; cut, slow: a host's link down, or at 1 Mbit/s; disk: the run's disk full; clock: rank 0's
    time.time() an hour ahead. If unset, the first six, as far as the hosts allow them."""
    hosts: str | None = None
    """Hosts and their ranks, as a:2,b:2; localhost with the ranks of the strategy if unset."""
    strategy: str = "dp4"
    """Strategy of the job at the start."""
    job: str = SMALL
    """The job in words after `phalanx`, without --strategy, --steps, --out and --resume."""
    steps: Annotated[int | None, STEPS] = None
    """Optimizer steps of the job; as many as the faults need if unset."""
    faults: Annotated[int, Range(1, 1000, "[]")] = 4
    """Number of faults."""
    seed: Annotated[int, SEED] = 0
    """Fixes which fault strikes when and whom."""
    for_s: Annotated[float, Range(0, 3600, "(]")] = 60.0
    """How long a cut, a slow link, a full disk or a moved clock lasts, in seconds."""
    undisturbed: str | None = None
    """Folder of an undisturbed run of the same job, which is run first if there is none."""
    ssh: str = "ssh"
    """The command ssh, with options of your own."""


class Fault(NamedTuple):
    """A fault of an order.

    Attributes:
        step: the fault strikes once this step is recorded.
        victim: any number; modulo the ranks, or hosts, that the job then has, it chooses one.
        pause: part of the time of a step to wait after the record, in [0, 1).
    """

    kind: str
    step: int
    victim: int
    pause: float


def order_of(seed: int, kinds: Sequence[str], number: int, steps: int) -> list[Fault]:
    """Return `number` faults at rising steps; each kind occurs as often as any other, or once more.

    Fault i strikes in part i of `number` equal parts of the run's first two thirds.
    """
    chance = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < number:
        drawn += chance.sample(list(kinds), len(kinds))
    room = max(1, 2 * steps // (3 * number))
    return [
        Fault(kind, at * room + chance.randint(1, room), chance.getrandbits(16), chance.random())
        for at, kind in enumerate(drawn[:number])
    ]


class Strike(NamedTuple):
    """A fault that struck, from `at_s` until it was over, and the load average at that time."""

    fault: Fault
    who: str
    at_s: float
    until_s: float
    load: float


class History:
    """What an observer saw of a run, in seconds of its own clock.

    Attributes:
        events: a (seconds, kind, value) each: number of a "step"; "strategy" of a generation, and
            "sent", the bytes of rank 0 in a step; the launcher's "lost", "restart" and "join".
        final: step -> its record, without steps that were taken again later.
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, str, Any]] = []
        self.final: dict[int, dict[str, Any]] = {}

    def add(self, at_s: float, record: dict[str, Any]) -> None:
        """Take a record of metrics.jsonl."""
        if record["kind"] == "step":
            step: int = record["step"]
            self.final = {before: self.final[before] for before in self.final if before < step}
            self.final[step] = record
            self.events.append((at_s, "step", step))
        elif record["kind"] == "config":
            self.events.append((at_s, "strategy", record["strategy"]))
        elif record["kind"] == "ranks" and record.get("sent"):
            self.events.append((at_s, "sent", sum(size for _, size in record["sent"].values())))

    def of(
        self, kind: str, after_s: float = -math.inf, until_s: float = math.inf
    ) -> list[tuple[float, Any]]:
        """Return the (seconds, value) of a kind, later than `after_s` and not than `until_s`."""
        return [(s, of) for s, each, of in self.events if each == kind and after_s < s <= until_s]

    def times(self) -> Iterator[tuple[float, float]]:
        """Yield begin and end of each step that follows on another in its generation."""
        steps = [event for event in self.events if event[1] in ("step", "strategy")]
        for (begin_s, _, one), (end_s, _, other) in itertools.pairwise(steps):
            if isinstance(one, int) and other == one + 1:
                yield begin_s, end_s

    @property
    def step_s(self) -> float:
        """Median time of a step; 0 before the second."""
        return statistics.median([end - begin for begin, end in self.times()] or [0.0])

    def has_recovered(self, strike: Strike) -> bool:
        """Return whether a new step was taken after a fault, and with a host that was cut off."""
        lost, joined = self.of("lost", strike.at_s), self.of("join", strike.until_s)
        kind = strike.fault.kind
        if (kind in LOSING and not lost) or (kind == "cut" and not joined):
            return False
        after_s = max([strike.until_s, *(at for at, _ in [*lost, *joined])])
        before = max([step for _, step in self.of("step", -math.inf, after_s)])
        return any(step > before for _, step in self.of("step", after_s))

    def cost_of(self, strike: Strike, end_s: float) -> dict[str, Any]:
        """Return what a fault cost until `end_s`, when the next one struck, or the run ended.

        Times that never came are None. "again_bytes" is what a rank sent for repeated steps.
        """
        begin_s, step = (self.of("step", -math.inf, strike.at_s) or [(strike.at_s, 0)])[-1]
        lost = [at for at, _ in self.of("lost", strike.at_s, end_s)]
        over_s = lost[-1] if lost else strike.until_s
        # Between the fault and its detection, ranks that it did not reach may complete a step.
        highest = max([step, *(each for _, each in self.of("step", strike.at_s, over_s))])
        resumed = self.of("step", over_s, end_s)
        back_s, back = next((pair for pair in resumed if pair[1] > highest), (end_s, step))
        repeated = sum(each <= highest for _, each in resumed)
        sent = self.of("sent", -math.inf, strike.at_s) or [(0.0, 0.0)]
        strategies = self.of("strategy", over_s, end_s) or self.of("strategy")[-1:] or [(0.0, "")]
        return {
            "kind": strike.fault.kind,
            "who": strike.who,
            "step": step,
            "detected_s": lost[0] - strike.at_s if lost else None,
            "next_step_s": resumed[0][0] - lost[0] if lost and resumed else None,
            "repeated": repeated,
            "lost_s": max(0.0, back_s - begin_s - (back - step) * self.step_s),
            "again_bytes": repeated * sent[-1][1],
            "strategy": strategies[0][1],
            "load": strike.load,
        }


class Site:
    """The hosts of a job, and what the bench can do to the job there.

    Attributes:
        launcher: pid of the launcher; 0 before it has started.
        links: host -> its interface, and namespace and interface at the other end of its link, if
            the host is a network namespace of this machine.
        joins: commands that have asked the launcher to take a host in.
        environ: environment of the launcher, with a TMPDIR of its own.
    """

    def __init__(self, config: FaultsConfig, folder: Path) -> None:
        self.folder, self.ssh, self.launcher = folder, shlex.split(config.ssh), 0
        num_ranks = Strategy.parse(config.strategy).num_ranks
        self.hosts: Sequence[Host] = parse_hosts(config.hosts or f"localhost:{num_ranks}")
        self.joins: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "TMPDIR": f"{folder}/tmp", "XDG_RUNTIME_DIR": f"{folder}/tmp"}
        self.links: dict[str, tuple[str, str, str]] = {}
        listed = _output("ip", "netns", "list") if shutil.which("ip") else ""
        for name in {host.name for host in self.hosts}.intersection(listed.split()):
            #   2: v0@if3: <BROADCAST ... \n  link/ether ... link-netns switch
            links = _output("ip", "-n", name, "link")
            if ends := re.search(r"^\d+: (\S+)@if(\d+):.*\n.* link-netns (\S+)", links, re.M):
                others = _output("ip", "-n", ends[3], "link")
                [far] = re.findall(rf"^{ends[2]}: ([^@:]+)", others, re.M)
                self.links[name] = ends[1], ends[3], far

    def refusal(self, kind: str) -> str:
        """Return why a fault of a kind is impossible on these hosts; "" if it is possible."""
        if kind not in KINDS:
            return f"'{kind}' is no kind of fault{nearest(kind, KINDS)}; {', '.join(KINDS)} are"
        is_here = all(host.is_local for host in self.hosts)
        plain = [host.name for host in self.hosts if host.name not in self.links]
        if kind in ("cut", "slow") and plain:
            return f"no {kind}: {plain[0]} is no network namespace of this machine; try stop"
        if kind == "ssh" and is_here:
            return "no ssh: all ranks are on this host; the nearest is host"
        if kind == "disk" and not (is_here and os.geteuid() == 0):
            return "no disk: it needs root to mount one, and all ranks on this host; try stop"
        return ""

    def order(self, names: Sequence[str]) -> None:
        """Take the order of the hosts from the launcher's words on a generation, as a:2,b:2."""
        self.hosts = sorted(
            self.hosts, key=lambda host: names.index(str(host)) if str(host) in names else 1 << 16
        )

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
        return [
            (start, pid, parent, words)
            for start, pid, parent, words in sorted(map(json.loads, lines))
            if pid != self.launcher
            and not (parent == self.launcher and words.startswith(" ".join(self.ssh)))
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
        interface, other, far = self.links[host.name]
        if kind == "cut":
            cut = ("ip", "-n", other, "link", "set", far)
            _output(*cut, "down")

            def mend() -> None:
                _output(*cut, "up")
                join = (sys.executable, "-m", "phalanx", "launch", f"--join={host}")
                self.joins.append(subprocess.Popen(join, env=self.environ, stdout=2))

            return host.name, mend
        shaper = ("tc", "-n", host.name, "qdisc", "replace", "dev", interface, "root")
        _output(*shaper, *"tbf rate 1mbit burst 16k latency 400ms".split())
        return host.name, lambda: _output(*shaper, "pfifo_fast")

    def left(self) -> set[str]:
        """Return the job's remains: processes, folders in memory, files in its TMPDIR."""
        left = {str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir()}
        for host in self.hosts:
            left |= {f"process {pid} on {host.name}" for _, pid, *_ in self.processes(host)}
            names = self.on(host, "ls", "/dev/shm", "/proc").split()
            agents = [name for name in names if re.match(r"phalanx-\d+-", name)]
            left |= {f"/dev/shm/{each}" for each in agents if each.split("-")[1] not in names}
        return left


def on_record(kind: str, _values: Mapping[str, Any]) -> None:
    """Pace the steps of rank 0, whose --log-to this is, and move its clock, by files of the bench.

    "clock" has seconds by which to move `time.time`. The kernel's clock stays, and so do monotonic
    clocks, and those that C++ reads.
    """
    if kind == "step" and Path("pace").exists():
        time.sleep(PACE_S)
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
        is_long = not {*kinds}.isdisjoint(KINDS[5:])
        least = 3 * math.ceil(config.for_s / PACE_S) if is_long else 0
        steps = config.steps or max(45 * config.faults, least)
        order = order_of(config.seed, kinds, config.faults, steps)
        words = [*shlex.split(config.job), f"--steps={steps}"]
        words += ["--log-to=phalanx.bench.faults:on_record"] * ("clock" in kinds)
        if "disk" in kinds:
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder / "disk")]
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
        if config.job == SMALL and is_long:
            (folder / "pace").touch()
        before, options = site.left(), [f"--strategy={config.strategy}", f"--out={out}"]
        seen, strikes, wrong = disturb(site, config, [*words, *options], out, order, say)
        until_s = time.monotonic() + SETTLING_S
        while (left := site.left() - before) and time.monotonic() < until_s:
            time.sleep(0.5)
        wrong += [f"left: {each}" for each in sorted(left)]
        with suppress(CheckpointError):  # the job has failed before its end, which `wrong` says
            wrong += differences(seen, out, alone)
    return _result(config, seen, strikes, wrong)


def disturb(
    site: Site,
    config: FaultsConfig,
    words: Sequence[str],
    out: Path,
    order: Sequence[Fault],
    say: PrintLine,
) -> tuple[History, list[Strike], list[str]]:
    """Run a job by `phalanx launch`, and let each fault strike when the job has recovered.

    Args:
        site: where the job runs.
        config: the command ssh, and how long faults last.
        words: the job's words, which write the run to `out`.
        out: folder of the run.
        order: the faults.
        say: prints the launcher's lines on losses, and the faults.

    Returns:
        What was seen, the faults that struck, and why the run is not whole, if it is not.
    """
    seen, strikes, said = History(), list[Strike](), list[str]()
    hosts = ",".join(str(host) for host in site.hosts)
    launch = [sys.executable, "-m", "phalanx", "launch", f"--hosts={hosts}", f"--ssh={config.ssh}"]
    launch += [f"--restarts={2 * len(order) + 2}", f"--env=TMPDIR={site.folder}/tmp"]
    launch += ["--min-ranks=1", "--", *words, "--resume=auto"]
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
                if event := re.match(r"phalanx: (lost|restart|join)\b(?:.* on (\S+), from)?", line):
                    seen.events.append((at_s, event[1], line))
                    site.order((event[2] or "").split(","))
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
                process, heard_s = start(), now_s  # a full disk has ended the job; now it resumes
            elif now_s - heard_s > SILENT_S:
                said.append(f"no new step for {SILENT_S:g} s")
                break
            elif heard_s == now_s and left and max(seen.final, default=0) >= left[0].step:
                if strikes and not seen.has_recovered(strikes[-1]):
                    continue
                time.sleep(left[0].pause * seen.step_s)
                now_s, load = time.monotonic(), os.getloadavg()[0]
                if (struck := site.strike(left[0])) is not None:
                    who, end = struck
                    until_s = now_s if end is None else now_s + config.for_s
                    strikes.append(Strike(left.pop(0), who, now_s, until_s, load))
                    say(f"after step {max(seen.final, default=0)}: {strikes[-1].fault.kind}, {who}")
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


def differences(seen: History, out: Path, undisturbed: Path) -> list[str]:
    """Return what differs from the undisturbed run: steps, samples, losses and weights."""
    wrong, alone = list[str](), History()
    for line in (undisturbed / METRICS_FILE).read_text().splitlines():
        alone.add(0.0, json.loads(line))
    if missing := sorted({*alone.final} ^ {*seen.final}):
        wrong.append(f"steps {missing} are in one run alone")
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
    config: FaultsConfig, seen: History, strikes: Sequence[Strike], wrong: Sequence[str]
) -> BenchResult:
    """Return the table of what each fault cost, the totals and the verdict."""
    steps = seen.of("step")
    ends = [*(strike.at_s for strike in strikes[1:]), math.inf]
    costs = [seen.cost_of(*pair) for pair in zip(strikes, ends, strict=True)]
    whole_s = steps[-1][0] - steps[0][0] if steps else 0.0
    # A step that was repeated is no useful one the first time.
    last = {step: at for at, step in steps}
    ends_s = {*last.values()}
    useful_s = sum(end - begin for begin, end in seen.times() if end in ends_s)
    total = {
        "seconds": whole_s,
        "lost_s": whole_s - useful_s,
        "useful": useful_s / whole_s if whole_s else 0.0,
        "repeated": sum(cost["repeated"] for cost in costs),
        "again_bytes": sum(cost["again_bytes"] for cost in costs),
        "step_s": seen.step_s,
    }
    heads = (
        *("fault", "whom", Number("step", "d"), Number("detected s", ".1f")),
        *(Number("next step s", ".1f"), Number("again", "d"), Number("lost s", ".1f")),
        *(Number("again MiB", ".2f", MIB), "then", Number("load", ".1f")),
    )
    said = (
        f"lost {total['lost_s']:.1f} s of {whole_s:.1f} s: {total['useful']:.0%} useful; "
        f"{total['repeated']} steps repeated, for which a rank sent "
        f"{total['again_bytes'] / MIB:.2f} MiB again"
    )
    verdict = "as undisturbed: each sample once, losses and weights within 1e-10; nothing is left"
    title = f"Faults of {config.strategy}, seed {config.seed}"
    return BenchResult(
        name=f"faults-{config.strategy}-{config.seed}",
        shown=[
            Table(title, heads, [tuple(cost.values()) for cost in costs]),
            said,
            *([Line(each, "red") for each in wrong] or [verdict]),
        ],
        values={
            **{name: getattr(config, name) for name in ("strategy", "hosts", "seed", "for_s")},
            **{"faults": costs, **total, "wrong": list(wrong)},
        },
        exit_code=int(bool(wrong)),
    )


def _output(*words: str) -> str:
    """Return what a command prints; "" if it does not end within 20 s."""
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout
    return ""
