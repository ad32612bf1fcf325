"""Run a function on several ranks of this host, watch them, and say which failed first.

The ranks are forked from one server process that has torch loaded already, so that two ranks start
in a fraction of a second. They meet at a socket that the parent has bound before they start: no
port is guessed. A rank that has finished waits until all have, and leaves without tearing its
threads down; a rank that fails ends the job at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from phalanx.errors import PhalanxError, RankFailed

Rank = tuple[ForkServerProcess, Any]
"""A process, and the parent's end of the pipe to it (its class depends on the system)."""

GRACE_S = 0.3
"""How long the failures of other ranks are collected before the first is chosen by its clock."""


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
    """How one rank failed: when by the host's clock, and its own words."""

    rank: int
    time_s: float
    text: str
    exit_code: int | None
    """The exit code of a PhalanxError; None for any other exception."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Run `function(*args)` on each of `num_ranks` new processes that have joined one job.

    Args:
        function: importable by name; torch.distributed is initialised when it is called.
        num_ranks: processes to start on this host.
        *args: picklable arguments, the same for each rank.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        threads: CPU threads of each rank; the cores shared evenly if None.
        timeout_s: longest wait for another rank in one collective, in seconds.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        PhalanxError: the error of the rank that failed first, if it was the user's to mend.
        RankFailed: any other failure, with that rank's own traceback.
    """
    context = prepare_server()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ranks = [
            _start(
                context,
                Place(rank, num_ranks, listener.getsockname()[1], device, threads, timeout_s),
                listener if rank == 0 else None,
                function,
                args,
            )
            for rank in range(num_ranks)
        ]
    try:
        results = _watch(ranks)
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
    process.start()
    theirs.close()
    return process, ours


def _watch(ranks: list[Rank]) -> list[Any]:
    """Collect each rank's result, or raise the first failure."""
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    rank_of: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    deadline_s: float | None = None
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
        if failures and deadline_s is None:
            deadline_s = time.monotonic() + GRACE_S
        if failures and not ready:
            break
    if failures:
        # A rank that a signal killed has no words of its own; what its peers say follows from it.
        first = min(failures, key=lambda failure: failure.time_s)
        if first.exit_code is None:
            raise RankFailed(first.rank, first.text)
        error = PhalanxError(first.text)
        error.exit_code = first.exit_code
        raise error
    for _, connection in ranks:
        connection.send("leave")
    return [results[rank] for rank in range(len(ranks))]


def _death(rank: int, process: ForkServerProcess) -> Failure:
    """Describe a rank that ended without a word."""
    process.join(5)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    text = f"the process ended by {how}, without a Python traceback"
    return Failure(rank, 0.0, text, None)


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
        connection.send(("result", function(*args)))
        exit_code = 0
    except BaseException as error:
        user_code = error.exit_code if isinstance(error, PhalanxError) else None
        text = str(error) if user_code is not None else traceback.format_exc()
        connection.send(("failure", Failure(place.rank, time.time(), text, user_code)))
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    may_leave.wait()
    # gloo's threads sometimes abort a process that succeeded while they are torn down.
    os._exit(exit_code)


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
