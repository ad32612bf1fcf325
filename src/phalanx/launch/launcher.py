"""`phalanx launch`: run one job on several hosts, and continue it when a rank or a host is lost.

    gathering ──a host refuses─────────────────────────────> exit 2, before any rank starts
       │ all agree
       v
    starting ──> running ──all ranks end───────────────────> their exit code
       ^           ├─ a rank fails by an error of its own ─> that rank's exit code
       │           ├─ a signal ──> ranks save and end ─────> 128 + signal; a second: at once
       │           ├─ a rank or host is lost ──────┬───────> exit 1, without restarts
       │           └─ a host joins ──> ranks save ─┤
       └────── gathering the remaining hosts <─────┘

A generation is the time between two starts. `agent` has the messages; this process imports no
torch. A host whose ssh is lost is asked once more, at once, and left out if it does not answer.
If this process is lost with its host, the agent of the first host that is left starts another
(`succeed`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from phalanx.errors import ConfigError, Interrupted, printable
from phalanx.launch import link
from phalanx.launch.agent import TICK_S, Channel, Message, versions
from phalanx.launch.failure import LOST_PEER, report
from phalanx.launch.hosts import Host, LaunchRequest, parse_host
from phalanx.launch.interface import address_towards
from phalanx.launch.launched import JobReport
from phalanx.launch.lease import Leases, ListeningClock
from phalanx.launch.signals import collected
from phalanx.strategy import Strategy
from phalanx.strategy.advice import shrunk

CONNECT_S: Final = 10.0
"""Longest wait for the ssh server of a host, in seconds."""

AGAIN_S: Final = 3.0
"""The same for a host that was lost; and then for its agent."""

AGENT_S: Final = 20.0
"""Longest wait for the agent on a host whose ssh server answers, in seconds."""

START_S: Final = 120.0
"""Longest wait for the import of torch and the store of the ranks, in seconds."""

SILENT_S: Final = 11.0
"""Seconds without a word of an agent after which its host is lost; its ranks have ended then."""

LISTENING_S: Final = 2.0
"""Most seconds that count between two looks: for longer, this process was stopped or blocked."""

TOGETHER_S: Final = 0.4
"""Time to collect what else has happened, once a rank has failed or is lost, in seconds."""

PEERS_S: Final = 14.0
"""Time to find out which rank is lost, once another has reported a lost peer, in seconds."""

LAST_WORDS_S: Final = 2.0
"""Time for an agent to end, or a rank to say how to resume, in seconds."""

TAKEN_IN: Final = b"taken in"
"""Answer to a join of a host that can take part."""

UNREACHABLE: Final = "refused|timed out|no route|unreachable|resolve|not known|name resolution"

CURES: Final = {
    "resolve|not known|name resolution": "its name is unknown; add it to /etc/hosts or to "
    "~/.ssh/config, or give its address",
    "refused": "it refuses ssh; start an ssh server there (package openssh-server)",
    "permission denied": "ssh is not let in; give it your key by: ssh-copy-id {target}",
    "host key": "ssh does not know its key, or knows another; look, and accept it by: ssh {target}",
    "timed out|no route|unreachable": "it does not answer; switch it on, or look for the fault by: "
    "ping {name}",
    "cd: ": "it has no folder {folder}; make it, or mount it there by NFS",
    "no module named": "it has no phalanx; install it there by: {python} -m pip install "
    "phalanx-train",
    "exec: |not found": "it has no {python}; install the same environment at the same path",
}
"""Words of ssh, a shell or Python, as a pattern -> the fault of the host, and the cure."""

MODULES: Final = {
    "train": ("phalanx.train.run", "phalanx.script.proof"),
    "run": ("phalanx.script.script_rank",),
    "verify": ("phalanx.verify.harness",),
    "bench": (),
}
"""Verb that can be launched -> modules that its ranks need."""


class Remote:
    """The agent on a host, as the launcher sees it.

    Attributes:
        host: the host, with the number of its ranks.
        lost: why the agent is lost; empty while it is not.
        answers: kind of message -> the last one.
        errors: what ssh and the agent printed as errors before the agent answered.
        ranks: ranks of the current generation.
    """

    def __init__(self, host: Host, request: LaunchRequest, job: str, connect_s: float) -> None:
        """Start the agent, by ssh unless the host is this machine."""
        self.host, self.lost, self.errors, self.ranks = host, "", "", range(0)
        self.answers: dict[str, Message] = {}
        self._folder = request.folder
        self.process = subprocess.Popen(
            agent_command(host, request, connect_s),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=request.folder if host.is_local else None,
            start_new_session=True,  # a terminal's Ctrl-C must not reach ssh
        )  # fmt: skip
        process: Any = self.process
        self.channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        self.error_output: int = process.stderr.fileno()
        os.set_blocking(self.error_output, False)
        process.stdin.close()
        process.stdout.close()
        variables = dict(request.variables)
        self.channel.send("settings", job=f"{job}.{host.name[:24]}", variables=variables)
        self.channel.keep_pinging()

    def end(self, limit_s: float) -> None:
        """Wait for the end of the agent, whose channel is closed, and kill its process here."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def why_not(self) -> str:
        """Return a sentence if the host cannot take part, with the cure; else an empty text."""
        if (facts := self.answers.get("facts")) is None:
            return why_no_agent(self.host, self.process.poll(), self.errors, self._folder)
        ours, theirs = versions(), facts["versions"]
        unlike = [
            f"{name} {theirs.get(name)}, but this machine has {ours[name]}"
            for name in ours
            if theirs.get(name) != ours[name]
        ]
        if unlike:
            return f"host {self.host.name} has {', and '.join(unlike)}; install the same"
        name = next(link.way(self.host.name))
        # With 127.0.1.1 in /etc/hosts, ssh reaches this machine in place of the host.
        is_this = not self.host.is_local and name.cure and name.values["address"]
        return str(name) if is_this else ""


