"""Run a function on several ranks of this host, watch them, and say which failed first.

The ranks are forked from one server process that has torch loaded already, so that two ranks start
in a fraction of a second. They meet at a socket that the parent has bound before they start: no
port is guessed. A rank that has finished waits until all have, and leaves without tearing its
threads down; a rank that fails ends the job at once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from phalanx import errors
from phalanx.errors import ConfigError, PhalanxError, RankFailed, TrainingError
from phalanx.launch.malloc import keep_freed_memory

Rank = tuple[ForkServerProcess, Any]
"""A process, and the parent's end of the pipe to it (its class depends on the system)."""

GRACE_S = 0.3
"""How long the failures of other ranks are collected before the first is chosen by its clock."""

UNEVEN_S = 30.0
"""How long ranks may go on after the first has returned, before they are taken to wait for it."""


@dataclass(frozen=True)
class Place:
    """What one rank must know to join the job.

    Attributes:
        rank: global rank.
        num_ranks: ranks in the job.
        port: TCP port of the store on the loopback address.
        device: "cpu" or "cuda".
        threads: CPU threads of this rank; the cores shared evenly if None.
        timeout_s: longest wait for another rank in one collective, in seconds.
    """

    rank: int
    num_ranks: int
    port: int
    device: str
    threads: int | None
    timeout_s: float


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: global rank.
        time_s: when, by the host's clock.
        text: the message of a PhalanxError, else the traceback.
        kind: class of a PhalanxError; None for any other exception.
        is_reader_gone: it wrote to a pipe that nobody reads any more.
    """

    rank: int
    time_s: float
    text: str
    kind: type[PhalanxError] | None = None
    is_reader_gone: bool = False

    def as_error(self) -> PhalanxError:
        """Return what the caller of `run_ranks` is to catch."""
        if self.kind is not None:
            # Not by calling the class: some compose their message from other arguments.
            error = self.kind.__new__(self.kind, self.text)
        else:
            error = RankFailed(self.rank, self.text)
        error.__cause__ = BrokenPipeError() if self.is_reader_gone else None
        return error


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 600.0,
    uneven_s: float = UNEVEN_S,
) -> list[Any]:
    """Run `function(*args)` on each of `num_ranks` new processes that have joined one job.

    Args:
        function: importable by name; torch.distributed is initialised when it is called.
        num_ranks: processes to start on this host.
        *args: picklable arguments, the same for each rank.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        threads: CPU threads of each rank; the cores shared evenly if None.
        timeout_s: longest wait for another rank in one collective, in seconds.
        uneven_s: how long ranks may go on after the first has returned, in seconds.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        ConfigError: the function or an argument cannot be sent to another process.
        PhalanxError: the error of the rank that failed first, if it was the user's to mend; it has
            that error's class.
        RankFailed: any other failure, with that rank's own traceback; its cause is a
            BrokenPipeError if nobody reads any more what the rank writes.
        TrainingError: a rank returned, and others still ran `uneven_s` later.
    """
    context = prepare_server()
    ranks: list[Rank] = []
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            for rank in range(num_ranks):
                place = Place(rank, num_ranks, port, device, threads, timeout_s)
                meeting = listener if rank == 0 else None
                ranks.append(_start(context, place, meeting, function, args))
        results = _watch(ranks, uneven_s)
    finally:
        _end(ranks)
    return results


def prepare_server() -> ForkServerContext:
    """Start the server process if there is none; it loads torch while the caller goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.launch.preload"])
    forkserver.ensure_running()
    return context


def _start(
    context: ForkServerContext,
    place: Place,
    listener: socket.socket | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Rank:
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank_main, args=(place, listener, theirs, function, args))
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"{name} or an argument of it cannot be sent to another process: {error}; a function "
            "must be importable by name (at the top of a file, not a lambda and not inside "
            "another function), and its arguments must be picklable"
        ) from error
    theirs.close()
    return process, ours


