"""Join a job and lay its ranks on a mesh of named axes: the only place that makes process groups.

The mesh has one axis for each degree above 1, outer to inner `pp dp fsdp cp tp`, so that the
innermost axis lies on the fastest link; tp has one for each of its sub-axes (`Strategy.grid`). A
strategy of one rank has the axis `dp` of size 1.

[Note: Connections] gloo connects every rank of a group with every other. A group whose collectives
speak to few ranks is connected lazily instead, and a barrier then opens what it will use: to the
ranks 1, 2, 4, ... away in both directions, which are also the neighbours of gloo's rings and trees.
So no rank first connects in the middle of a run, where gloo waits five times the timeout for one
that stands still, and where two sends that wait for each other's connection would wait for ever.
The groups of all ranks are such, and those of dp, which only reduce and broadcast. The ranks of the
other axes exchange with each other. NCCL connects for itself.

[Note: One-way groups] NCCL runs the calls of a group one after another, and a send ends when its
receive runs. Two neighbours in a pipeline that both send first (one an activation, the other a
gradient) would wait for each other for ever in one group. So each two neighbours have a group for
either direction: one rank only sends there, the other only receives, in the same order, and no
schedule can stand still. The first and the last rank are neighbours too: chunks of a rank and tied
weights go from one to the other. gloo needs none of this, and has the same groups.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.comm.axes import axes_of
from phalanx.errors import ConfigError, within_limits

STORE_CONNECTIONS = 3
"""Connections of each rank to the store, which rank 0 holds."""

GROUP_FILES = 4
"""Files that gloo has open for a group beside its connections: it listens and waits for events."""

RESERVED_FILES = 192
"""Files that a rank has open beside: libraries, token files, records, pipes, NCCL, a checkpoint."""

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
"""By the job's group of all ranks, the axes and the device."""

_inner_meshes: dict[DeviceMesh, DeviceMesh] = {}
"""By the mesh that has pp, too."""

_sharding_meshes: dict[DeviceMesh, DeviceMesh] = {}
"""By the mesh of the job."""

OneWayGroups = dict[tuple[int, int], dist.ProcessGroup]
"""Coordinates on pp of the rank that sends and of the one that receives -> their group."""

_one_way_groups: dict[DeviceMesh, OneWayGroups] = {}
"""By the mesh of the job."""

_groups_apart: dict[tuple[DeviceMesh, str], dist.ProcessGroup] = {}
"""By the mesh of the job and the axis."""


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
    with within_limits(f"rank {rank} cannot join the job"), _lazily_connected():
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            init_method=None if store is not None else "env://",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=device_id,
        )
    dist.barrier()  # see [Note: Connections]


def set_timeout(timeout_s: float) -> None:
    """Have no rank wait longer for another in one collective, in all groups that there are."""
    # Both private, and the only way; tests/comm/test_join.py pins them.
    groups = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)  # pyright: ignore[reportPrivateUsage]


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
    peers: list[int] = []
    if device == "cpu":
        peers += [_few(num_ranks)]
        peers += [_few(size) if axis == "dp" else size - 1 for axis, size in axes.items()]
        if "fsdp" in axes and "cp" in axes:
            peers += [axes["fsdp"] * axes["cp"] - 1]
        if axes.get("pp", 1) > 1:
            peers += [1] * 2 * min(axes["pp"] - 1, 2)  # see [Note: One-way groups]
    return RESERVED_FILES + STORE_CONNECTIONS * num_ranks + sum(peers) + GROUP_FILES * len(peers)


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
        f"{needed - to_store - RESERVED_FILES} to ranks of its groups and {RESERVED_FILES} "
        f"for all else; raise the limit on its host (ulimit -Hn {needed}), or start at most "
        f"{max(1, (limit - (needed - to_store)) // STORE_CONNECTIONS)} ranks"
    )


def _few(num_ranks: int) -> int:
    """Return to how many ranks a rank connects that speaks to those 1, 2, 4, ... away."""
    return min(num_ranks - 1, 2 * math.ceil(math.log2(num_ranks))) if num_ranks > 1 else 0


@contextmanager
def _lazily_connected() -> Generator[None]:
    """Let the gloo groups that are made here connect two ranks when they first speak."""
    # gloo is told by the environment alone; tests/comm/test_join.py counts the connections.
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


def _connect(group: dist.ProcessGroup, *, fully: bool) -> None:
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


def open_mesh(axes: Mapping[str, int], device: str = "cpu") -> DeviceMesh:
    """Lay the ranks of the job out on `axes`, and connect those of each; every rank calls this.

    A job has one mesh of the same axes, however often it is asked for: PyTorch caches layouts under
    meshes that compare equal, and FSDP2 requires the same object.

    Raises:
        ConfigError: a rank may not open as many files as the mesh needs.
    """
    asked = (dist.group.WORLD, tuple(axes.items()), device)
    if asked not in _meshes:
        _meshes[asked] = _new_mesh(axes, device)
    return _meshes[asked]


