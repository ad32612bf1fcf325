"""`phalanx launch`: run one job on several hosts, and continue it when a rank or a host is lost.

    checking ──a host refuses──────────────────────────────> exit 2, before any rank starts
       │ all agree
       v
    starting ──> running ──all ranks end───────────────────> their exit code
       ^           ├─ a rank fails by an error of its own ─> that rank's exit code
       │           ├─ a signal ──> ranks save and end ─────> 128 + signal; a second: at once
       │           ├─ a rank or host is lost ──> clearing ─> exit 1, without restarts
       └───────────┤                                │
         what is   └─ a host joins ──> ranks save ──┤
         left      <────────────────────────────────┘

A generation is the time between two starts. `agent` has the messages; this process imports no
torch. A host whose ssh is lost is asked once more, at once, and left out if it does not answer.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

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
"""The same for a host that was lost."""

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

NO_FOLDER, NO_PYTHON = 97, 98
"""Exit codes of the command that starts an agent."""

CURES: Final = {
    "resolve|not known|name resolution": "its name is unknown; add it to /etc/hosts or to "
    "~/.ssh/config, or give its address",
    "refused": "it refuses ssh; start an ssh server there (package openssh-server)",
    "Permission denied": "ssh is not let in; give it your key by: ssh-copy-id {target}",
    "Host key": "ssh does not know its key, or knows another; look, and accept it by: ssh {target}",
    "timed out|No route|unreachable": "it does not answer; switch it on, or look for the fault by: "
    "ping {name}",
}
"""Words of ssh -> what is wrong with the host, and the cure."""

MODULES: Final = {
    "train": ("phalanx.train.run", "phalanx.script.proof"),
    "run": ("phalanx.script.launch",),
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
        here = request.folder if host.is_local else None
        self.process = subprocess.Popen(
            agent_command(host, request, connect_s),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=here, start_new_session=True,  # a terminal's Ctrl-C must not reach ssh
        )  # fmt: skip
        process: Any = self.process
        self.channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        self.error_output: int = process.stderr.fileno()
        os.set_blocking(self.error_output, False)
        process.stdin.close()
        process.stdout.close()
        variables = dict(request.variables)
        self.channel.send("settings", job=f"{job}.{host.name}", variables=variables)
        self.channel.keep_pinging()

    def end(self, limit_s: float) -> None:
        """Wait for the end of the agent, whose channel is closed, and kill what is left here."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def why_not(self, own: dict[str, str], folder: str) -> str:
        """Return a sentence if the host cannot take part, with the cure; else an empty text."""
        name, code = self.host.name, self.process.poll()
        if (facts := self.answers.get("facts")) is not None:
            unlike = [each for each in own if facts["versions"].get(each) != own[each]]
            if unlike:
                theirs = ", ".join(f"{each} {facts['versions'].get(each)}" for each in unlike)
                ours = ", ".join(f"{each} {own[each]}" for each in unlike)
                return f"host {name} has {theirs}, but this machine has {ours}; install the same"
            return ""
        return why_no_agent(self.host, code, self.errors, folder)


def why_no_agent(host: Host, code: int | None, errors: str, folder: str) -> str:
    """Return a sentence on why no agent answers, with the cure.

    Args:
        host: the host of the agent.
        code: exit code of the command that starts the agent; None while it runs.
        errors: the error output of that command.
        folder: the working folder.
    """
    name = host.name
    words = printable(errors.strip().rpartition("\n")[2])
    if code == NO_FOLDER:
        return f"host {name} has no folder {folder}; make it, or share it by NFS"
    if code == NO_PYTHON:
        return (
            f"host {name} has no {sys.executable}; install the same environment at the same "
            "path, or share its folder"
        )
    if "No module named" in errors:
        return (
            f"host {name}: {words}; install phalanx there by: {sys.executable} -m pip install "
            "phalanx-train, or give PYTHONPATH"
        )
    for pattern, cure in CURES.items():
        if any(word.lower() in errors.lower() for word in pattern.split("|")):
            return f"host {name}: {cure.format(target=host.target, name=name)} ({words})"
    if code is None:
        return f"host {name} did not answer in time; see: ssh {host.target} true"
    return f"host {name}: its agent ended with exit code {code}: {words or 'without a word'}"


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
    if path := os.environ.get("PYTHONPATH"):
        agent = ["env", f"PYTHONPATH={path}", *agent]
    script = (
        f"cd {shlex.quote(request.folder)} 2>/dev/null || exit {NO_FOLDER}; "
        f"test -x {shlex.quote(sys.executable)} || exit {NO_PYTHON}; exec {shlex.join(agent)}"
    )
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s:.0f}"]
    return [*request.ssh, *options, host.target, f"exec sh -c {shlex.quote(script)}"]


