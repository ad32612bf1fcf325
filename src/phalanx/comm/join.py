"""Join a job, and connect its ranks; comm.meshes makes the groups of its axes.

[Note: Connections] gloo connects every rank of a group with every other. A group whose collectives
speak to few ranks is connected lazily instead, and a barrier then opens what it will use: to the
ranks 1, 2, 4, ... away in both directions, which are also the neighbours of gloo's rings and trees.
So no rank first connects in the middle of a run, where gloo waits five times the timeout for one
that stands still, and where two sends that wait for each other's connection would wait for ever.
The groups of all ranks are such, and the groups of dp, which only reduce and broadcast. The ranks
of the other axes exchange with each other. NCCL connects for itself.
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
from phalanx.comm.fork import fork_asleep
from phalanx.comm.same_host import MOST_RANKS
from phalanx.errors import ConfigError, within_limits

STORE_CONNECTIONS = 3
"""Connections of each rank to the store, which rank 0 holds."""

GROUP_FILES = 4
"""Files that gloo has open for a group beside its connections: it listens and waits for events."""

RESERVED_FILES = 192
"""Files that a rank has open beside: libraries, token files, records, pipes, NCCL, a checkpoint."""


def join(
    rank: int,
    num_ranks: int,
    *,
    store: dist.Store | None = None,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> None:
    """Enter the default process group: gloo for the CPU, NCCL for CUDA devices.

    NCCL carries Python values too (comm.together), so a CUDA job joins without gloo.

    The ranks meet at `store`, or as the environment that torchrun sets says. A rank waits
    `timeout_s` for another in one collective. "cuda" is the device of `torch.cuda.set_device`.

    Raises:
        ConfigError: a rank may not open as many files as the job needs, or start as many threads.
    """
    check_files({}, num_ranks, device)
    # Named, NCCL connects at once, and the groups of the axes are split from this one.
    device_id = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    # torch's own hook, set there, keeps back what ours prints before it ends the process.
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
    fork_asleep()
    dist.barrier()  # see [Note: Connections]


def set_timeout(timeout_s: float) -> None:
    """Have no rank wait longer for another in one collective, in all groups that there are."""
    # All private, and the only way before torch 2.14; tests/comm/test_join.py pins them.
    internals: Any = dist.distributed_c10d
    set_of_group = getattr(dist, "set_timeout", None) or internals._set_pg_timeout
    for group in internals._world.pg_map:
        set_of_group(timedelta(seconds=timeout_s), group)


def allow_files() -> None:
    """Let this process open as many files as the system lets it, connections among them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS has a lower limit than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10240)), hard))


def num_files(axes: Mapping[str, int], num_ranks: int, device: str) -> int:
    """Return the most files that a rank of a job has open, which rank 0 has.

    It holds the store, to which each rank connects three times: in `join`, and by `job_store` for
    the thread that writes checkpoints and for the check of calls.
    """
    peers, num_mapped = list[int](), 0
    if device == "cpu":
        peers += [_few(num_ranks)]
        peers += [_few(size) if axis == "dp" else size - 1 for axis, size in axes.items()]
        for members in flattened(axes).values():
            peers += [math.prod(axes[axis] for axis in members) - 1]
        if axes.get("pp", 1) > 1:
            peers += [1] * 2 * min(axes["pp"] - 1, 2)  # see comm.meshes, [Note: One-way groups]
        num_mapped = _num_mapped(axes)
    of_groups = sum(peers) + GROUP_FILES * len(peers) + num_mapped
    return RESERVED_FILES + STORE_CONNECTIONS * num_ranks + of_groups


def check_files(axes: Mapping[str, int], num_ranks: int, device: str) -> None:
    """Refuse a job of which a rank needs more files than it may open; see `num_files`.

    Raises:
        ConfigError: names both numbers and the most ranks that fit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files(axes, num_ranks, device)
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    to_store = STORE_CONNECTIONS * num_ranks
    raise ConfigError(
        f"{num_ranks} ranks need {needed} open files on rank 0, but it may open {limit}: "
        f"{to_store} connections to the store where the ranks meet, "
        f"{needed - to_store - RESERVED_FILES} to ranks of its groups and to their memory, and "
        f"{RESERVED_FILES} for all else; raise the limit on its host (ulimit -Hn {needed}), "
        f"or start at most {max(1, (limit - (needed - to_store)) // STORE_CONNECTIONS)} ranks"
    )


def _num_mapped(axes: Mapping[str, int]) -> int:
    """Return the files of a rank that shares memory: its heap, the map, and a map for each peer."""
    sizes = [*axes.values()]
    sizes += [math.prod(axes[axis] for axis in members) for members in flattened(axes).values()]
    num_peers = sum(size - 1 for size in sizes if size <= MOST_RANKS)
    return 2 + min(math.prod(axes.values()) - 1, num_peers) if num_peers else 0


def _few(num_ranks: int) -> int:
    """Return to how many ranks a rank connects that speaks to those 1, 2, 4, ... away."""
    return min(num_ranks - 1, 2 * math.ceil(math.log2(num_ranks))) if num_ranks > 1 else 0


@contextmanager
def lazily_connected() -> Generator[None]:
    """Let the gloo groups that are made here connect two ranks when they first speak."""
    # gloo reads it from the environment alone; tests/comm/test_join.py counts the connections.
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
    """Open the connections that a group will use, see [Note: Connections]."""
    if dist.get_backend(group) != "gloo":
        return
    if fully:
        numbers = torch.zeros(group.size(), device="cpu")
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
    else:
        dist.barrier(group)


def job_store() -> dist.Store:
    """Return the store the ranks of the job met at, over a connection of the caller's own.

    Each client of a store serves one call at a time, so that a wait on the job's own would hold up
    whoever else needs it.
    """
    # Private, and the only way to the store; `clone` has no type. tests/debug/test_check.py
    # pins both.
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store.clone()


def job_timeout() -> timedelta:
    """Return how long the job has a rank wait for another in one collective."""
    # Private, and the only way; tests/comm/test_join.py pins it.
    job: Any = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = job._get_backend(device).options
    if options is None:  # of torch's fake backend, which waits for nobody
        return dist.distributed_c10d.default_pg_timeout
    return options._timeout
