"""Join a job and lay its ranks on a mesh of named axes: the only place that makes process groups.

The mesh has one axis for each degree above 1, outer to inner `pp dp fsdp cp tp`, so that the
innermost axis lies on the fastest link; tp has one for each of its sub-axes (`Strategy.grid`). A
strategy of one rank has the axis `dp` of size 1.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.strategy import Strategy, check_ranks

DATA_AXES = ("dp", "fsdp")
"""The axes whose coordinates hold different samples."""

WRITER_TIMEOUT_S = 3600.0
"""Longest wait for the disk of another rank, in seconds; a rank that is gone is noticed at once."""


def join(
    rank: int,
    num_ranks: int,
    *,
    store: dist.Store | None = None,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> None:
    """Enter the default process group: gloo for the CPU, and NCCL beside it for CUDA devices.

    Args:
        rank: global rank of this process.
        num_ranks: processes in the job.
        store: where the ranks meet; the environment that torchrun sets, if None.
        device: "cpu" or "cuda".
        timeout_s: longest wait for another rank in one collective, in seconds.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        init_method=None if store is not None else "env://",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def job_store() -> dist.Store:
    """Return the store the ranks of the job met at, over a connection of the caller's own.

    Each client of a store serves one call at a time, so that a wait on the job's own would hold up
    whoever else needs it.
    """
    # Private, and the only way to the store; `clone` has no type. tests/comm/test_fingerprint.py
    # pins both.
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store.clone()


def build_mesh(strategy: Strategy, device: str = "cpu") -> DeviceMesh:
    """Lay the ranks of the job out as `strategy` names them.

    Args:
        strategy: its degrees must multiply to the number of ranks of the job.
        device: "cpu" or "cuda".

    Raises:
        StrategyError: the degrees do not multiply to the number of ranks.
    """
    check_ranks(strategy, dist.get_world_size())
    axes: dict[str, int] = {}
    for name, axis in strategy.axes():
        if axis.degree > 1:
            axes |= strategy.grid() if name == "tp" else {name: axis.degree}
    axes = axes or {"dp": 1}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks of an axis of the mesh itself.

    `mesh[axis].size()` would first make a mesh of it.
    """
    return mesh.size((mesh.mesh_dim_names or ()).index(axis))


def tp_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the sub-axes of tp; empty where the mesh has no tp."""
    return tuple(name for name in mesh.mesh_dim_names or () if name.split("_")[0] == "tp")


def tp_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Make a group of all ranks of tp, whatever grid they stand in; every rank calls this."""
    # Private, and the way to one axis of several; tests/parallel/tensor pins it.
    return mesh[tp_axes(mesh)]._flatten().get_group()  # pyright: ignore[reportPrivateUsage]


def writer_group() -> dist.ProcessGroup:
    """Make a group of all ranks for the thread that writes checkpoints; every rank calls this.

    Its collectives run beside those of the training, which must not meet them.
    """
    group = dist.new_group(
        backend="gloo",
        timeout=timedelta(seconds=WRITER_TIMEOUT_S),
        group_desc="checkpoint writer",
    )
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def data_coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's place among the ranks that hold different samples, and their number."""
    place, size = 0, 1
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            num_ranks = axis_size(mesh, axis)
            place = place * num_ranks + mesh.get_local_rank(axis)
            size *= num_ranks
    return place, size


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
