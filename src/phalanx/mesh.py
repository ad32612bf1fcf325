"""Join a job and lay its ranks on a mesh of named axes: the only place that makes process groups.

The mesh has one axis for each degree above 1, outer to inner `pp dp fsdp cp tp`, so that the
innermost axis lies on the fastest link. A strategy of one rank has the axis `dp` of size 1.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.strategy import Strategy, check_ranks

DATA_AXES = ("dp", "fsdp")
"""The axes whose coordinates hold different samples."""


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


def build_mesh(strategy: Strategy, device: str = "cpu") -> DeviceMesh:
    """Lay the ranks of the job out as `strategy` names them.

    Args:
        strategy: its degrees must multiply to the number of ranks of the job.
        device: "cpu" or "cuda".

    Raises:
        StrategyError: the degrees do not multiply to the number of ranks.
    """
    check_ranks(strategy, dist.get_world_size())
    axes = {name: axis.degree for name, axis in strategy.axes() if axis.degree > 1} or {"dp": 1}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's place among the ranks that hold different samples, and their number."""
    place, size = 0, 1
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            axis_size = mesh[axis].size()
            place = place * axis_size + mesh.get_local_rank(axis)
            size *= axis_size
    return place, size


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
