"""Run functions on processes of this host, monitor them, and report which failed first.

    parent    hosts the job's store, starts the ranks, reads their heartbeats from the store
              (`feed`), receives the result or failure of each over a pipe, ends the ranks
    rank      `run_rank`: joins, calls the function, and ends when the parent sends LEAVE

The ranks are forked from one forkserver process that has already imported torch, so that two ranks
start in a fraction of a second. The parent binds the socket of the store before it starts the
ranks, so no port is guessed. A rank that has finished waits until all have, and exits without
tearing its threads down; a rank that fails ends the job at once.

The states of a process, as `Supervisor` knows them:

    started ──> running ──result──────────────────────────> returned ──all have──> LEAVE, ended
       ^           ├──failure, or its end without a result─> failed: the job ends after GRACE_S
       └─restarts──┴──its end by a signal, while restarts are left (`run_supervised`)

A first signal that all ranks heed is sent to each running rank; any other ends the job at once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from phalanx.errors import ConfigError, Interrupted, PhalanxError, TrainingError
from phalanx.launch import debug_net
from phalanx.launch.failure import Failure, failure_of_dead_process, first_of, report
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat_monitor import HeartbeatMonitor
from phalanx.launch.pipe import LEAVE, ByValue, RankPipe
from phalanx.launch.rank import RankInfo, run_rank, socket_folder
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.launch.signals import collected, ignored_by_children

if TYPE_CHECKING:
    from torch.distributed import Store

SAFE_PATH: Final = "PYTHONSAFEPATH"
"""Variable by which Python does not import modules of the working folder."""

OURS: Final = "phalanx"
"""Its value if Phalanx has set it, for the forkserver only."""

Rank = tuple[ForkServerProcess, RankPipe]
"""A process, and the parent's end of the pipe to it."""

STARTING_S: Final = 2.0
"""Time that ranks may take to start before `say_starting` is called, in seconds."""

GRACE_S: Final = 0.3
"""Time, in seconds, to collect further failures before the earliest is chosen by its time stamp."""

TICK_S: Final = 0.25
"""Longest wait of the supervisor for a message before it checks for signals, in seconds."""

SILENT_PEER_S: Final = 2.0
"""Shortest silence, in seconds, for which a rank is named as one that others waited for in vain."""