class End(NamedTuple):
    """How a generation has ended: the job with it, if there is an exit code; else what is lost."""

    exit_code: int | None = None
    lost: str = ""


class Launcher:
    """A job on several hosts, from the first connection to the exit code."""

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self._job = secrets.token_hex(4)
        self._selector = selectors.DefaultSelector()
        self._clock = ListeningClock(LISTENING_S)
        self._leases = Leases[str](lambda: self._clock.now_s)
        self._remotes: list[Remote] = []
        self._signals: list[int] = []
        self._stop = 0
        self._strategy: str | None = None
        self._report: JobReport | None = None
        self._generation = 0
        self._ended_s, self._why = 0.0, ""  # when a generation ended, and why
        self._joining: tuple[Remote, socket.socket] | None = None
        self._is_stopping_to_join = False
        self._begin_generation()

    def run(self) -> int:
        """Run the job and return its exit code.

        Raises:
            ConfigError: a host cannot take part, before any rank has started.
            Interrupted: a signal arrived before any rank has started.
        """
        with collected() as self._signals:
            try:
                for host in self._request.hosts:
                    self._remotes.append(self._connect(host, CONNECT_S))
                self._await(self._remotes, "facts", CONNECT_S + AGENT_S)
                self._check()
                with self._control():
                    return self._run()
            finally:
                self._end()

    def _run(self) -> int:
        most, restarts = sum(remote.host.num_ranks for remote in self._remotes), 0
        fewest = self._request.min_ranks or most // 2 + 1
        num_ranks, run = most, None
        strategy: str | None = None
        while True:
            self._start(num_ranks, strategy, run)
            end = self._watch()
            if end.exit_code is not None:
                return end.exit_code
            if end.lost:
                report(end.lost)
                if restarts == self._request.restarts:
                    if restarts:
                        report(f"the job ends, because it has begun again {restarts} times")
                    return 1
                restarts += 1
            self._recover()
            if self._signals:
                return 128 + self._signals[0]
            num_left = sum(remote.host.num_ranks for remote in self._remotes)
            if num_left < fewest:
                report(
                    f"the job ends, because {num_left} of {most} ranks are left and --min-ranks is "
                    f"{fewest}{self._advice()}"
                )
                return 1
            # What the next generation computes:
            #
            #     rank 0 had reported     its strategy on what is left, from the last state
            #     it had not              the same command: nothing has been done
            before = self._strategy or strategy_of(self._request.command)
            rows = self._report.global_rows if self._report is not None else None
            num_ranks = num_left
            if before is not None and (self._report is not None or num_left != most):
                fitting = Strategy.parse(before)
                if num_left > fitting.num_ranks:  # by hosts that have joined: more data ranks
                    axis = "fsdp" if fitting.dp.degree == 1 < fitting.fsdp.degree else "dp"
                    degree = num_left * getattr(fitting, axis).degree // fitting.num_ranks
                    fitting = fitting.with_degree(axis, degree)
                fitting = shrunk(fitting, num_left, rows)
                strategy, num_ranks = str(fitting), fitting.num_ranks
            run = self._report.run if self._report is not None else None
            self._generation += 1
            hosts = ",".join(str(remote.host) for remote in self._remotes)
            self._why = "loss was seen" if end.lost else "ranks were asked to end"
            which = f"restart {restarts} of {self._request.restarts}" if end.lost else "join"
            where = "the begin" if self._report is None else f"the last state of {run or 'its run'}"
            report(f"{which}: {strategy or f'{num_ranks} ranks'} on {hosts}, from {where}")

    # Hosts.

    def _connect(self, host: Host, connect_s: float) -> Remote:
        """Start the agent of a host, and hear it from now on."""
        try:
            remote = Remote(host, self._request, self._job, connect_s)
        except OSError as error:
            raise ConfigError(
                f"the command {error.filename} cannot be run: {error.strerror}; install OpenSSH's "
                "client, or name another by --ssh"
            ) from None
        read = selectors.EVENT_READ
        self._leases.renew(remote.host.name)
        self._selector.register(remote.channel.source, read, lambda: self._hear(remote))
        self._selector.register(remote.error_output, read, lambda: self._hear_errors(remote))
        return remote

    def _check(self) -> None:
        """Raise ConfigError for hosts that cannot take part; give the others their ranks."""
        if self._signals:
            raise Interrupted(self._signals[0])
        own = versions()
        whys = [remote.why_not(own, self._request.folder) for remote in self._remotes]
        for remote in self._remotes:
            name = next(link.way(remote.host.name))
            # ssh would reach this machine in place of the host: 127.0.1.1 in /etc/hosts.
            if name.cure and name.values["address"] and not remote.host.is_local:
                whys.append(str(name))
        if any(whys):
            raise ConfigError("\n".join(filter(None, whys)))
        open_ended = [remote for remote in self._remotes if not remote.host.num_ranks]
        text = strategy_of(self._request.command)
        rest = (Strategy.parse(text).num_ranks if text else 0) - self._request.num_ranks
        for remote in open_ended:
            facts = remote.answers["facts"]
            num_ranks = facts["num_gpus"] or min(2, facts["num_cores"])
            if rest > 0 and rest % len(open_ended) == 0:
                num_ranks = rest // len(open_ended)
            remote.host = replace(remote.host, num_ranks=num_ranks)
        self._prepare(self._remotes)

    def _prepare(self, remotes: Iterable[Remote]) -> None:
        for remote in remotes:
            remote.channel.send("prepare", modules=MODULES[self._request.command[0]])

    def _lose(self, remote: Remote, why: str) -> None:
        """Record that a host is lost, and end what is left of it here."""
        if remote.lost:
            return
        with suppress(subprocess.TimeoutExpired):
            remote.process.wait(0.2)  # its last words
        self._hear_errors(remote)
        remote.lost = why
        self._leases.forget(remote.host.name)
        for descriptor in (remote.channel.source, remote.error_output):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
        remote.channel.close()
        remote.end(0)

    def _recover(self) -> None:
        """Kill the ranks that are left, and ask each lost host once more for an agent."""
        if self._is_stopping_to_join and self._joining is not None:
            self._remotes.append(self._joining[0])
            self._joining, self._is_stopping_to_join = None, False
        for remote in self._remotes:
            remote.answers.pop("cleared", None)
            remote.channel.send("clear") if not remote.lost else None
        before, self._remotes = self._remotes, [each for each in self._remotes if not each.lost]
        again = [self._connect(each.host, AGAIN_S) for each in before if each.lost]
        self._await(self._remotes, "cleared", START_S)
        self._await(again, "facts", 2 * AGAIN_S)
        own = versions()
        for remote in again:
            if why := remote.why_not(own, self._request.folder):
                self._lose(remote, why)
                report(f"left out: {why}")
        self._prepare(each for each in again if not each.lost)
        names = [each.host.name for each in before]
        self._remotes = sorted(
            (each for each in [*self._remotes, *again] if not each.lost),
            key=lambda each: names.index(each.host.name),
        )

    def _end(self) -> None:
        """End all agents, which end their ranks."""
        alive = [remote for remote in self._remotes if not remote.lost]
        if self._joining is not None and not self._joining[0].lost:
            alive.append(self._joining[0])
        for remote in alive:
            remote.channel.close()
        until_s = time.monotonic() + LAST_WORDS_S
        for remote in alive:
            remote.end(max(0.1, until_s - time.monotonic()))
        self._selector.close()

    # A generation.

    def _begin_generation(self) -> None:
        self._codes: dict[int, int] = {}
        self._stopped: list[int] = []
        self._has_stepped = False
        for remote in self._remotes:
            remote.ranks = range(0)
            for kind in ("store", "reached", "advice"):
                remote.answers.pop(kind, None)

    def _start(self, num_ranks: int, strategy: str | None, run: str | None) -> None:
        """Start the ranks; what is lost meanwhile shows in `_watch`.

        Raises:
            ConfigError: in the first generation, a host does not reach the store.
        """
        self._begin_generation()
        first, *others = self._remotes
        first.channel.send("store", port=self._request.port)
        self._await([first], "store", START_S)
        if "store" not in first.answers:
            if not self._signals:
                self._lose(first, f"its store did not start within {START_S:.0f} s")
            return
        port = first.answers["store"]["value"]
        why = "it has no address that the other hosts know"
        address = "127.0.0.1"
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
        else:
            if self._generation:
                self._lose(others[0], why)
            elif not self._signals:
                raise ConfigError(
                    f"{why}; open the port on host {first.host.name} (a firewall?), choose one by "
                    "--port, or see: phalanx doctor --peer"
                )
        num_before = 0
        for index, remote in enumerate(self._remotes):
            num_here = min(remote.host.num_ranks, num_ranks - num_before)
            remote.ranks = range(num_before, num_before + num_here)
            if num_here and not remote.lost:
                remote.channel.send(
                    "start",
                    **{"job": self._job, "generation": self._generation, "host": index},
                    **{"first": num_before, "num_here": num_here, "num_ranks": num_ranks},
                    **{"address": address, "port": port, "command": self._request.command},
                    **{"strategy": strategy, "original": self._strategy, "run": run},
                    restarts=self._request.restarts,
                )
            num_before += num_here

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

    def _watch(self) -> End:
        """Wait for the end of the generation."""
        since_s: float | None = None  # the first failure or loss
        while True:
            self._pump()
            now_s = time.monotonic()
            if len(self._signals) > 1:
                return End(128 + self._signals[0])
            if self._signals and not self._stop:
                self._stop = self._signals[0]
                self._send_signal(self._stop)
            self._take_in()
            all_ranks = {rank for remote in self._remotes for rank in remote.ranks}
            ended = self._codes.keys() | {
                rank for remote in self._remotes if remote.lost for rank in remote.ranks
            }
            asked = {128 + self._stop} if self._stop else set[int]()
            if self._is_stopping_to_join:
                asked |= {128 + signal.SIGTERM}
            failures = [code for code in self._codes.values() if 0 < code != 255]
            failures = [code for code in failures if code != LOST_PEER and code not in asked]
            lost = self._losses()
            if all_ranks <= ended and not failures and not lost:
                if self._is_stopping_to_join and any(self._codes.values()) and not self._stop:
                    return End()
                return End(128 + self._stop if any(self._codes.values()) and self._stop else 0)
            is_vague = not failures and not lost and LOST_PEER in self._codes.values()
            if not failures and not lost and not is_vague:
                continue
            # What happens to several ranks at once is one event, which has one cause:
            #
            #     an error of the program     ends the job, with the exit code of the first
            #     a rank or host is lost      begins the next generation
            #     a peer of a rank is lost    one of both, which takes a while to show
            if since_s is None:
                since_s = self._ended_s = now_s
            if now_s - since_s < (PEERS_S if is_vague else TOGETHER_S) and not all_ranks <= ended:
                continue
            if self._stop:
                return End(failures[0] if failures else 128 + self._stop)
            if failures and next(code for code in self._codes.values() if code) == failures[0]:
                return End(failures[0])
            if is_vague:
                rank = next(rank for rank, code in self._codes.items() if code)
                lost = f"rank {rank} on {self._host_of(rank)} has lost another rank"
            if self._request.restarts == 0:
                lost += self._advice()
            return End(lost=lost)

    def _losses(self) -> str:
        """Return a sentence on the hosts and ranks that are lost, or an empty text."""
        lost = [f"host {each.host.name}: {each.lost}" for each in self._remotes if each.lost]
        for rank, code in self._codes.items():
            name = f"rank {rank} on {self._host_of(rank)}"
            if code < 0:
                lost.append(f"{name} was ended by signal {signal.Signals(-code).name}")
            elif code == 255:
                lost.append(f"{name} has lost the process that forks ranks")
        if self._request.restarts:  # else `kill -CONT` continues it
            lost += [f"rank {each} on {self._host_of(each)} is stopped" for each in self._stopped]
        return "lost: " + "; ".join(lost) if lost else ""

    def _host_of(self, rank: int) -> str:
        if rank < 0:
            return f"{self._remotes[0].host.name} (the store)"
        return next(each.host.name for each in self._remotes if rank in each.ranks)

    def _send_signal(self, signum: int) -> None:
        for remote in self._remotes:
            if not remote.lost:
                remote.channel.send("signal", signum=signum)

    def _advice(self) -> str:
        """Return how to resume, as a living rank says it, with a line break before it."""
        living = [each for each in self._remotes if not each.lost]
        for remote in living:
            remote.channel.send("advice")
        until_s = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < until_s:
            self._pump()
            for remote in living:
                if (answer := remote.answers.get("advice")) and answer["value"]:
                    return f"\n{answer['value']}"
        return ""

    # Messages.

    def _pump(self) -> None:
        """Handle what has arrived, after at most TICK_S; find silent hosts."""
        for key, _ in self._selector.select(TICK_S):
            key.data()
        self._clock.tick()
        for remote in self._remotes:
            if not remote.lost and "facts" in remote.answers:
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
                self._report = JobReport(**message["value"])
                self._strategy = self._strategy or self._report.strategy
            elif kind == "step":
                if self._generation and not self._has_stepped:
                    took_s = time.monotonic() - self._ended_s
                    report(f"step {message['value']} is done, {took_s:.1f} s after the {self._why}")
                self._has_stepped = True
            else:
                remote.answers[kind] = message

    def _hear_errors(self, remote: Remote) -> None:
        """Keep what ssh and the agent print before the agent answers; print what comes later."""
        try:
            text = os.read(remote.error_output, 1 << 16).decode(errors="backslashreplace")
        except (BlockingIOError, OSError):
            return
        if not text:
            with suppress(KeyError):
                self._selector.unregister(remote.error_output)
        elif "facts" in remote.answers:
            self._print(remote, None, text, 2)
        else:
            remote.errors += text

    def _print(self, remote: Remote, rank: int | None, text: str, stream: int) -> None:
        """Print lines with rank and host in front; the host only if there are several."""
        words = [] if rank is None else [str(rank)]
        if rank is None or len(self._request.hosts) > 1:
            words.append(remote.host.name)
        lines = text.removesuffix("\n").split("\n")
        output = sys.stdout if stream == 1 else sys.stderr
        output.write("".join(f"[{' '.join(words)}] {line}\n" for line in lines))
        output.flush()

    # Hosts that join.

    @contextmanager
    def _control(self) -> Generator[None]:
        """Listen for `join`, and for what asks which jobs run."""
        path = control_folder() / f"{os.getpid()}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            accept = lambda: self._asked(listener.accept()[0])  # noqa: E731
            self._selector.register(listener, selectors.EVENT_READ, accept)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _asked(self, connection: socket.socket) -> None:
        """Connect to the host that a `join` names; `_take_in` does the rest."""
        connection.settimeout(1.0)
        with suppress(OSError, ValueError):
            host = parse_host(connection.recv(1000).decode())
            refusal = ""
            if self._joining is not None or self._stop:
                refusal = "the job stops, or another host joins it; try again later"
            elif any(host.name == each.host.name and not each.lost for each in self._remotes):
                refusal = f"host {host.name} takes part in the job already"
            if not refusal:
                self._joining = self._connect(host, CONNECT_S), connection
                return
            connection.sendall(refusal.encode())
        connection.close()

    def _take_in(self) -> None:
        """Ask the ranks to save and end, once the agent of a host that joins has answered."""
        if self._joining is None or self._is_stopping_to_join:
            return
        remote, connection = self._joining
        if not remote.lost and "facts" not in remote.answers and remote.process.poll() is None:
            return
        with suppress(OSError), connection:
            if why := remote.why_not(versions(), self._request.folder):
                self._lose(remote, why)
                self._joining = None
                connection.sendall(why.encode())
                return
            facts = remote.answers["facts"]
            num_ranks = remote.host.num_ranks or facts["num_gpus"] or min(2, facts["num_cores"])
            remote.host = replace(remote.host, num_ranks=num_ranks)
            self._prepare([remote])
            report(f"host {remote.host} joins: the ranks save and end after this step")
            self._is_stopping_to_join, self._ended_s = True, time.monotonic()
            self._send_signal(signal.SIGTERM)
            connection.sendall(TAKEN_IN)


def strategy_of(command: Sequence[str]) -> str | None:
    """Return the strategy that the words of a command name, or None."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        name, _, value = word.partition("=")
        if name == "--strategy":
            value = value or following
            return None if value == "auto" else value
    return None


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
    """Yield lines with what would be run on each host."""
    first = 0
    for host in request.hosts:
        ranks = f"ranks {first} to {first + host.num_ranks - 1}" if host.num_ranks else "ranks"
        yield f"{host.name}: {ranks} of {request.command_text}, in {request.folder}"
        yield f"  {shlex.join(agent_command(host, request))}"
        first += host.num_ranks
    for name, value in request.variables:
        yield f"  {name}={shlex.quote(value)}"
