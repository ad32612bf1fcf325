"""What runs in a process that was started for one rank of a job on this host."""

from __future__ import annotations

import io
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
from phalanx.launch.rank_log import flush, flush_streams
from phalanx.launch.signals import leave_to_parent

HELPERS_S: Final = 1.0
"""How long a process that a rank has started has to end by itself before it is killed, in seconds.
"""

LEAVE = "leave"
"""What the parent sends when the rank may end; a number is the signal to stop by."""


@dataclass(frozen=True)
class RankInfo:
    """What one rank must know to join the job, whose store is at `port`; see `run_ranks`.

    `sockets` is a folder that the parent has made, for what removes it if the parent is killed.
    """

    rank: int
    num_ranks: int
    port: int
    device: str
    threads: int
    timeout_s: float
    sockets: str = ""


class Line:
    """This rank's end of the pipe to the parent, which says when the rank may end."""

    def __init__(self, connection: Connection, sockets: str) -> None:
        self._connection = connection
        self._sockets = sockets
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._may_leave = threading.Event()
        self._has_thread = False

    def open(self) -> None:
        """Begin to send beats and to hear the parent."""
        threading.Thread(target=self._serve, name="pulse", daemon=True).start()
        self._has_thread = True
        PULSE.on_change = self._beat_now

    def wait_to_leave(self) -> None:
        """Wait until the parent says so; one that is not heard need not be waited for."""
        if self._has_thread:
            self._may_leave.wait()

    @property
    def is_of_fork(self) -> bool:
        """Whether this process is a fork that a script has made, which speaks for no rank."""
        return os.getpid() != self._process

    def send(self, kind: str, value: Any) -> None:
        """Send to the parent; an OSError says that it listens no more."""
        if self.is_of_fork:
            return
        with self._lock:
            self._connection.send((kind, value))

    def _beat(self) -> None:
        self.send("beat", PULSE.beat())

    def _beat_now(self) -> None:
        with suppress(OSError):  # the parent has gone, and the thread ends this process
            self._beat()

    def _serve(self) -> None:
        """Send a beat now and then, and obey the parent; without a parent, end at once."""
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
            end_helpers()
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
    """Join the job, call the function, and report; never returns."""
    sys.excepthook = sys.__excepthook__  # the server's says less
    leave_to_parent()
    escape_unknown_characters()
    line = Line(connection, info.sockets)
    # A server forked this process; the helpers it starts, such as a DataLoader's, begin as Python's
    # do by default, or each would begin with the script anew.
    multiprocessing.set_start_method(None, force=True)
    try:
        line.open()
        _join(info, listener)
        with PULSE.doing("the work"):
            result = function(*args)
        flush(sys.stdout)  # nobody may read it
        line.send("result", ByValue(result))
        exit_code = 0
    except BaseException as error:
        failure = describe(info.rank, error)
        if line.is_of_fork:
            print(failure.text, file=sys.stderr)  # noqa: T201 - nobody else reports it
        # Once another rank has failed, the parent listens no more.
        with suppress(OSError):
            line.send("failure", failure)
        exit_code = failure.exit_code
    flush_streams()
    if not line.is_of_fork:
        line.wait_to_leave()
        end_helpers()
    # gloo's threads sometimes abort a process that succeeded while they are torn down.
    os._exit(exit_code)


def escape_unknown_characters() -> None:
    """Have standard output escape what its encoding lacks, as standard error does.

    The name of a folder may have any character, and a run must not end by printing it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def end_helpers() -> None:
    """End the processes that this one has started, such as a DataLoader's, as Python would."""
    helpers = multiprocessing.active_children()
    for helper in helpers:
        helper.terminate()
    until_s = time.monotonic() + HELPERS_S
    for helper in helpers:
        helper.join(max(0.0, until_s - time.monotonic()))
    for helper in helpers:
        if helper.is_alive():
            helper.kill()


def own_sockets() -> str:
    """Return the folder of multiprocessing's sockets that this process has made, if it has.

    A process that multiprocessing has started uses the folder of the one that started it.
    """
    if multiprocessing.parent_process() is not None:
        return ""
    # Private, and set once such a folder is made; tests/launch/test_local.py pins it.
    config: dict[str, Any] = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    return config.get("tempdir") or ""


def remove_sockets() -> None:
    """Remove the folder of this process's sockets, which Python does at a normal end alone."""
    if folder := own_sockets():
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
    # All ranks are on this host: gloo need not resolve the host's name, which often fails, and
    # what the environment says of the interface between hosts is of no use here.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    keep_freed_memory()
    join.allow_files()
    torch.set_num_threads(info.threads)
    if info.device == "cuda":
        torch.cuda.set_device(info.rank)
    with within_limits(f"rank {info.rank} cannot join the job"):
        store = dist.TCPStore(
            "127.0.0.1",
            info.port,
            info.num_ranks,
            is_master=listener is not None,
            master_listen_fd=listener.detach() if listener is not None else None,
            use_libuv=True,
        )
    join.join(info.rank, info.num_ranks, store=store, device=info.device, timeout_s=info.timeout_s)