def why_no_agent(host: Host, code: int | None, errors: str, folder: str) -> str:
    """Return a sentence on why no agent answers, with the cure.

    The command that starts it has ended with exit code `code`, or None while it runs, and printed
    `errors`.
    """
    words = printable(errors.strip().rpartition("\n")[2])
    names = {"folder": folder, "python": sys.executable, "name": host.name}
    for pattern, cure in CURES.items():
        if re.search(pattern, errors, re.IGNORECASE):
            return f"host {host.name}: {cure.format(target=host.target, **names)} ({words})"
    if code is None:
        return f"host {host.name} did not answer in time; see: ssh {host.target} true"
    return f"host {host.name}: its agent ended with exit code {code}: {words or 'without a word'}"


def ssh_command(host: Host, request: LaunchRequest, connect_s: float, script: str) -> list[str]:
    """Return the command that runs a shell script on a host."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s:.0f}"]
    return [*request.ssh, *options, host.target, f"exec sh -c {shlex.quote(script)}"]


def agent_command(
    host: Host,
    request: LaunchRequest,
    connect_s: float = CONNECT_S,
    module: str = "phalanx.launch.agent",
) -> list[str]:
    """Return the command that starts the agent of a host, which is a module."""
    agent = [sys.executable, "-P", "-m", module]
    if host.is_local:
        return agent
    path = os.environ.get("PYTHONPATH")
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), *agent]
    script = f"cd {shlex.quote(request.folder)} && exec {shlex.join(words)}"
    return ssh_command(host, request, connect_s, script)


@dataclass(kw_only=True)
class JobState:
    """What a launcher must know of a job that another has begun.

    Attributes:
        job: name of the job, which its agents know.
        generation: number of the generation.
        restarts: number of generations that a loss began.
        fewest: fewest ranks on which the job continues; 0: not known yet.
        strategy: the strategy of the first generation.
        report: the last report of rank 0.
    """

    job: str = field(default_factory=lambda: secrets.token_hex(4))
    generation: int = 0
    restarts: int = 0
    fewest: int = 0
    strategy: str | None = None
    report: JobReport | None = None


class JobLauncher:
    """A job on several hosts, from the first connection to the exit code."""

    def __init__(self, request: LaunchRequest, progress: JobState | None = None) -> None:
        self._request = request
        self._progress = progress or JobState()
        self._hosts = list(request.hosts)
        self._remotes: list[Remote] = []
        self._selector = selectors.DefaultSelector()
        self._clock = ListeningClock(LISTENING_S)
        self._leases = Leases[str](lambda: self._clock.now_s)
        self._signals: list[int] = []
        self._stop = 0  # the signal that ends the job
        self._asked = 0  # the signal that the ranks of this generation have got
        self._asking: list[socket.socket] = []  # joins
        self._is_joining = False  # the ranks were asked to end, for a host that joins
        self._ended_s, self._why = time.monotonic(), "launcher was lost"  # of the last generation
        self._codes: dict[int, int] = {}
        self._stopped: list[int] = []
        self._has_stepped = False

    def run(self) -> int:
        """Run the job and return its exit code.

        Raises:
            ConfigError: a host cannot take part, before any rank has started.
            Interrupted: a signal arrived before any rank has started.
        """
        with collected() as self._signals, self._control():
            try:
                return self._run()
            finally:
                for remote in self._living:
                    remote.channel.send("end")
                    remote.channel.close()
                until_s = time.monotonic() + LAST_WORDS_S
                for remote in self._living:
                    remote.end(max(0.1, until_s - time.monotonic()))
                self._selector.close()

    def _run(self) -> int:
        now, most_restarts = self._progress, self._request.restarts
        while True:
            self._gather(is_first=now.generation == 0)
            if self._signals:
                return 128 + self._signals[0]
            num_left = sum(host.num_ranks for host in self._hosts)
            now.fewest = now.fewest or self._request.min_ranks or num_left // 2 + 1
            if num_left < now.fewest:
                if now.generation == 0:
                    raise ConfigError(
                        f"--min-ranks is {now.fewest}, but the hosts have {num_left} ranks; "
                        f"expected at most {num_left}"
                    )
                run = f"; {now.report.run} has its last state" if now.report else ""
                report(f"the job ends: {num_left} ranks are left, --min-ranks is {now.fewest}{run}")
                return 1
            strategy, num_ranks = self._fitting(num_left)
            if now.generation:
                which = f"restart {now.restarts} of {most_restarts}"
                where = "the last state" if now.report is not None else "the begin"
                where += f" of {now.report.run}" if now.report and now.report.run else ""
                hosts = ",".join(map(str, self._hosts))
                name = strategy or f"{num_ranks} ranks"
                report(f"{'join' if self._is_joining else which}: {name} on {hosts}, from {where}")
            self._is_joining = False
            self._start(num_ranks, strategy)
            end = self._watch()
            if isinstance(end, int):
                return end
            if not self._is_joining:
                report(end)
                if now.restarts == most_restarts:
                    if most_restarts:
                        report(f"the job ends, because it has begun again {most_restarts} times")
                    return 1
                now.restarts += 1
            self._why = "ranks were asked to end" if self._is_joining else "loss was seen"
            now.generation += 1

    def _fitting(self, num_left: int) -> tuple[str | None, int]:
        """Return the strategy of the next generation, None for the command's, and its ranks."""
        # rank 0 has reported     its strategy on the remaining ranks, from the last state
        # it has not              the same command: nothing has been done
        now = self._progress
        strategy = Strategy.parse(now.strategy) if now.strategy else self._request.strategy
        if strategy is None or now.generation == 0:
            return None, num_left
        if num_left == strategy.num_ranks and now.report is None:
            return None, num_left
        rows = now.report.global_rows if now.report else None
        if num_left > strategy.num_ranks:  # by hosts that have joined: more data ranks
            axis = "fsdp" if strategy.dp.degree == 1 < strategy.fsdp.degree else "dp"
            degree = getattr(strategy, axis).degree
            others = strategy.data_ranks // degree
            larger = range(num_left * degree // strategy.num_ranks, degree, -1)
            degree = next((n for n in larger if (rows or 0) % (n * others) == 0), degree)
            strategy = strategy.with_degree(axis, degree)
        strategy = shrunk(strategy, num_left, rows)
        return str(strategy), strategy.num_ranks

    # Hosts.

    @property
    def _living(self) -> list[Remote]:
        return [remote for remote in self._remotes if not remote.lost]

    def _connect(self, host: Host, connect_s: float) -> Remote:
        """Start the agent of a host, and hear it from now on."""
        try:
            remote = Remote(host, self._request, self._progress.job, connect_s)
        except OSError as error:
            raise ConfigError(
                f"the command {error.filename} cannot be run: {error.strerror}; install OpenSSH's "
                "client, or name another by --ssh"
            ) from None
        read = selectors.EVENT_READ
        self._remotes.append(remote)
        self._leases.renew(remote.host.name)
        self._selector.register(remote.channel.source, read, lambda: self._hear(remote))
        self._selector.register(remote.error_output, read, lambda: self._hear_errors(remote))
        return remote

    def _gather(self, *, is_first: bool) -> None:
        """Kill the ranks that are left, and get an agent on each host that has none.

        Hosts that cannot take part are left out.

        Raises:
            ConfigError: `is_first`, and a host cannot take part.
            Interrupted: `is_first`, and a signal arrived.
        """
        living, self._remotes = self._living, self._living
        for remote in living:
            remote.answers.pop("cleared", None)
            remote.channel.send("clear")
        names = [remote.host.name for remote in living]
        connect_s, agent_s = (CONNECT_S, AGENT_S) if is_first else (AGAIN_S, AGAIN_S)
        new = [self._connect(host, connect_s) for host in self._hosts if host.name not in names]
        self._await(living, "cleared", START_S)
        self._await(new, "facts", connect_s + agent_s)
        if is_first and self._signals:
            raise Interrupted(self._signals[0])
        whys = {remote: why for remote in new if (why := remote.why_not())}
        if is_first and whys:
            raise ConfigError("\n".join(whys.values()))
        for remote, why in whys.items():
            self._lose(remote, why)
            report(f"left out: {why}")
        names = [host.name for host in self._hosts]
        self._remotes = sorted(self._living, key=lambda remote: names.index(remote.host.name))
        # A host without a number of ranks gets an equal part of the strategy's, or one a GPU.
        strategy = self._request.strategy
        unnumbered = [remote for remote in self._remotes if not remote.host.num_ranks]
        rest = (strategy.num_ranks if strategy else 0) - self._request.num_ranks
        for remote in unnumbered:
            facts = remote.answers["facts"]
            num_ranks = facts["num_gpus"] or min(2, facts["num_cores"])
            if is_first and rest > 0 and rest % len(unnumbered) == 0:
                num_ranks = rest // len(unnumbered)
            remote.host = replace(remote.host, num_ranks=num_ranks)
        self._hosts = [remote.host for remote in self._remotes]
        for remote in self._remotes:
            remote.channel.send("prepare", modules=MODULES[self._request.command[0]])

    def _lose(self, remote: Remote, why: str) -> None:
        """Record that a host is lost, and end its process here."""
        if remote.lost:
            return
        with suppress(subprocess.TimeoutExpired):
            remote.process.wait(0.2)  # its last words
        self._hear_errors(remote)
        remote.lost = why
        for descriptor in (remote.channel.source, remote.error_output):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
        remote.channel.close()
        remote.end(0)

    # A generation.

    def _start(self, num_ranks: int, strategy: str | None) -> None:
        """Start the ranks; a loss meanwhile shows in `_watch`.

        Raises:
            ConfigError: in the first generation, a host does not reach the store.
        """
        self._codes, self._stopped, self._asked, self._has_stepped = {}, [], 0, False
        for remote in self._remotes:
            remote.ranks = range(0)
            remote.answers = {"facts": remote.answers["facts"]}
        now, (first, *others) = self._progress, self._remotes
        first.channel.send("store", port=self._request.port)
        self._await([first], "store", START_S)
        if "store" not in first.answers:
            if not self._signals:
                self._lose(first, f"its store did not start within {START_S:.0f} s")
            return
        port, address = first.answers["store"]["value"], "127.0.0.1"
        if isinstance(port, str):
            raise ConfigError(
                f"host {first.host.name} cannot host the store of the ranks: {printable(port)}; "
                "choose a free port by --port, or leave --port out"
            )
        why, unreached = "it has no address that the other hosts know", others[:1]
        for address in self._addresses(first, others):
            for remote in others:
                remote.answers.pop("reached", None)
                remote.channel.send("reach", address=address, port=port)
            self._await(others, "reached", START_S)
            unreached = [each for each in others if each.answers.get("reached", {}).get("why")]
            if not unreached:
                break
            why = unreached[0].answers["reached"]["why"]
            why = f"host {unreached[0].host.name} does not reach {address}, port {port}: {why}"
        if unreached and now.generation:
            self._lose(unreached[0], why)
        elif unreached and not self._signals:
            raise ConfigError(
                f"{why}; open the port on host {first.host.name} (a firewall?), choose one by "
                f"--port, or see: phalanx doctor --peer {first.host.name}"
            )
        launched = {
            "generation": now.generation,
            "restarts": self._request.restarts,
            "strategy": strategy,
            "first": now.strategy,
            "run": now.report and now.report.run,
        }
        variables = {
            "WORLD_SIZE": f"{num_ranks}",
            "MASTER_ADDR": address,
            "MASTER_PORT": f"{port}",
            "TORCHELASTIC_RUN_ID": now.job,
            "TORCHELASTIC_RESTART_COUNT": f"{now.generation}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command, begin = self._request.command, 0
        for remote in self._remotes:
            num_here = min(remote.host.num_ranks, num_ranks - begin)
            remote.ranks = range(begin, begin + num_here)
            if num_here and not remote.lost:
                ranks = {"first": begin, "num_here": num_here, "variables": variables}
                remote.channel.send("start", **ranks, command=command, launched=launched)
            begin += num_here

    def _addresses(self, first: Remote, others: Sequence[Remote]) -> list[str]:
        """Return the addresses at which the other hosts may reach the first, likely ones first."""
        if all(remote.host.is_local for remote in self._remotes):
            return ["127.0.0.1"]
        addresses = [first.answers["facts"]["address"]]
        with suppress(OSError):
            addresses.append(socket.gethostbyname(first.host.name))
        if first.host.is_local:
            addresses += [address_towards(remote.host.name) for remote in others]
        return list(dict.fromkeys(a for a in addresses if a and ":" not in a and a[:4] != "127."))

    def _watch(self) -> int | str:
        """Wait for the end of the generation; return the job's exit code, or the loss."""
        since_s: float | None = None  # the first failure or loss
        while True:
            self._pump()
            now_s = time.monotonic()
            if len(self._signals) > 1:
                return 128 + self._signals[0]
            if self._signals and not self._stop:
                self._stop = self._signals[0]
                self._ask_to_end(self._stop)
            if self._asking:
                self._take_in(self._asking.pop(0))
            expected = {0, LOST_PEER, self._asked and 128 + self._asked}
            are_over = all(
                each.lost or rank in self._codes for each in self._remotes for rank in each.ranks
            )
            failures = [code for code in self._codes.values() if 0 < code and code not in expected]
            lost = self._losses()
            is_vague = not failures and not lost and LOST_PEER in self._codes.values()
            if not failures and not lost and not is_vague:
                if are_over and self._codes and not any(self._codes.values()):
                    return 0
                if are_over:
                    return 128 + self._stop if self._stop else ""
                continue
            # What happens to several ranks at once is one event, which has one cause:
            #
            #     an error of the program     ends the job, with the exit code of the first
            #     a rank or host is lost      begins the next generation
            #     a peer of a rank is lost    one of both, which takes a while to show
            if since_s is None:
                since_s = self._ended_s = now_s
            if now_s - since_s < (PEERS_S if is_vague else TOGETHER_S) and not are_over:
                continue
            if self._stop:
                return failures[0] if failures else 128 + self._stop
            if failures and (not lost or next(filter(None, self._codes.values())) == failures[0]):
                return failures[0]
            self._is_joining = False
            if is_vague:
                rank = next(rank for rank, code in self._codes.items() if code)
                lost = f"rank {rank} on {self._host_of(rank)} has lost another rank"
            if self._progress.restarts == self._request.restarts:
                for remote in self._living:
                    remote.channel.send("advice")
                self._await(self._remotes, "advice", LAST_WORDS_S)
                words = [each.answers.get("advice", {}).get("value") for each in self._remotes]
                lost = "\n".join([lost, *filter(None, words)][:2])
            return lost

    def _losses(self) -> str:
        """Return a sentence on the hosts and ranks that are lost, or an empty text."""
        lost = [f"host {each.host.name}: {each.lost}" for each in self._remotes if each.lost]
        for rank, code in self._codes.items():
            name = f"rank {rank} on {self._host_of(rank)}"
            if code < 0:
                names = {each.value: each.name for each in signal.Signals}
                lost.append(f"{name} was ended by signal {names.get(-code, -code)}")
        if self._request.restarts:  # else `kill -CONT` continues it
            lost += [f"rank {each} on {self._host_of(each)} is stopped" for each in self._stopped]
        return "lost: " + "; ".join(lost) if lost else ""

    def _host_of(self, rank: int) -> str:
        names = (each.host.name for each in self._remotes if rank in each.ranks)
        return next(names, f"{self._remotes[0].host.name} (the store)")

    def _ask_to_end(self, signum: int) -> None:
        """Send the ranks a signal, on which they save and end; a second would end them at once."""
        if not self._asked:
            self._asked = signum
            for remote in self._living:
                remote.channel.send("signal", signum=signum)

    # Messages.

    def _pump(self) -> None:
        """Handle what has arrived, after at most TICK_S; find silent hosts."""
        for key, _ in self._selector.select(TICK_S):
            key.data()
        self._clock.tick()
        for remote in self._living:
            if "facts" in remote.answers:
                if (silent_s := self._leases.age_s(remote.host.name)) > SILENT_S:
                    self._lose(remote, f"no word for {silent_s:.0f} s")

    def _await(self, remotes: Sequence[Remote], kind: str, limit_s: float) -> None:
        """Wait until each of `remotes` has sent `kind` or is lost, or a signal arrives."""
        until_s = time.monotonic() + limit_s
        while not self._signals and time.monotonic() < until_s:
            if all(remote.lost or kind in remote.answers for remote in remotes):
                return
            self._pump()

    def _hear(self, remote: Remote) -> None:
        try:
            messages = remote.channel.receive()
        except EOFError:
            self._lose(remote, "its ssh or its agent has ended")
            return
        self._leases.renew(remote.host.name)
        for message in messages:
            kind, rank = message["is"], message.get("rank")
            if kind == "text":
                self._print(remote, rank, message["text"], message["stream"])
            elif kind == "ended" and (rank in remote.ranks or rank == -1):
                self._codes[message["rank"]] = message["code"]
            elif kind == "stopped":
                self._stopped += [message["rank"]] if rank in remote.ranks else []
            elif kind == "report":
                self._progress.report = JobReport(**message["value"])
                self._progress.strategy = self._progress.strategy or message["value"]["strategy"]
                self._name_successors()
            elif kind == "step" and not self._has_stepped:
                self._has_stepped = True
                if self._progress.generation:
                    took_s = time.monotonic() - self._ended_s
                    report(f"step {message['value']} is done, {took_s:.1f} s after the {self._why}")
            else:
                remote.answers[kind] = message

    def _hear_errors(self, remote: Remote) -> None:
        """Keep what ssh and the agent print before the agent answers; print what comes later."""
        try:
            text = os.read(remote.error_output, 1 << 16).decode(errors="backslashreplace")
        except (BlockingIOError, OSError):
            return
        remote.errors += text
        if not text:
            with suppress(KeyError):
                self._selector.unregister(remote.error_output)
            if remote.errors and "facts" in remote.answers:
                self._print(remote, None, remote.errors, 2)
        elif "facts" in remote.answers:
            lines, end, remote.errors = remote.errors.rpartition("\n")
            if end:
                self._print(remote, None, lines, 2)

    def _print(self, remote: Remote, rank: int | None, text: str, stream: int) -> None:
        """Print lines with rank and host in front; the host only if there are several."""
        words = [] if rank is None else [str(rank)]
        if rank is None or len(self._request.hosts) > 1:
            words.append(remote.host.name)
        lines = text.removesuffix("\n").split("\n")
        output = sys.stdout if stream == 1 else sys.stderr
        output.write("".join(f"[{' '.join(words)}] {line}\n" for line in lines))
        output.flush()

    # Hosts that join, and the loss of this host.

    @contextmanager
    def _control(self) -> Generator[None]:
        """Listen for `join`."""

        def accept() -> None:
            self._asking.append(listener.accept()[0])

        path = control_folder() / f"{os.getpid()}.sock"
        begun = path.with_suffix(".new")
        begun.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(begun))
            listener.listen()
            begun.rename(path)  # now: `join` removes a socket at which nobody listens
            self._selector.register(listener, selectors.EVENT_READ, accept)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _take_in(self, connection: socket.socket) -> None:
        """Start the agent of a host that joins, and ask the ranks to save and end."""
        connection.settimeout(1.0)
        with suppress(OSError), connection:
            try:
                host = parse_host(connection.recv(1000).decode())
                if any(host.name == each.name for each in self._hosts):
                    raise ConfigError(f"host {host.name} takes part in the job already")
                remote = self._connect(host, CONNECT_S)
                self._await([remote], "facts", CONNECT_S + AGENT_S)
                if why := "the job ends" if self._signals else remote.why_not():
                    self._lose(remote, why)
                    self._remotes.remove(remote)
                    raise ConfigError(why)
            except ValueError as error:
                connection.sendall(str(error).encode())
                return
            self._hosts.append(host)
            report(f"host {host} joins: the ranks save and end after this step")
            self._is_joining, self._ended_s = True, time.monotonic()
            self._ask_to_end(signal.SIGTERM)
            connection.sendall(TAKEN_IN)

    def _name_successors(self) -> None:
        """Send the agents how to continue the job if this process is lost with its host."""
        if self._progress.restarts < self._request.restarts:
            hosts = [host for host in self._hosts if not host.is_local]
            request = asdict(self._request) | {"hosts": [asdict(host) for host in hosts]}
            progress = asdict(self._progress) | {"restarts": self._progress.restarts + 1}
            progress["generation"] += 1
            # The two sides of a cut network must not both continue: more than half of all may.
            majority = sum(host.num_ranks for host in self._hosts) // 2 + 1
            progress["fewest"] = max(self._progress.fewest, majority)
            state = {"request": request, "progress": progress, "host": socket.gethostname()}
            for remote in self._living:
                if not remote.host.is_local:
                    remote.channel.send("successor", state=state, own=remote.host.name)


def read_state(state: Message) -> tuple[LaunchRequest, JobState]:
    """Return the job and its progress, as a launcher has sent them to its agents."""
    request, report = state["request"], JobReport(**state["progress"]["report"])
    lists = {
        "hosts": tuple(Host(**host) for host in request["hosts"]),
        "variables": tuple((name, value) for name, value in request["variables"]),
        **{name: tuple(request[name]) for name in ("command", "ssh")},
    }
    return LaunchRequest(**request | lists), JobState(**state["progress"] | {"report": report})


def is_answering(name: str, request: LaunchRequest) -> bool:
    """Return whether the ssh server of a host answers, be it that it lets this user not in."""
    words = ssh_command(Host(name), request, AGAIN_S, "true")
    asked = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return asked.returncode == 0 or not re.search(UNREACHABLE, asked.stderr, re.IGNORECASE)


def can_see_loss(state: Message) -> bool:
    """Return whether ssh reaches the launcher's host now, so that silence later is its loss.

    Else an agent whose connection alone is lost would begin a second job beside the first.
    """
    return is_answering(state["host"], read_state(state)[0])


def succeed(state: Message, own: str) -> None:
    """Start a launcher on this host, whose agent has lost the launcher of its job.

    Another host does it if it comes first in the order of hosts. If ssh still reaches the host of
    the launcher, somebody has killed the launcher on purpose, and the job ends.
    """
    request, progress = read_state(state)
    names = [host.name for host in request.hosts]
    if any(is_answering(each, request) for each in (state["host"], *names[: names.index(own)])):
        return
    for host in state["request"]["hosts"]:  # ssh may not let this host in from itself
        if host["name"] == own and not Host(**host).is_local:
            host |= {"name": "localhost", "user": ""}
    assert progress.report is not None
    log = Path(progress.report.run or request.folder) / "launch.log"
    with log.open("ab") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.cli.launch"],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    assert launcher.stdin is not None
    launcher.stdin.write(json.dumps(state).encode())
    launcher.stdin.close()


def control_folder() -> Path:
    """Return the folder of this user's sockets of running jobs, which no other user may enter."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = folder / f"phalanx-launch-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; set XDG_RUNTIME_DIR to a folder")
    return folder


def join(host: Host, job: int | None) -> str:
    """Ask the launcher that runs on this machine to take a host in; return its refusal, or "".

    Raises:
        ConfigError: no job runs here, or several do and `job` is the process of none of them.
    """
    with ExitStack() as stack:
        running: dict[str, socket.socket] = {}
        for path in sorted(control_folder().glob("*.sock")):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                connection.connect(str(path))
                running[path.stem] = connection
            except ConnectionRefusedError:  # its launcher was killed
                path.unlink(missing_ok=True)
        chosen = [name for name in running if job is None or name == str(job)]
        if len(chosen) != 1:
            raise ConfigError(
                f"processes of phalanx launch on this machine: {', '.join(running) or 'none'}; "
                "expected one, or --job PROCESS"
            )
        running[chosen[0]].sendall(str(host).encode())
        with running[chosen[0]].makefile("rb") as answer:
            words = answer.read() or b"the job has ended"
            return "" if words == TAKEN_IN else words.decode()


def dry_run(request: LaunchRequest) -> Generator[str]:
    """Yield lines with what would be run; of variables the names alone, since values are secret."""
    yield f"each host runs its ranks of {request.command_text}, in {request.folder}"
    for host in request.hosts:
        yield f"{host}: {shlex.join(agent_command(host, request))}"
    yield f"environment: {', '.join(name for name, _ in request.variables)}"
