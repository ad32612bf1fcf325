"""Join a job, and connect its ranks; comm.meshes creates the process groups of its axes.

[Note: Connections] By default gloo connects every pair of ranks of a group. A group in which a rank
communicates with few peers is connected lazily instead, and a barrier then opens the connections it
will use: to the ranks 1, 2, 4, ... away in both directions, which are also the neighbors in gloo's
rings and trees. So no rank opens its first connection in the middle of a run, where gloo waits five
times the timeout for a stalled peer, and where two sends that each wait for the other's connection
deadlock. The groups of all ranks and of dp, and second groups (`JobMesh.separate_engines`), which
only reduce and broadcast, are connected so. In the groups of other axes every pair is connected.
NCCL manages its connections itself.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.axes import flattened
from phalanx.comm.fork import delay_forks_until_idle
from phalanx.comm.same_host import MOST_RANKS
from phalanx.errors import ConfigError, within_limits

STORE_CONNECTIONS = 4
"""Connections of each rank to the store, which rank 0 hosts where no launcher does."""

GROUP_FILES = 4
"""Files that gloo opens for a group in addition to its connections: listeners and event queues."""

RESERVED_FILES = 192
"""Allowance for other files of a rank: libraries, token files, records, pipes, NCCL, checkpoint."""


def join(
    rank: int,
    num_ranks: int,
    *,
    store: dist.Store | None = None,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> None:
    """Initialize the default process group: gloo for the CPU, NCCL for CUDA devices.

    NCCL transfers Python objects too (comm.together), so a CUDA job needs no gloo group.

    The ranks rendezvous at `store`, or through the environment variables of torchrun if None. One
    collective times out after `timeout_s`. "cuda" is the device set by `torch.cuda.set_device`.

    Raises:
        ConfigError: a rank may not open as many files as the job needs, or start as many threads.
    """
    check_files({}, num_ranks, device)
    # With a device id, NCCL connects at once, and the groups of axes can be split from this group.
    device_id = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    # init_process_group sets torch's hook, which buffers the output of ours; as ours ends the
    # process, the output would be lost.
    hook = sys.excepthook
    with within_limits(f"rank {rank} cannot join the job"), lazily_connected():
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            init_method=None if store is not None else "env://",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=device_id,
        )
    sys.excepthook = hook
    delay_forks_until_idle()
    dist.barrier()  # see [Note: Connections]


def set_timeout(timeout_s: float) -> None:
    """Set the timeout of collectives in all existing groups."""
    # All private, and the only way before torch 2.14; tests/comm/test_join.py pins them.
    internals: Any = dist.distributed_c10d
    set_of_group = getattr(dist, "set_timeout", None) or internals._set_pg_timeout
    for group in internals._world.pg_map:
        set_of_group(timedelta(seconds=timeout_s), group)


def raise_file_limit() -> None:
    """Raise this process's limit on open files, which include connections, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS allows fewer files than the hard limit it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10240)), hard))


def num_files(axes: Mapping[str, int], num_ranks: int, device: str) -> int:
    """Estimate the number of open files of rank 0, which has the most of all ranks.

    Rank 0 may host the store, to which each rank connects four times: in `join`, for heartbeats,
    and with `job_store` for the checkpoint writer thread and for the check of calls.
    """
    peers, num_mapped = list[int](), 0
    if device == "cpu":
        peers += [_num_lazy_peers(num_ranks)]
        peers += [
            _num_lazy_peers(size) if axis == "dp" else size - 1 for axis, size in axes.items()
        ]
        for members in flattened(axes).values():
            peers += [math.prod(axes[axis] for axis in members) - 1]
        if axes.get("pp", 1) > 1:
            peers += [1] * 2 * min(axes["pp"] - 1, 2)  # see comm.meshes, [Note: One-way groups]
        # With shared memory: the heap of a rank, its map, and a map for each peer.
        sizes = [*axes.values()]
        sizes += [math.prod(axes[axis] for axis in members) for members in flattened(axes).values()]
        if num_sharing := sum(size - 1 for size in sizes if size <= MOST_RANKS):
            num_mapped = 2 + min(math.prod(axes.values()) - 1, num_sharing)
    of_groups = sum(peers) + GROUP_FILES * len(peers) + num_mapped
    return RESERVED_FILES + STORE_CONNECTIONS * num_ranks + of_groups


def check_files(axes: Mapping[str, int], num_ranks: int, device: str) -> None:
    """Check that rank 0 may open as many files as `num_files` returns.

    Raises:
        ConfigError: it may not; the message has both numbers and the largest number of ranks.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files(axes, num_ranks, device)
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    to_store = STORE_CONNECTIONS * num_ranks
    raise ConfigError(
        f"{num_ranks} ranks need {needed} open files on rank 0, but it may open {limit}: "
        f"{to_store} for connections to the store by which ranks join, "
        f"{needed - to_store - RESERVED_FILES} for ranks of its groups and their memory, and "
        f"{RESERVED_FILES} for all else; raise the limit on its host (ulimit -Hn {needed}), "
        f"or start at most {max(1, (limit - (needed - to_store)) // STORE_CONNECTIONS)} ranks"
    )


def _num_lazy_peers(num_ranks: int) -> int:
    """Return the number of peers that are 1, 2, 4, ... ranks away in both directions."""
    return min(num_ranks - 1, 2 * math.ceil(math.log2(num_ranks))) if num_ranks > 1 else 0


@contextmanager
def lazily_connected() -> Generator[None]:
    """Make gloo groups created inside the block connect two ranks at their first message."""
    # gloo has only this environment variable; tests/comm/test_join.py counts the connections.
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def connect(group: dist.ProcessGroup, *, fully: bool) -> None:
    """Open a gloo group's connections: all pairs if `fully`, else see [Note: Connections]."""
    if dist.get_backend(group) != "gloo":
        return
    if fully:
        numbers = torch.zeros(group.size(), device="cpu")
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
    else:
        dist.barrier(group)


def job_store() -> dist.Store:
    """Return a client of the job's rendezvous store with a new connection.

    A client serves one call at a time, so a wait on the job's default client would block its other
    users.
    """
    # Private, and the only way to the store; `clone` has no type. tests/debug/test_check.py
    # pins both.
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store.clone()


def job_timeout() -> timedelta:
    """Return the job's timeout of one collective."""
    # Private, and the only way; tests/comm/test_join.py pins it.
    job: Any = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = job._get_backend(device).options
    if options is None:  # torch's fake backend, which never waits
        return dist.distributed_c10d.default_pg_timeout
    return options._timeout