class Beside(NamedTuple):
    """A process that runs beside the ranks of a job, as a job of its own with one rank.

    Attributes:
        function: function importable by name, which ends the process itself.
        args: its arguments; picklable.
        ended: called with the exit code when it has ended; an error that it raises ends the job.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    ended: Callable[[int | None], object]


LEAVING_S = 2.0
"""Time that ranks have to exit by themselves before they are killed, in seconds."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 600.0,
    say_starting: Callable[[], None] | None = None,
    beside: Beside | None = None,
) -> list[Any]:
    """Run `function(*args)` on each of `num_ranks` new processes that have joined one job.

    A process that is itself a rank of a job, as under torchrun, starts no processes: it joins this
    job, whose ranks must all call this, and runs the function as one of them. A function or
    argument that is defined in a notebook runs in this process, as the only rank.

    Args:
        function: function importable by name; torch.distributed is initialized when it is called.
        num_ranks: number of processes to start on this host.
        *args: picklable arguments, equal for all ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
        threads: CPU threads of each rank; if None, an equal part of the cores.
        timeout_s: longest wait for another rank in one collective, in seconds.
        say_starting: called once if the ranks have not started after STARTING_S.
        beside: a process to start with the ranks; the job ends when it has ended too.

    Returns:
        The result of each rank, in the order of the ranks.

    Raises:
        ConfigError: an argument cannot be sent to another process, there are fewer GPUs than ranks,
            this process is a rank of a job with another number of ranks, or several ranks are
            requested and an argument is defined in a notebook.
        PhalanxError: error of the rank that failed first, if its class is a PhalanxError.
        RankFailed: any other failure, with the traceback of that rank.
        TrainingError: a rank waited in vain for another rank; a rank was silent for `timeout_s`; or
            a rank returned, and all others stood in a collective for UNEVEN_S after that.
        Interrupted: a signal arrived that no rank obeys (`Pulse.handling_stop`), or a second one.
    """
    if is_under_torchrun():
        from phalanx.launch.attach import run_attached  # which imports this module

        return run_attached(function, num_ranks, args, device=device, timeout_s=timeout_s)
    check_gpus(num_ranks, device)
    is_of_notebook = False
    if not os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or ""):
        # New processes could not import a main module that has no file.
        try:
            is_of_notebook = b"__main__" in pickle.dumps(ByValue((function, args)))
        except (pickle.PicklingError, AttributeError, TypeError):  # as of a lambda
            is_of_notebook = "ipykernel" in sys.modules or hasattr(sys, "ps1")
    if is_of_notebook:
        if num_ranks > 1:
            raise ConfigError(
                f"the job is defined in a notebook or at a prompt, whose definitions the "
                f"{num_ranks} processes cannot import; put the job in a .py file and import it, or "
                "use one process (dp1)"
            )
        from phalanx.launch.attach import attach  # which imports this module

        attach({}, device=device, timeout_s=timeout_s)
        return [function(*args)]
    prepare_server()
    threads = threads or max(1, num_cores() // num_ranks)
    with hosted_store() as (store, port), ended_ranks() as (ranks, late):
        info = RankInfo(0, num_ranks, port, device, threads, timeout_s, socket_folder())
        info = replace(info, debug_net=os.environ.get(debug_net.VARIABLE, ""))
        start_ranks(ranks, info, function, args)
        if beside is not None:
            alone = replace(info, num_ranks=1, member=num_ranks)
            start_ranks(ranks, alone, beside.function, beside.args)
        with collected() as signals:
            supervisor = Supervisor(ranks, signals, store, timeout_s, say_starting)
            supervisor.beside = beside
            results = supervisor.watch()
    supervisor.raise_unheeded(late)
    return results


Work = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""What messages call a process, its function, importable by name, and positional arguments."""


def run_supervised(
    works: Sequence[Work],
    beside: Sequence[Work] = (),
    *,
    device: str = "cpu",
    threads: int = 1,
    timeout_s: float = 600.0,
    max_restarts: int = 0,
    say_starting: Callable[[], None] | None = None,
) -> list[Any]:
    """Run each function of `works` in a job of one rank, and return the results of `works`.

    The functions of `beside` run no longer than `works`, such as services: one that still runs when
    all `works` have returned is ended. Processes that a signal has ended, as `kill -9` does, are
    restarted, at most `max_restarts` times in total; a function that fails ends all. For the other
    arguments, and the errors, see `run_ranks`.
    """
    prepare_server()
    all_works = (*works, *beside)
    with hosted_store() as (store, port), ended_ranks() as (ranks, late):
        info = RankInfo(0, 1, port, device, threads, timeout_s, socket_folder())

        def start(member: int) -> Rank:
            name, function, args = all_works[member]
            started: list[Rank] = []
            start_ranks(started, replace(info, name=name, member=member), function, args)
            return started[0]

        for member in range(len(all_works)):
            ranks.append(start(member))
        with collected() as signals:
            supervisor = Supervisor(ranks, signals, store, timeout_s, say_starting)
            supervisor.names = [name for name, *_ in all_works]
            supervisor.num_awaited = len(works)
            supervisor.restart, supervisor.num_restarts = start, max_restarts
            results = supervisor.watch()
    supervisor.raise_unheeded(late)
    return results[: len(works)]


def check_gpus(num_ranks: int, device: str, strategy: str = "") -> None:
    """Raise ConfigError if ranks, of `strategy` if given, on "cuda" outnumber this host's GPUs."""
    if device != "cuda":
        return
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigError("the device is cuda, but this host has no GPU; the nearest is cpu")
    if num_ranks > num_gpus:
        who = f"strategy {strategy} needs" if strategy else f"{num_ranks} ranks need"
        raise ConfigError(
            f"{who} {num_ranks} GPUs, but this host has {num_gpus}; the nearest is "
            f"{'dp' if strategy else ''}{num_gpus}, or the device cpu"
        )


def prepare_server(*modules: str) -> ForkServerContext:
    """Start the forkserver if it is not running; it imports torch while the caller continues.

    It also imports `modules`, which the ranks then need not import.
    """
    # One server forks all ranks, so that torch is imported once and not by each of them:
    #
    #     this process    start the server | continue ...   start ranks     | supervise
    #     forkserver                       | import torch   fork, fork, ... | report ends
    #     ranks                                             join, work ...
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.launch.preload", *modules])
    # `python -c`, as which the forkserver and its resource tracker start, would import modules of
    # the working folder, which may be a downloaded run. preload.py removes the variable again.
    had_safe_path = os.environ.setdefault(SAFE_PATH, OURS) != OURS
    try:
        with ignored_by_children():
            forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX path" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"the path of the temporary folder {folder} has {len(folder)} characters, too many for "
            "the sockets by which processes are started; set TMPDIR to a shorter path, such as /tmp"
        ) from None
    finally:
        if not had_safe_path:
            del os.environ[SAFE_PATH]
    return context


