"""The part of `phalanx launch` that runs on each host: start ranks, forward what they print and do.

    launcher ──ssh, one JSON object a line──> agent ──forkserver, torch preloaded──> ranks, store

    launcher -> agent                               agent -> launcher
    settings  job, environment: the first message   facts    versions, cores, GPUs of the host
    prepare   modules to import before any rank
    store     port: host the store of the ranks     store    port
    reach     address of the store                  reached  why not; empty if this host reaches it
    start     the ranks of one generation           text     lines that a rank has printed
    signal    number, for each rank                 step     number of the first completed step
    advice    how to resume, of any rank            advice   the sentence
                                                    stopped  a rank is stopped by a signal
                                                    ended    a rank, with its exit code
                                                    report   the `JobReport` of rank 0
    clear     kill ranks and store                  cleared
    successor how to continue without this launcher
    end       the job has ended: no successor
    ping      each second                           ping     each second

The agent ends its ranks, and itself, when its standard input ends, or brings no word for SILENT_S.
When the agent is killed, each rank ends itself, by a pipe that the kernel closes. So nothing is
left running on a host that the launcher has lost.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import platform
import re
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from phalanx.launch.failure import exit_code_of
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.heartbeat_monitor import is_stopped
from phalanx.launch.launched import REPORT, VARIABLE, Launched, read_report
from phalanx.launch.local import is_server_running, num_cores, prepare_server, server_stopped
from phalanx.launch.rank_log import flush_streams, keep_printing
from phalanx.launch.signals import ENDING, end_with_server
from phalanx.storage import lock

PING_S: Final = 1.0
"""Interval between two messages of launcher and agent, in seconds."""

SILENT_S: Final = 8.0
"""Seconds without a word of the launcher after which an agent ends its ranks. The launcher waits
longer before it starts other ranks, so that never two sides of a cut network write."""

STOPPED_S: Final = 9.0
"""Seconds for which a signal must have stopped a process before its rank counts as lost."""

TICK_S: Final = 0.25
"""Longest wait for a message, in seconds."""

MOST_BYTES: Final = 1 << 16
"""Most bytes to read at once."""

LONGEST_LINE: Final = 1 << 20
"""Bytes after which a line that has no end is cut."""

MOST_WAITING: Final = 1 << 20
"""Bytes of messages that wait to be sent, above which no further output of ranks is read."""

FOLDERS: Final = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Where the folder of an agent is: in memory, if the system has such a folder."""

LOCK: Final = "agent"
"""File in the folder of an agent that it holds locked while it lives."""

Message = dict[str, Any]


class Channel:
    """JSON objects, one a line, read from `source`, written to `target`; neither ever waits."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        os.set_blocking(source, False)
        os.set_blocking(target, False)
        self._read, self._out = b"", bytearray()
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def send(self, kind: str, **values: Any) -> None:
        """Write a message, or as much of it as is possible without waiting."""
        with self._lock:
            self._out += json.dumps({"is": kind} | values).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as possible; a reader that has gone shows at the source."""
        with self._lock, suppress(OSError):
            while self._out and not self._is_over.is_set():
                del self._out[: os.write(self.target, self._out[:MOST_BYTES])]

    @property
    def num_waiting(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._out)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Text before a message is dropped: a login shell may print some, without the end of a line.

        Raises:
            EOFError: the other side has ended, or the connection to it.
        """
        try:
            read = os.read(self.source, MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not read:
            raise EOFError
        *lines, self._read = (self._read + read).split(b"\n")
        begun = [line.partition(b'{"is": ') for line in lines]
        return [json.loads(start + rest) for _, start, rest in begun if start]

    def keep_pinging(self) -> None:
        """Send a ping each PING_S from a thread, which also writes what waits."""

        def ping() -> None:
            while not self._is_over.wait(PING_S):
                self.send("ping")

        threading.Thread(target=ping, name="ping", daemon=True).start()

    def close(self) -> None:
        """Close both directions, which the other side reads as the end."""
        with self._lock:  # the numbers of closed descriptors are used again
            self._is_over.set()
            for descriptor in {self.source, self.target}:
                os.close(descriptor)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, by name; torch is not imported."""
    numbers = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package, name in (("phalanx-train", "phalanx"), ("torch", "torch")):
        with suppress(metadata.PackageNotFoundError):  # imported from source, not installed
            numbers[name] = metadata.version(package).partition("+")[0]
    return numbers