def _watch(ranks: list[Rank], uneven_s: float) -> list[Any]:
    """Collect each rank's result, or raise the first failure."""
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    rank_of: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    deadline_s: float | None = None
    is_failing = False
    while rank_of:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready: list[Any] = wait(list(rank_of), left_s)
        for connection in ready:
            rank = rank_of.pop(connection)
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionResetError):
                kind, value = "failure", _death(rank, ranks[rank][0])
            if kind == "failure":
                failures.append(value)
            else:
                results[rank] = value
        if failures and not is_failing:
            is_failing, deadline_s = True, time.monotonic() + GRACE_S
        if results and deadline_s is None:
            deadline_s = time.monotonic() + uneven_s
        if not ready:
            break
    if failures:
        # A rank that a signal killed has no words of its own; what its peers say follows from it.
        raise min(failures, key=lambda failure: failure.time_s).as_error()
    if rank_of:
        raise _uneven(sorted(results), sorted(rank_of.values()), uneven_s)
    for _, connection in ranks:
        connection.send("leave")
    return [results[rank] for rank in range(len(ranks))]


def _uneven(returned: list[int], going_on: list[int], uneven_s: float) -> TrainingError:
    """Blame the ranks that returned, for which the others wait."""
    return TrainingError(
        f"{_named(returned)} returned, but {_named(going_on)} neither returned nor failed within "
        f"{uneven_s:g} s after that: most likely they wait in a collective; each rank must make "
        "the same calls before it returns"
    )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _death(rank: int, process: ForkServerProcess) -> Failure:
    """Describe a rank that ended without a word."""
    process.join(5)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    text = f"the process ended by {how}, without a Python traceback"
    if code == 1:  # what multiprocessing itself ends with if it cannot import or find the function
        text += (
            ' of its work; a script that starts ranks needs `if __name__ == "__main__":` before '
            "what it runs, and a function that can be imported from its file"
        )
    return Failure(rank, 0.0, text)


def _end(ranks: list[Rank]) -> None:
    """See every process off: those that do not leave by themselves are ended."""
    for process, connection in ranks:
        connection.close()
        process.join(2)
        if process.is_alive():
            process.terminate()
            process.join(2)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    place: Place,
    listener: socket.socket | None,
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the job, call the function, and report; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    may_leave = threading.Event()
    threading.Thread(target=_obey, args=(connection, may_leave), daemon=True).start()
    try:
        _join(place, listener)
        result = function(*args)
        sys.stdout.flush()
        connection.send(("result", result))
        exit_code = 0
    except BaseException as error:
        # Once another rank has failed, the parent listens no more.
        with suppress(OSError):
            connection.send(("failure", _describe(place.rank, error)))
        exit_code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    may_leave.wait()
    # gloo's threads sometimes abort a process that succeeded while they are torn down.
    os._exit(exit_code)


def _describe(rank: int, error: BaseException) -> Failure:
    if isinstance(error, PhalanxError):
        # The nearest class that every process knows: a user's own may be of a script.
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return Failure(rank, time.time(), message_of(error), kind)
    text = traceback.format_exc()
    return Failure(rank, time.time(), text, is_reader_gone=is_reader_gone(error))


def message_of(error: BaseException) -> str:
    """Return the message of `error` and the notes on it, such as a save that failed as well."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def is_reader_gone(error: BaseException) -> bool:
    """Return whether `error` came of writing to a pipe that nobody reads, as after `| head`.

    A rich console turns the BrokenPipeError into a SystemExit.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError)


def _obey(connection: Connection, may_leave: threading.Event) -> None:
    """Wait for the parent's leave to end; without a parent, end at once."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    may_leave.set()


def _join(place: Place, listener: socket.socket | None) -> None:
    import torch
    import torch.distributed as dist

    from phalanx import mesh

    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.num_ranks),
        LOCAL_WORLD_SIZE=str(place.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
    )
    # All ranks are on this host: gloo need not resolve the host's name, which often fails.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    keep_freed_memory()
    mesh.allow_files()
    torch.set_num_threads(place.threads or max(1, num_cores() // place.num_ranks))
    if place.device == "cuda":
        torch.cuda.set_device(place.rank)
    store = dist.TCPStore(
        "127.0.0.1",
        place.port,
        place.num_ranks,
        is_master=listener is not None,
        master_listen_fd=listener.detach() if listener is not None else None,
        use_libuv=True,
    )
    mesh.join(
        place.rank, place.num_ranks, store=store, device=place.device, timeout_s=place.timeout_s
    )


def num_cores() -> int:
    """Return the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
