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
from phalanx.errors import StrategyError
from phalanx.parallel.tensor import layers, transformers_models
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.megatron import Megatron
from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.roles import (
    OF_ALL,
    Patterns,
    Site,
    reads_residual,
    refuse_fused_rows,
    sites_of,
)
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
    model: nn.Module, mesh: DeviceMesh, strategy: Strategy, patterns: Patterns | None = None
) -> Layout:
    """Split a model over tp, in place.

    Args:
        model: a module with its first weights, or on the meta device.
        mesh: the mesh of the strategy.
        strategy: its tp is above 1.
        patterns: names of modules to roles; those known for the model if None.

    Raises:
        StrategyError: see `sites_of`. Sizes are for `check` to refuse, before.
    """
    sites = sites_of(model, patterns)
    layout = layout_of(strategy, mesh)
    refuse_fused_rows(sites, layout, strategy.fsdp.degree)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    lie: dict[nn.Parameter, tuple[Placement, ...]] = {}
    for site in sites:
        for name, placements in placements_of(site, layout).items():
            parameter = site.module.get_parameter(name)
            if lie.setdefault(parameter, placements) != placements:
                raise StrategyError(
                    f"tp: '{site.name}.{name}' is one parameter with another that is split "
                    "otherwise; give their modules roles that agree, as embedding and head do"
                )
            if parameter not in parts:
                parts[parameter] = _part(parameter, layout, placements, site.parts)
    for buffer in model.buffers():
        for axis in layout.sizes if not buffer.is_meta else ():
            broadcast(buffer, mesh, axis)
    for module in model.modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(named):
            setattr(module, name, parts[parameter])
    for site in sites:
        _bind(site, layout)
    transformers_models.bind(model, layout, functools.partial(reads_residual, sites))
    return layout


def layout_of(strategy: Strategy, mesh: DeviceMesh | None = None) -> Layout:
    """Return the layout of a strategy; without a mesh, one that only says what would be."""
    return LAYOUTS[strategy.tp.kind](strategy.grid(), mesh)


def part_shape(
    shape: Sequence[int], layout: Layout, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the shape of this rank's part of a parameter."""
    part = list(shape)
    for axis, placement in zip(layout.sizes, placements, strict=True):
        if isinstance(placement, Shard):
            size = -(-part[placement.dim] // layout.sizes[axis])
            first = min(part[placement.dim], layout.coords[axis] * size)
            part[placement.dim] = min(size, part[placement.dim] - first)
    return tuple(part)


def placements_of(site: Site, layout: Layout) -> dict[str, tuple[Placement, ...]]:
    """Return how each parameter of a module of a role lies over the sub-axes of tp."""
    if site.role in ("embedding", "head", "column"):
        # fsdp splits the rows of each part again, which no DTensor can say of a fused vector.
        axis = layout.inner.features if site.parts == 1 else None
        matrix, vector = layout.placements(layout.column), axis
    elif site.role == "row":
        matrix, vector = layout.placements(layout.row), layout.residual.features
    elif site.role == "table":
        matrix, vector = layout.along(_axes(layout.residual.features), 1), None
    elif site.role == "norm":
        matrix, vector = layout.along(()), layout.residual.features
    else:
        matrix, vector = layout.along(()), None
    if layers.is_transposed(site.module):
        matrix = layout.transposed(matrix)
    return {
        name: matrix if parameter.ndim == 2 else layout.along(_axes(vector))
        for name, parameter in site.module.named_parameters(recurse=site.role in OF_ALL)
    }


def _axes(axis: str | None) -> tuple[str, ...]:
    return () if axis is None else (axis,)


def _part(
    parameter: nn.Parameter, layout: Layout, placements: tuple[Placement, ...], num_fused: int
) -> nn.Parameter:
    """Return this rank's part of a parameter, as a DTensor of the whole mesh."""
    mesh, whole = layout.mesh, parameter.detach()
    if not whole.is_meta:
        for axis in layout.sizes:
            broadcast(whole, layout.mesh, axis)
    stride, lie = whole.stride(), placements
    if num_fused > 1:
        whole, lie = _interleaved(whole, layout, placements, num_fused)
    placements, lie = (
        tuple(of_axis.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ())
        for of_axis in (dict(zip(layout.sizes, p, strict=True)) for p in (placements, lie))
    )
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    index = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    part = DTensor.from_local(
        whole[index].clone(memory_format=torch.contiguous_format),
        mesh,
        lie,
        run_check=False,
        shape=whole.shape,
        stride=stride,
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _interleaved(
    whole: torch.Tensor, layout: Layout, placements: tuple[Placement, ...], num_fused: int
) -> tuple[torch.Tensor, tuple[Placement, ...]]:
    """Order the columns of fused maps so that a plain part of them is a part of each map.

    Returns:
        The reordered tensor, and the placements by which DTensor knows the parts of `whole` itself.
    """
    lie = list(placements)
    for number, axis in enumerate(layout.sizes):
        placement = placements[number]
        if axis in layout.column.out and isinstance(placement, Shard):
            dim, size = placement.dim, layout.sizes[axis]
            split = whole.unflatten(dim, (num_fused, size, -1))
            whole = split.transpose(dim, dim + 1).flatten(dim, dim + 2)
            # Private; tests/parallel/tensor/test_transformers.py pins it.
            lie[number] = _StridedShard(dim, split_factor=num_fused)
    return whole, tuple(lie)


def _bind(site: Site, layout: Layout) -> None:
    if site.role == "branch":
        columns = [column.module for column in site.columns]
        layers.bind_branch(site.module, layout, columns, [c.parts for c in site.columns])
    elif site.role != "column":
        bind: Any = getattr(layers, f"bind_{site.role}")
        bind(site.module, layout)
