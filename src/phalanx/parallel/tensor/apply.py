"""Apply a layout of tensor parallelism to a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from phalanx.comm.primitives import broadcast
from phalanx.parallel.tensor import layers, transformers_models
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.megatron import Megatron
from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.placed import Placed
from phalanx.parallel.tensor.roles import Site, reads_residual
from phalanx.parallel.tensor.three_d import ThreeD
from phalanx.parallel.tensor.two_and_a_half_d import TwoAndAHalfD
from phalanx.parallel.tensor.two_d import TwoD
from phalanx.strategy import Strategy

LAYOUTS: dict[str, type[Layout]] = {
    "1d": OneD,
    "megatron": Megatron,
    "2d": TwoD,
    "2.5d": TwoAndAHalfD,
    "3d": ThreeD,
}


def apply(
    model: nn.Module, layout: Layout, sites: Sequence[Site], parameters: Sequence[Placed]
) -> None:
    """Split a model over tp, in place.

    Args:
        model: a module with its first weights, or on the meta device.
        layout: on the ranks of the job.
        sites: the modules of the model that have a role.
        parameters: where their parameters lie.
    """
    shards = {row.parameter: _shard(row, layout) for row in parameters}
    for buffer in model.buffers():
        for axis in layout.sizes if not buffer.is_meta else ():
            broadcast(buffer, layout.mesh, axis)
    for module in model.modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(named):
            setattr(module, name, shards[parameter])
    for site in sites:
        _bind(site, layout)
    transformers_models.bind(model, layout, functools.partial(reads_residual, sites))


def layout_of(strategy: Strategy, mesh: DeviceMesh | None = None) -> Layout:
    """Return the layout of a strategy; without a mesh, one that only says what would be."""
    return LAYOUTS[strategy.tp.kind](strategy.grid(), mesh)


def _shard(placed: Placed, layout: Layout) -> nn.Parameter:
    """Return this rank's shard of a parameter, as a DTensor of the whole mesh."""
    mesh, full = layout.mesh, placed.parameter.detach()
    if not full.is_meta:
        for axis in layout.sizes:
            broadcast(full, mesh, axis)
    stride, known = full.stride(), placed.placements
    if placed.site.parts > 1:
        full, known = _interleaved(full, placed, layout)
    placements, known = (
        tuple(of_axis.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ())
        for of_axis in (dict(zip(layout.sizes, p, strict=True)) for p in (placed.placements, known))
    )
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    index = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    shard = DTensor.from_local(
        full[index].clone(memory_format=torch.contiguous_format),
        mesh,
        known,
        run_check=False,
        shape=full.shape,
        stride=stride,
    )
    return nn.Parameter(shard, requires_grad=placed.parameter.requires_grad)


def _interleaved(
    full: torch.Tensor, placed: Placed, layout: Layout
) -> tuple[torch.Tensor, tuple[Placement, ...]]:
    """Order the columns of fused maps so that a plain shard of them is a shard of each map.

    Returns:
        The reordered tensor, and the placements by which DTensor knows the shards of `full` itself.
    """
    known = list(placed.placements)
    for number, (axis, placement) in enumerate(zip(layout.sizes, placed.placements, strict=True)):
        if axis in layout.column.out and isinstance(placement, Shard):
            dim = placement.dim
            split = full.unflatten(dim, (placed.site.parts, layout.sizes[axis], -1))
            full = split.transpose(dim, dim + 1).flatten(dim, dim + 2)
            # Private; tests/parallel/tensor/test_transformers.py pins it.
            known[number] = _StridedShard(dim, split_factor=placed.site.parts)
    return full, tuple(known)


def _bind(site: Site, layout: Layout) -> None:
    if site.role == "branch":
        columns = [column.module for column in site.columns]
        layers.bind_branch(site.module, layout, columns, [c.parts for c in site.columns])
    elif site.role != "column":
        bind: Any = getattr(layers, f"bind_{site.role}")
        bind(site.module, layout)
