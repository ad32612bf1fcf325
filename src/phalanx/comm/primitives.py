"""Collectives over one named axis of a mesh.

Notation (Austin et al., How to Scale Your Model, 2025): `{sum dp}` is a sum still owed over dp.

    all_reduce   A{sum dp} -> A      a rank sends 2 (N - 1)/N bytes a byte of A, as in a ring
    broadcast    A on one  -> A      a rank sends (N - 1)/N
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.mesh import DATA_AXES

Reduction = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way; `wait` returns its tensor when it is there."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        """Return the tensor once the collective has ended (for CUDA: once it is on the stream)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor


def all_reduce(
    tensor: torch.Tensor, mesh: DeviceMesh, axis: str, reduction: Reduction = "sum"
) -> torch.Tensor:
    """Reduce `tensor` in place over `axis`; every rank of the axis then holds the result."""
    return all_reduce_start(tensor, mesh, axis, reduction).wait()


def all_reduce_start(
    tensor: torch.Tensor, mesh: DeviceMesh, axis: str, reduction: Reduction = "sum"
) -> Pending:
    """Begin `all_reduce` and return at once; `tensor` must not be touched before `wait`."""
    if mesh[axis].size() == 1:
        return Pending(tensor, None)
    work = dist.all_reduce(tensor, _OPS[reduction], group=mesh.get_group(axis), async_op=True)
    return Pending(tensor, work)


def sum_over_data(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum `tensor` in place over all ranks that hold different samples."""
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            all_reduce(tensor, mesh, axis)
    return tensor


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """Overwrite `tensor` on every rank of `axis` with that of the axis's first rank.

    It goes as bytes: gloo does not know every data type.
    """
    if mesh[axis].size() > 1 and tensor.numel():
        flat = tensor.detach().reshape(-1)  # a copy where the tensor is not contiguous
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=mesh.get_group(axis))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))
    return tensor


def share(value: Any) -> Any:
    """Return rank 0's `value` (anything that can be pickled) on every rank of the job."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Wait until every rank of the job has come here."""
    dist.barrier()
