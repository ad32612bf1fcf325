"""Run one rank of a job in a process that `local` started on this host."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from phalanx.errors import within_limits
from phalanx.launch.by_value import ByValue
from phalanx.launch.failure import describe
from phalanx.launch.heartbeat import BEAT_S, PULSE
from phalanx.launch.malloc import keep_freed_memory
from phalanx.launch.rank_log import flush, flush_streams, keep_printing
from phalanx.launch.signals import end_with_server, leave_to_parent

HELPERS_S: Final = 1.0
"""Time between SIGTERM and SIGKILL for the processes that a rank has started, in seconds."""

LEAVE = "leave"
"""Message from the parent that the rank may end; a number instead is the signal that stops it."""


@dataclass(frozen=True)
class RankInfo:
    """Settings by which one rank joins the job, whose store is at `port`; see `run_ranks`.

    `sockets` is the parent's folder of sockets, which the rank removes if the parent is killed.
    `name` is what messages call the rank; empty: "rank N".
    """

    rank: int
    num_ranks: int
    port: int
    device: str
    threads: int
    timeout_s: float
    sockets: str = ""
    name: str = ""


class ParentPipe:
    """This rank's end of the pipe to its parent process, which decides when the rank may end."""

    def __init__(self, connection: Connection, sockets: str) -> None:
        self._connection = connection
        self._sockets = sockets
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._may_leave = threading.Event()
        self._has_thread = False

    def open(self) -> None:
        """Start the thread that sends heartbeats and receives messages of the parent."""
        threading.Thread(target=self._serve, name="pulse", daemon=True).start()
        self._has_thread = True
        PULSE.on_change = self._beat_now

    def wait_to_leave(self) -> None:
        """Wait until the parent sends LEAVE; return at once if no thread receives messages."""
        if self._has_thread:
            self._may_leave.wait()

    @property
    def is_of_fork(self) -> bool:
        """Whether a script forked this process, which is then no rank of the job."""
        return os.getpid() != self._process

    def send(self, kind: str, value: Any) -> None:
        """Send a message to the parent; raise OSError if the parent has closed the pipe."""
        if self.is_of_fork:
            return
        with self._lock:
            self._connection.send((kind, value))

    def _beat(self) -> None:
        self.send("beat", PULSE.beat())

    def _beat_now(self) -> None:
        with suppress(OSError):  # the parent has ended, and the thread ends this process
            self._beat()

    def _serve(self) -> None:
        """Send a heartbeat every BEAT_S and obey the parent; end at once if the parent ends."""
        try:
            self._beat()
            while True:
                if self._connection.poll(BEAT_S):
                    word = self._connection.recv()
                    if word == LEAVE:
                        self._may_leave.set()
                        return
                    PULSE.stop_signal = word
                self._beat()
        except (EOFError, OSError):
            end_children()
            parent = multiprocessing.parent_process()
            if self._sockets and parent is not None and not parent.is_alive():
                shutil.rmtree(self._sockets, ignore_errors=True)
            os._exit(1)


def run_rank(
    info: RankInfo,
    listener: socket.socket | None,
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the job, call the function, send its result or failure, and exit the process."""
    sys.excepthook = sys.__excepthook__  # replaces the forkserver's, which hides some errors
    leave_to_parent()
    end_with_server()
    keep_printing()
    line = ParentPipe(connection, info.sockets)
    # Processes that this rank starts, such as DataLoader workers, use Python's default start
    # method; with the inherited method, forkserver, each would run the script again.
    multiprocessing.set_start_method(None, force=True)
    try:
        line.open()
        _join(info, listener)
        with PULSE.doing("the work"):
            result = function(*args)
        flush(sys.stdout)  # raises here, as this rank's failure, if the pipe has no reader
        line.send("result", ByValue(result))
        exit_code = 0
    except BaseException as error:
        failure = describe(info.rank, error, info.name)
        if line.is_of_fork:
            print(failure.text, file=sys.stderr)  # noqa: T201 - no other process reports it
        # Once another rank has failed, the parent closes the pipe.
        with suppress(OSError):
            line.send("failure", failure)
        exit_code = failure.exit_code
    flush_streams()
    if not line.is_of_fork:
        line.wait_to_leave()
        end_children()
    # Tearing down gloo's threads sometimes aborts a process that succeeded.
    os._exit(exit_code)


def end_children() -> None:
    """End this process's child processes, such as DataLoader workers, as Python does at exit."""
    helpers = multiprocessing.active_children()
    for helper in helpers:
        helper.terminate()
    until_s = time.monotonic() + HELPERS_S
    for helper in helpers:
        helper.join(max(0.0, until_s - time.monotonic()))
    for helper in helpers:
        if helper.is_alive():
            helper.kill()


def socket_folder() -> str:
    """Return the folder that this process created for multiprocessing's sockets, or "".

    A child process of multiprocessing uses the folder of its parent.
    """
    if multiprocessing.parent_process() is not None:
        return ""
    # Private, and set once the folder is created; tests/launch/test_local.py pins it.
    config: dict[str, Any] = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    return config.get("tempdir") or ""


def remove_sockets() -> None:
    """Remove the folder of this process's sockets, as Python does only at a normal exit."""
    if folder := socket_folder():
        shutil.rmtree(folder, ignore_errors=True)


def _join(info: RankInfo, listener: socket.socket | None) -> None:
    import torch
    import torch.distributed as dist

    from phalanx.comm import join

    os.environ.update(
        RANK=str(info.rank),
        LOCAL_RANK=str(info.rank),
        WORLD_SIZE=str(info.num_ranks),
        LOCAL_WORLD_SIZE=str(info.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(info.port),
    )
    # All ranks are on this host: loopback avoids resolving the host's name, which often fails, and
    # overrides an interface that the environment sets for traffic between hosts.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    keep_freed_memory()
    join.raise_file_limit()
    torch.set_num_threads(info.threads)
    if info.device == "cuda":
        torch.cuda.set_device(info.rank)
    with within_limits(f"{info.name or f'rank {info.rank}'} cannot join the job"):
        store = dist.TCPStore(
            "127.0.0.1",
            info.port,
            info.num_ranks,
            is_master=listener is not None,
            master_listen_fd=listener.detach() if listener is not None else None,
            use_libuv=True,
        )
    join.join(info.rank, info.num_ranks, store=store, device=info.device, timeout_s=info.timeout_s)
