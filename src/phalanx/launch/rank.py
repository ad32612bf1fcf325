"""Run one rank of a job in a process that `local` started on this host."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from phalanx.errors import within_limits
from phalanx.launch import debug_net
from phalanx.launch.failure import describe
from phalanx.launch.feed import Feed
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.pipe import ByValue, ParentPipe, end_children
from phalanx.launch.process_memory import keep_freed_memory
from phalanx.launch.rank_log import flush, flush_streams, keep_printing
from phalanx.launch.signals import end_with_server, leave_to_parent

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    """Settings by which one rank joins the job; see `run_ranks`.

    Attributes:
        port: port of the job's store on this host.
        sockets: the parent's folder of sockets, which the rank removes if the parent is killed.
        name: what messages call the rank; empty: "rank N".
        member: number of the process among all that the parent has started, by which it beats.
        job: number of the job; the processes of a parent may be several jobs with one store.
        debug_net: folder of the files of `debug_net`; "" for none.
    """

    rank: int
    num_ranks: int
    port: int
    device: str
    threads: int
    timeout_s: float
    sockets: str = ""
    name: str = ""
    member: int = 0
    job: int = 0
    debug_net: str = ""


def run_rank(
    info: RankInfo,
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
        join_job(info, line)
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


def join_job(info: RankInfo, line: ParentPipe) -> None:
    """Connect to the job's store, send heartbeats to it, and join the job's process group."""
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
    if info.debug_net:
        debug_net.begin(info.debug_net, info.rank)
    with within_limits(f"{info.name or f'rank {info.rank}'} cannot join the job"):
        line.beat_on(Feed(connected(info), info.member))
        store = dist.PrefixStore(f"job {info.job}", connected(info))
    join.join(info.rank, info.num_ranks, store=store, device=info.device, timeout_s=info.timeout_s)


def connected(info: RankInfo) -> dist.TCPStore:
    """Return a new connection to the store that the parent hosts; each user has its own."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", info.port, wait_for_workers=False, use_libuv=True)