def is_server_running() -> bool:
    """Return whether the forkserver runs, without which exit codes of ranks are not known."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    pid = server._forkserver_pid
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return pid is not None and os.waitid(os.P_PID, pid, ended) is None


@contextmanager
def server_stopped() -> Generator[None]:
    """Kill the forkserver at the end of the block if it was started inside the block.

    Otherwise it would end after this process, and take seconds to tear torch down.
    """
    # Private, but the only way; tests/launch/test_local.py pins it.
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    was_running = server._forkserver_pid is not None
    try:
        yield
    finally:
        if server._forkserver_pid is not None and not was_running:
            with suppress(OSError):  # it has ended
                os.kill(server._forkserver_pid, signal.SIGKILL)
                server._stop()


@contextmanager
def hosted_store() -> Generator[tuple[Store, int]]:
    """Host a store for jobs of this host inside the block; yield it and its port."""
    import torch.distributed as dist

    from phalanx.comm.join import raise_file_limit

    raise_file_limit()  # each rank connects to the store several times
    # The port is bound before any rank starts, and the bound socket is handed to the store: no
    # other process can take the port in between.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())
    yield (
        dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=descriptor, use_libuv=True,
        ),
        port,
    )  # fmt: skip


_numbers: Final = itertools.count()


def start_ranks(
    ranks: list[Rank], info: RankInfo, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Start the ranks of a job, and append each to `ranks`.

    `info` has their common settings, and the first rank's number among all members of the store.
    """
    context = multiprocessing.get_context("forkserver")
    job = next(_numbers)
    for rank in range(info.num_ranks):
        ours, theirs = context.Pipe()
        of_rank = replace(info, rank=rank, member=info.member + rank, job=job)
        process = context.Process(target=run_rank, args=(of_rank, theirs, function, ByValue(args)))
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"{name} or one of its arguments cannot be sent to another process: {error}; a "
                "function must be importable by name (at the top of a file, not a lambda and not "
                "inside another function), and its arguments must be picklable"
            ) from error
        except EOFError as error:
            raise ConfigError(
                "the server that forks processes could not start a process; raise the limit on "
                "processes (ulimit -u, pids.max) or on memory"
            ) from error
        theirs.close()
        ranks.append((process, RankPipe(ours)))


@contextmanager
def ended_ranks() -> Generator[tuple[list[Rank], list[int]]]:
    """Yield a list for ranks, which are ended after the block, and one for signals meanwhile."""
    ranks: list[Rank] = []
    late: list[int] = []
    try:
        yield ranks, late
    finally:
        with collected() as signals:  # a second Ctrl-C must not interrupt the cleanup
            end_ranks(ranks)
        late += signals