def num_gpus() -> int:
    """Return the number of NVIDIA devices of this host that a process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and word.strip() != "-1"])
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])


@dataclass
class Rank:
    """A process that the agent has started; number -1 is the store.

    Attributes:
        outputs: pipe of its output -> number of the stream, and the bytes of a line that has begun.
        line: connection to the thread in the process that ends it when the agent ends.
        moved_s: when no signal had stopped it yet.
    """

    number: int
    process: ForkServerProcess
    line: Connection
    outputs: dict[Connection, tuple[int, bytearray]] = field(default_factory=dict)
    moved_s: float = field(default_factory=time.monotonic)


class HostAgent:
    """The ranks of this host, from the first message of a launcher until the launcher has gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.source, selectors.EVENT_READ, self._hear)
        self._ranks: list[Rank] = []
        self._folder = Path()
        self._awaits_report = False
        self._successor: Message | None = None
        self._heard_s = time.monotonic()

    def serve(self) -> None:
        """Obey the launcher until its end; then end all that this process has started."""
        try:
            while time.monotonic() - self._heard_s < SILENT_S:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._look()
                self._channel.flush()
        except EOFError:
            pass
        finally:
            self._clear()
            if self._folder.name:
                shutil.rmtree(self._folder, ignore_errors=True)
            sweep()
        if self._successor is not None:
            from phalanx.launch.launcher import succeed  # which imports this module

            succeed(**self._successor)

    # Messages of the launcher.

    def _hear(self) -> None:
        for message in self._channel.receive():
            kind = message.pop("is")
            if kind == "settings":
                self._settle(message["job"], message["variables"])
            elif kind == "prepare":
                prepare_server(*message["modules"])
            elif kind == "store":
                self._fork(-1, host_store, (message["port"],))
            elif kind == "reach":
                why = ""
                try:
                    address = message["address"], message["port"]
                    socket.create_connection(address, SILENT_S / 2).close()
                except OSError as error:
                    why = error.strerror or str(error)
                self._channel.send("reached", why=why)
            elif kind == "start":
                self._start(message)
            elif kind == "signal":
                for rank in self._ranks:
                    if rank.number >= 0 and rank.process.pid is not None:
                        with suppress(ProcessLookupError):
                            os.kill(rank.process.pid, message["signum"])
            elif kind == "advice":
                for rank in self._ranks:
                    if rank.number >= 0:
                        with suppress(OSError):
                            rank.line.send("advice")
            elif kind == "successor":
                from phalanx.launch.launcher import can_see_loss  # which imports this module

                if self._successor is not None or can_see_loss(message["state"]):
                    self._successor = message
            elif kind == "end":
                self._successor = None
            elif kind == "clear":
                self._clear()
                self._channel.send("cleared")
            self._heard_s = time.monotonic()  # now: a start may take seconds

    def _settle(self, job: str, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `phalanx` does before torch
        sweep(job)
        # Random: agents in several containers may have one process id. `sweep` of another agent
        # does not see the folder until it is locked.
        unlocked = Path(tempfile.mkdtemp(prefix=".phalanx-", dir=FOLDERS))
        self._lock = (unlocked / LOCK).open("wb")
        lock(self._lock.fileno())
        name = f"phalanx-{os.getpid()}-{unlocked.name.rpartition('-')[2]}-{job}"
        self._folder = unlocked.rename(FOLDERS / name)
        # The forkserver's sockets are in this folder too. Private; see rank.py.
        config: Any = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
        config["tempdir"] = str(self._folder)
        connection = os.environ.get("SSH_CONNECTION", "").split()
        address = connection[2] if len(connection) == 4 else ""
        facts = {"num_cores": num_cores(), "num_gpus": num_gpus(), "address": address}
        self._channel.send("facts", versions=versions(), **facts)

    def _start(self, message: Message) -> None:
        (self._folder / REPORT).unlink(missing_ok=True)
        self._awaits_report = message["first"] == 0
        launched = Launched(folder=str(self._folder), **message["launched"])
        for local_rank in range(message["num_here"]):
            number = message["first"] + local_rank
            variables = message["variables"] | {
                "RANK": f"{number}",
                "LOCAL_RANK": f"{local_rank}",
                "LOCAL_WORLD_SIZE": f"{message['num_here']}",
                VARIABLE: launched.text(),
            }
            self._fork(number, run_rank, (message["command"], variables))

    def _fork(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start a process of `function(*args, outputs, line, folder)`."""
        context = prepare_server()
        num_outputs = 2 if number >= 0 else 0
        # Their class depends on the platform.
        pipes: list[tuple[Any, Any]] = [context.Pipe(duplex=False) for _ in range(num_outputs)]
        line: tuple[Any, Any] = context.Pipe()
        outputs = [write for _, write in pipes]
        all_args = (*args, outputs, line[1], str(self._folder))
        process = context.Process(target=function, args=all_args)
        process.start()
        rank = Rank(number, process, line[0])
        self._ranks.append(rank)
        for theirs in (*outputs, line[1]):
            theirs.close()
        for stream, (pipe, _) in enumerate(pipes, 1):
            os.set_blocking(pipe.fileno(), False)
            rank.outputs[pipe] = stream, bytearray()
            read = partial(self._read, rank, pipe)
            self._selector.register(pipe, selectors.EVENT_READ, read)
        pass_on = partial(self._pass_on, rank)
        self._selector.register(rank.line, selectors.EVENT_READ, pass_on)
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda: None)  # see `_look`

    # What the ranks do.

    def _pass_on(self, rank: Rank) -> None:
        try:
            kind, value = rank.line.recv()
        except (EOFError, OSError):  # the rank has ended, which `_look` sees
            self._selector.unregister(rank.line)
        else:
            self._channel.send(kind, rank=rank.number, value=value)

    def _read(self, rank: Rank, pipe: Connection, is_over: bool = False) -> None:
        """Forward what a rank has printed, whole lines only, or the rest if the output is over."""
        if self._channel.num_waiting > MOST_WAITING and not is_over:
            time.sleep(TICK_S / 10)  # the rank waits for the launcher's reader, as for any pipe
            return
        stream, begun = rank.outputs[pipe]
        with suppress(BlockingIOError):
            begun += (read := os.read(pipe.fileno(), MOST_BYTES))
            is_over |= not read
        whole = begun.rfind(b"\n") + 1
        if is_over or (not whole and len(begun) > LONGEST_LINE):
            whole = len(begun)
        if whole:
            text = begun[:whole].decode(errors="backslashreplace")
            self._channel.send("text", rank=rank.number, stream=stream, text=text)
            del begun[:whole]
        if is_over:
            del rank.outputs[pipe]
            self._selector.unregister(pipe)
            pipe.close()

    def _look(self) -> None:
        """Notice ranks that have ended or are stopped, and the report of rank 0."""
        now_s = time.monotonic()
        for rank in list(self._ranks):
            if rank.process.exitcode is not None:
                if rank.process.exitcode == 255:  # its own, or that the forkserver has ended
                    time.sleep(TICK_S)  # the kernel closes pipes before it reports an end
                if not is_server_running():  # it forks ranks, and knows their exit codes
                    self._successor = None
                    raise EOFError
                self._forget(rank)
                self._channel.send("ended", rank=rank.number, code=rank.process.exitcode)
            elif not is_stopped(rank.process.pid):
                rank.moved_s = now_s
            elif now_s - rank.moved_s > STOPPED_S:
                self._channel.send("stopped", rank=rank.number)
                rank.moved_s = now_s
        if self._awaits_report and (report := read_report(str(self._folder))) is not None:
            self._awaits_report = False
            self._channel.send("report", value=vars(report))

    def _forget(self, rank: Rank) -> None:
        """Forward the last output of a process that has ended, and kill the processes it left."""
        for pipe in list(rank.outputs):
            self._read(rank, pipe, is_over=True)
        kill(rank.process.pid)
        for each in (rank.line, rank.process.sentinel):
            with suppress(KeyError):
                self._selector.unregister(each)
        rank.line.close()
        self._ranks.remove(rank)

    def _clear(self) -> None:
        """Kill all processes of the generation, and wait for their ends."""
        for rank in self._ranks:
            kill(rank.process.pid)
        for rank in list(self._ranks):
            rank.process.join()
            self._forget(rank)
        self._awaits_report = False


def kill(pid: int | None) -> None:
    """Kill a rank and the processes that it has started, which are one group."""
    assert pid is not None
    for end in (os.killpg, os.kill):  # a rank that has just begun has no group yet
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def sweep(job: str = "") -> None:
    """Remove the folders of agents that were killed, and kill the one that `job` had before."""
    for folder in FOLDERS.glob("phalanx-*-*-*"):
        _, pid, _, name = folder.name.split("-", 3)
        with suppress(OSError, ValueError):
            with (folder / LOCK).open("rb") as file:
                is_living = lock(file.fileno()) is False
            if not is_living:
                shutil.rmtree(folder, ignore_errors=True)
            elif (
                name == job
                and int(pid) != os.getpid()
                and b"phalanx.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                os.kill(int(pid), signal.SIGKILL)  # its ranks end with it, and remove its folder


# In the processes that the forkserver starts.


def _end_with_agent() -> None:
    """Have the kernel kill this process, also a stopped one, when the agent and so the server end.

    The forkserver runs as long as any process has its pipe, which each rank inherits.
    """
    # Private; tests/launch/test_launcher.py pins it.
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    end_with_server()


def _begin(outputs: list[Connection], line: Connection, folder: str) -> None:
    """Give this process a group, its outputs, usual signals, and an end when its agent ends."""
    os.setsid()
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    _end_with_agent()
    for signum in ENDING:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__  # replaces the forkserver's, which hides some errors
    # Processes that a rank starts use Python's default start method, as under torchrun.
    multiprocessing.set_start_method(None, force=True)

    def watch() -> None:
        has_stepped = False
        try:
            while True:
                if line.poll(TICK_S) and line.recv() == "advice":
                    line.send(("advice", PULSE.advice()))
                if PULSE.steps_done and not has_stepped:
                    has_stepped = True
                    line.send(("step", PULSE.steps_done))
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="agent", daemon=True).start()


def run_rank(
    command: list[str],
    variables: Mapping[str, str],
    outputs: list[Connection],
    line: Connection,
    folder: str,
) -> None:
    """Run a command of `phalanx` in this process, as torchrun would."""
    os.environ.update(variables)
    _begin(outputs, line, folder)
    keep_printing()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    sys.argv = ["phalanx", *command]
    code: object = 0
    try:
        runpy.run_module("phalanx", run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    flush_streams()
    os._exit(exit_code_of(code))


def host_store(port: int, outputs: list[Connection], line: Connection, folder: str) -> None:
    """Host the store of a generation until the agent kills this process; send its port."""
    import torch.distributed as dist

    from phalanx.comm.join import raise_file_limit

    os.setsid()
    _end_with_agent()
    raise_file_limit()  # each rank connects to the store several times
    try:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        line.send(("store", store.port))
    except dist.DistNetworkError as error:
        line.send(("store", str(error).partition("\n")[0]))
    with suppress(EOFError, OSError):
        line.recv()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Serve a launcher on standard input and output, which no other process may use."""
    channel = Channel(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    channel.keep_pinging()
    with server_stopped():
        HostAgent(channel).serve()
    os._exit(0)


if __name__ == "__main__":
    from phalanx.launch import agent  # by this name its functions are known to the forkserver

    agent.main()