def inner_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of this rank's stage of a pipeline: the axes within pp, if there are any.

    It is one object a mesh, as FSDP2 requires.
    """
    names = mesh.mesh_dim_names or ()
    inner = tuple(name for name in names if name != "pp")
    if inner in ((), names):
        return mesh
    if mesh not in _inner_meshes:
        _inner_meshes[mesh] = mesh[inner]
    return _inner_meshes[mesh]


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of dp, if there is any, and fsdp; where there is cp, of fsdp_cp.

    It is one object a mesh, as FSDP2 requires.
    """
    names = mesh.mesh_dim_names or ()
    if mesh not in _sharding_meshes:
        data = axes_of("data", names)
        found = mesh["fsdp"] if data == ("fsdp",) else mesh[data]
        if "cp" in names:
            # Private, and the way to one axis of several; tests/comm/test_comm.py pins it.
            found = mesh["fsdp", "cp"]._flatten("fsdp_cp")  # pyright: ignore[reportPrivateUsage]
            if "dp" in names:
                found = DeviceMesh._concatenate([mesh["dp"], found])  # pyright: ignore[reportPrivateUsage]
        _sharding_meshes[mesh] = found
    return _sharding_meshes[mesh]


def one_way_groups(mesh: DeviceMesh) -> OneWayGroups:
    """Return the groups in which this rank sends to its neighbours on pp, or they to it.

    Every rank of a job that has pp calls this; see [Note: One-way groups].
    """
    if mesh not in _one_way_groups:
        axis = (mesh.mesh_dim_names or ()).index("pp")
        ranks = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1).tolist()
        here = mesh.get_local_rank("pp")
        groups: OneWayGroups = {}
        for pairs in neighbor_rounds(mesh.size(axis)):
            split = [list(both) for a, b in pairs for both in zip(ranks[a], ranks[b], strict=True)]
            forward, backward = (_split_job(split, mesh.device_type) for _ in range(2))
            for a, b in pairs:
                if here in (a, b):
                    assert forward is not None and backward is not None, "this rank is in a pair"
                    groups |= {(a, b): forward, (b, a): backward}
        _one_way_groups[mesh] = groups
    return _one_way_groups[mesh]


def neighbor_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours on a ring, in rounds that have each rank at most once."""
    pairs = [(at, (at + 1) % size) for at in range(size if size > 2 else size - 1)]
    odd = [[pairs.pop()]] if size > 2 and size % 2 else []
    return [each for each in (pairs[::2], pairs[1::2]) if each] + odd


def _split_job(parts: list[list[int]], device: str) -> dist.ProcessGroup | None:
    """Make a group of each part of the job's ranks, which share none; return this rank's.

    A rank waits in it for another as long as the job says.
    """
    # Private, and the only way; tests/comm/test_one_way_groups.py pins it.
    job: Any = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    timeout = _timeout(device)
    if job.bound_device_id is None:
        made = [dist.new_group(part, timeout) for part in parts]
        return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)
    # All at once, as DeviceMesh does. A rank without a part gets a group of its own: torch names a
    # group after how many its rank has, and all ranks of a group must call it the same.
    split = {rank for part in parts for rank in part}
    alone = [[rank] for rank in range(dist.get_world_size()) if rank not in split]
    return dist.split_group(split_ranks=[*parts, *alone], timeout=timeout)


def groups_apart(mesh: DeviceMesh, axes: Iterable[str]) -> dict[str, dist.ProcessGroup]:
    """Return a second group of each of some axes, for reductions that keep no order with the first.

    Every rank of the job calls this. A mesh has one second group an axis, however often it is asked
    for: its calls keep one order among themselves.
    """
    axes = list(axes)
    for axis in axes:
        if (mesh, axis) not in _groups_apart:
            number = (mesh.mesh_dim_names or ()).index(axis)
            ranks = mesh.mesh.movedim(number, -1).reshape(-1, mesh.size(number)).tolist()
            with _lazily_connected():
                own = _split_job(ranks, mesh.device_type)
            assert own is not None, "every rank is on every axis of its mesh"
            _connect(own, fully=False)
            _groups_apart[mesh, axis] = own
    return {axis: _groups_apart[mesh, axis] for axis in axes}


def _new_mesh(axes: Mapping[str, int], device: str) -> DeviceMesh:
    check_files(axes, dist.get_world_size(), device)
    with _lazily_connected():
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        groups = {axis: mesh.get_group(axis) for axis in axes}
        if "fsdp" in axes and "cp" in axes:
            groups["fsdp_cp"] = sharding_mesh(mesh)["fsdp_cp"].get_group()
    # DeviceMesh makes its groups with torch's own timeout.
    set_timeout(_timeout(device).total_seconds())
    for axis, group in groups.items():
        _connect(group, fully=axis != "dp")
    return mesh


def _timeout(device: str) -> timedelta:
    """Return how long the job has a rank wait for another in one collective."""
    # Private, and the only way; tests/comm/test_join.py pins it.
    job: Any = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    options = job._get_backend(torch.device(device)).options
    if options is None:  # of torch's fake backend, which waits for nobody
        return dist.distributed_c10d.default_pg_timeout
    return options._timeout