def end_ranks(ranks: list[Rank]) -> None:
    """Close the pipes and wait for every process; kill those that do not exit in LEAVING_S."""
    for _, pipe in ranks:
        pipe.close()
    until_s = time.monotonic() + LEAVING_S
    for process, _ in ranks:
        process.join(max(0.0, until_s - time.monotonic()))
    for process, _ in ranks:
        if process.is_alive():
            process.kill()
    for process, _ in ranks:
        process.join()


class Supervisor:
    """Receives the messages of this host's ranks until all have returned or one has failed.

    Attributes:
        names: what messages call each rank; empty: "rank N".
        num_awaited: number of ranks whose results end the job, the first ones; None: all.
        beside: function and end of the last process, which is then no rank.
        restart: starts a rank again that a signal has ended, at most `num_restarts` times.
        stop_signal: number of the signal that was sent to all ranks, or 0.
    """

    def __init__(
        self,
        ranks: list[Rank],
        signals: list[int],
        store: Store,
        timeout_s: float,
        say_starting: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to watch `ranks`, whose heartbeats are in `store`.

        Signals that arrive are appended to `signals`, new processes to `ranks`.
        """
        self.names: Sequence[str] = ()
        self.num_awaited: int | None = None
        self.beside: Beside | None = None
        self.restart: Callable[[int], Rank] | None = None
        self.num_restarts = 0
        self.stop_signal = 0
        self._ranks, self._signals, self._timeout_s = ranks, signals, timeout_s
        self._feed = Feed(store)
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._say_starting = say_starting

    def watch(self) -> list[Any]:
        """Return the result of each rank, or raise the errors of `run_ranks`."""
        num_ranks = self._num_ranks = len(self._ranks) - (self.beside is not None)
        num_awaited = num_ranks if self.num_awaited is None else self.num_awaited
        self._beside = self._ranks[num_ranks] if self.beside is not None else None
        self._running: dict[Any, int] = {
            pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:num_ranks])
        }
        self._monitor = HeartbeatMonitor(self._timeout_s, range(num_ranks), names=self.names)
        for rank, (process, _) in enumerate(self._ranks[:num_ranks]):
            self._monitor.start(rank, process.pid)
        # Until all awaited ranks have returned, or one has failed:
        #
        #     1. receive results and failures, at most TICK_S at a time
        #     2. once, after STARTING_S: say that ranks are starting, if some have not begun
        #     3. forward a first signal to ranks that heed it, or raise Interrupted
        #     4. every second: read heartbeats; report ranks that are silent, stopped or stalled
        #
        # A failure ends the loop; further ones are collected for GRACE_S, because a rank that lost
        # its peer may be faster with its report than the peer that failed first.
        begin_s = looked_s = time.monotonic()
        while not self._failures and (
            self._beside or any(rank < num_awaited for rank in self._running.values())
        ):
            self._receive(TICK_S)
            if self._say_starting is not None and time.monotonic() - begin_s > STARTING_S:
                self._read_heartbeats()
                if not self._monitor.has_begun(num_ranks):
                    self._say_starting()
                self._say_starting = None
            self._obey_signals()
            if time.monotonic() - looked_s > 1:
                looked_s = time.monotonic()
                running = self._read_heartbeats()
                for text in self._monitor.new_reports(running):
                    report(text)
                end = self._monitor.timeout_message(running)
                if end := end or self._monitor.early_return_message(running):
                    raise self._advised(TrainingError(end))
        if self._failures:
            until_s = time.monotonic() + GRACE_S
            while self._running and (left_s := until_s - time.monotonic()) > 0:
                self._receive(left_s)
            self._read_heartbeats()
            first = first_of(self._failures)
            if not first.is_lost_peer:
                raise self._advised(first.as_error())
            silent = self._monitor.silent(SILENT_PEER_S, self._running.values())
            message = self._monitor.in_vain(first.rank, silent)
            if not silent and not self._results:  # only the error names the awaited rank
                message += f"\n{first.text.rstrip()}"
            raise self._advised(TrainingError(message))
        for _, pipe in self._ranks:
            pipe.send(LEAVE)
        return [self._results.get(rank) for rank in range(num_ranks)]

    def _read_heartbeats(self) -> list[int]:
        """Read the heartbeats of ranks that have not returned; return those that still run."""
        self._monitor.clock.tick()
        self._feed.read({*range(self._num_ranks)} - self._results.keys(), self._monitor)
        return sorted(self._running.values())

    def _receive(self, limit_s: float) -> None:
        """Wait up to `limit_s` for messages and ends of processes; handle all that have come.

        A process that a rank has forked holds the rank's end of the pipe open when the rank ends.
        """
        while True:
            # The end of a rank shows at its process, not at its pipe: a process that it forked may
            # hold the pipe open.
            pipes: dict[Any, Any] = {pipe: pipe for pipe in self._running}
            pipes |= {self._ranks[rank][0].sentinel: pipe for pipe, rank in self._running.items()}
            if self._beside is not None:
                process, pipe = self._beside
                pipes |= {process.sentinel: None, pipe: None}
            ready = {pipes[each] for each in wait(pipes, limit_s)}
            if not ready:
                return
            limit_s = 0
            for pipe in ready:
                if pipe is not None:
                    self._handle_message(pipe)
                elif self.beside is not None and self._beside is not None:
                    process, pipe = self._beside
                    if wait([process.sentinel], 0):
                        process.join()
                        self._beside = None
                        self.beside.ended(process.exitcode)
                    else:  # what it says is dropped
                        with suppress(EOFError, ConnectionResetError):
                            pipe.receive()

    def _handle_message(self, pipe: Any) -> None:
        """Receive from a rank that has sent something, or has ended; handle a complete message."""
        rank = self._running[pipe]
        process = self._ranks[rank][0]
        try:
            if not wait([pipe], 0):
                raise EOFError  # the process has ended, and all that it sent is read
            message = pipe.receive()
        except (EOFError, ConnectionResetError):
            process.join(LEAVING_S)
            if self.restart is not None and self.num_restarts and (process.exitcode or 0) < 0:
                self.num_restarts -= 1
                report(f"process {process.pid} was ended by a signal; a new process replaces it")
                del self._running[pipe]
                pipe.close()
                self._ranks[rank] = self.restart(rank)
                self._running[self._ranks[rank][1]] = rank
                self._monitor.start(rank, self._ranks[rank][0].pid)
                if self.stop_signal:  # the job ends once this process has, which may have to save
                    self._ranks[rank][1].send(self.stop_signal)
                return
            self._read_heartbeats()
            log = self._monitor.log(rank)
            message = "failure", failure_of_dead_process(rank, process, log)
        if message is None:  # the rest of the message has not arrived
            return
        kind, value = message
        del self._running[pipe]
        if kind == "failure":
            name = self.names[rank] if self.names else ""
            self._failures.append(replace(value, rank=rank, name=name))
        else:
            self._results[rank] = value
            self._monitor.leave(rank)

    def _obey_signals(self) -> None:
        """Forward a first signal that all ranks heed; for any other signal, raise Interrupted."""
        if not self._signals or (len(self._signals) == 1 and self.stop_signal):
            return
        self._read_heartbeats()
        signum = self._signals[0]
        if len(self._signals) > 1 or not self._monitor.handles_stop():
            raise Interrupted(signum, self._monitor.resume_hint())
        self.stop_signal = signum
        for pipe in self._running:
            pipe.send(signum)
        report(
            f"{signal.Signals(signum).name}: {self._monitor.on_stop()}; a second signal ends it at "
            "once"
        )

    def raise_unheeded(self, late: Sequence[int]) -> None:
        """Raise Interrupted for a signal, also a `late` one after `watch`, that no rank obeyed."""
        if unheeded := [*self._signals, *late][self.stop_signal > 0 :]:
            raise Interrupted(unheeded[0])

    def _advised(self, error: PhalanxError) -> PhalanxError:
        """Add a note on the last checkpoint and how to resume from it, if a rank reported them."""
        if hint := self._monitor.resume_hint():
            error.add_note(hint)
        return error


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
