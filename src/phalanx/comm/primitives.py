"""Collectives over one named axis of a mesh.

Notation (Austin et al., How to Scale Your Model, 2025): `A[I_x]` is split over axis x, `{sum x}` is
a sum still owed over x. N is the size of the axis; a rank sends, for a byte of the whole tensor,

    all_reduce       A{sum x} -> A          2 (N - 1)/N, as in a ring
    all_gather       A[I_x] -> A            (N - 1)/N
    reduce_scatter   A{sum x} -> A[I_x]     (N - 1)/N
    all_to_all       A[I_x, J] -> A[I, J_x] (N - 1)/N
    broadcast        A on one -> A          (N - 1)/N
    reduce           A{sum x} -> A on one   (N - 1)/N
    swap             A to a partner, its A back   counted as an all_to_all, perhaps with itself

Those named `_start` return at once; their tensors must be left alone until `wait`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phalanx.comm import exchange
from phalanx.comm.join import DATA_AXES, axis_size
from phalanx.comm.waits import waiting

Reduction = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_any_dist: Any = dist
# PyTorch 2.13 renamed these two; 2.11 and 2.12 have the old names only.
_gather_single = getattr(_any_dist, "all_gather_single", None) or _any_dist.all_gather_into_tensor
_scatter_single = (
    getattr(_any_dist, "reduce_scatter_single", None) or _any_dist.reduce_scatter_tensor
)


class Pending:
    """A collective under way; `wait` returns its tensor when it is there."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        """Return the tensor once the collective has ended (for CUDA: once it is on the stream)."""
        if self._work is not None:
            with waiting():
                self._work.wait()
            self._work = None
        return self._tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_reduce(
    tensor: torch.Tensor, mesh: DeviceMesh, axis: str, reduction: Reduction = "sum"
) -> torch.Tensor:
    """Reduce `tensor` in place over `axis`; every rank of the axis then holds the result."""
    return all_reduce_start(tensor, mesh, axis, reduction).wait()


def all_reduce_start(
    tensor: torch.Tensor, mesh: DeviceMesh, axis: str, reduction: Reduction = "sum"
) -> Pending:
    """Begin `all_reduce` and return at once; `tensor` must not be touched before `wait`."""
    if axis_size(mesh, axis) == 1:
        return Pending(tensor, None)
    work = dist.all_reduce(tensor, _OPS[reduction], group=mesh.get_group(axis), async_op=True)
    return Pending(tensor, work)


def sum_over_data(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum `tensor` in place over all ranks that hold different samples."""
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            all_reduce(tensor, mesh, axis)
    return tensor


def all_gather(part: torch.Tensor, mesh: DeviceMesh, axis: str, dim: int) -> torch.Tensor:
    """Return the parts of all ranks of `axis`, as large on each, one after another along `dim`."""
    num_ranks = axis_size(mesh, axis)
    if num_ranks == 1:
        return part
    whole = part.new_empty(num_ranks, *part.shape)
    group = mesh.get_group(axis)
    if part.is_cuda:
        _gather_single(whole, part.contiguous(), group=group)
    else:
        exchange.all_gather(whole.view(-1), part.reshape(-1), group)
    return whole.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(whole: torch.Tensor, mesh: DeviceMesh, axis: str, dim: int) -> torch.Tensor:
    """Return this rank's part, along `dim`, of the sum over `axis`; the axis's size divides it."""
    num_ranks = axis_size(mesh, axis)
    if num_ranks == 1:
        return whole
    parts = whole.unflatten(dim, (num_ranks, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    group = mesh.get_group(axis)
    if whole.is_cuda:
        _scatter_single(out, parts, group=group)
    else:
        exchange.reduce_scatter(out.view(-1), parts.view(-1), group)
    return out


def all_to_all(
    tensor: torch.Tensor, mesh: DeviceMesh, axis: str, split_dim: int, join_dim: int
) -> torch.Tensor:
    """Cut `tensor` along `split_dim`, one part a rank of `axis`; join what comes on `join_dim`."""
    num_ranks = axis_size(mesh, axis)
    if num_ranks == 1:
        return tensor
    parts = tensor.unflatten(split_dim, (num_ranks, -1)).movedim(split_dim, 0).contiguous()
    received = torch.empty_like(parts)
    with waiting():
        dist.all_to_all_single(received, parts, group=mesh.get_group(axis))
    return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)


def broadcast_start(tensor: torch.Tensor, mesh: DeviceMesh, axis: str, source: int) -> Pending:
    """Begin to overwrite `tensor`, contiguous, with that of the rank at coordinate `source`."""
    if axis_size(mesh, axis) == 1:
        return Pending(tensor, None)
    group = mesh.get_group(axis)
    return Pending(tensor, dist.broadcast(tensor, group=group, group_src=source, async_op=True))


def reduce_start(tensor: torch.Tensor, mesh: DeviceMesh, axis: str, target: int) -> Pending:
    """Begin to sum `tensor`, contiguous, over `axis` into that of the rank at `target`.

    That of the other ranks holds nothing of use afterwards.
    """
    if axis_size(mesh, axis) == 1:
        return Pending(tensor, None)
    group = mesh.get_group(axis)
    return Pending(tensor, dist.reduce(tensor, group_dst=target, group=group, async_op=True))


def swap(tensor: torch.Tensor, group: dist.ProcessGroup, partner: int) -> torch.Tensor:
    """Return the tensor of the rank `partner` of `group`, which gets this rank's, as large.

    An all-to-all in which all but one part are empty: so every rank makes the same call, also one
    that is its own partner.
    """
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sizes = [0] * group.size()
    sizes[partner] = tensor.numel()
    with waiting():
        dist.all_to_all_single(out.view(-1), tensor.reshape(-1), sizes, sizes, group=group)
    return out


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """Overwrite `tensor` on every rank of `axis` with that of the axis's first rank.

    It goes as bytes: gloo does not know every data type.
    """
    if axis_size(mesh, axis) > 1 and tensor.numel():
        flat = tensor.detach().reshape(-1)  # a copy where the tensor is not contiguous
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=mesh.get_group(axis))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))
    return tensor
