"""Apply a layout of tensor parallelism to a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm
from phalanx.comm.dry_run import CountingComm
from phalanx.errors import StrategyError
from phalanx.parallel.batch_shape import BatchShape, batch_scope
from phalanx.parallel.skeleton import Skeleton
from phalanx.parallel.tensor import layers, transformers_models
from phalanx.parallel.tensor.branch import bind_branch
from phalanx.parallel.tensor.fused import interleaved, placement_of
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.megatron import Megatron
from phalanx.parallel.tensor.one_d import OneD
from phalanx.parallel.tensor.placed import ShardedParameter
from phalanx.parallel.tensor.roles import COLUMNS, RoleBinding, reads_residual
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
    model: nn.Module,
    skeleton: Skeleton,
    layout: Layout,
    bindings: Sequence[RoleBinding],
    parameters: Sequence[ShardedParameter],
) -> None:
    """Split a model, the skeleton's own or one with the same structure, over tp in place."""
    rows = {name: row for row in parameters for name in skeleton.named(row.weight.name)}
    shards = {p: _shard(p, rows[name], layout) for name, p in model.named_parameters()}
    for buffer in model.buffers():
        if not buffer.is_meta:
            layout.comm.broadcast(buffer, "tp")
    for module in model.modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(named):
            setattr(module, name, shards[parameter])
    bound = [of for binding in bindings for of in _bindings_in(model, skeleton, binding)]
    for binding in bound:
        if binding.role == "branch":
            columns = [column.module for column in binding.columns]
            bind_branch(binding.module, layout, columns, [c.parts for c in binding.columns])
        elif binding.role not in COLUMNS:
            bind: Any = getattr(layers, f"bind_{binding.role}")
            bind(binding.module, layout)
    transformers_models.bind(model, layout, functools.partial(reads_residual, bound))
    # Run each forward of the model in its own `batch_scope`.
    whole = model.forward

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A pipeline stage may have no embedding, which otherwise records the batch shape.
        is_stage = getattr(model, "stage", None) is not None
        with batch_scope(BatchShape(*args[0].shape) if is_stage else None):
            return whole(*args, **kwargs)

    model.forward = forward


def _bindings_in(
    model: nn.Module, skeleton: Skeleton, binding: RoleBinding
) -> Iterator[RoleBinding]:
    """Yield a binding for each module of the model that the skeleton's module represents."""
    columns = [[*_bindings_in(model, skeleton, column)] for column in binding.columns]
    for number, name in enumerate(skeleton.named(binding.name)):
        yield dataclasses.replace(
            binding,
            name=name,
            module=model.get_submodule(name),
            columns=tuple(of[number] for of in columns),
        )


def layout_of(strategy: Strategy, comm: Comm | None = None) -> Layout:
    """Return the layout of a strategy; without `comm`, a planning layout that only counts."""
    return _planning_layout(strategy) if comm is None else LAYOUTS[strategy.tp.kind](comm)


@functools.cache
def _planning_layout(strategy: Strategy) -> Layout:
    return LAYOUTS[strategy.tp.kind](CountingComm(strategy.mesh_axes()))


def _shard(parameter: nn.Parameter, placed: ShardedParameter, layout: Layout) -> nn.Parameter:
    """Return this rank's shard of a parameter, as a DTensor on the mesh of the layout.

    Raises:
        StrategyError: this PyTorch version replicates weights whose fused maps differ in size.
    """
    full, spec, mesh = parameter.detach(), placed.spec, layout.comm.model_mesh
    # Every rank has the full parameter: the first one's values count, as in one process.
    if not full.is_meta:
        layout.comm.broadcast(full, "tp")
    axes, parts = mesh.mesh_dim_names or (), placed.binding.parts
    stride, placements = full.stride(), list(spec.placements(axes))
    if placed.binding.is_fused:
        # Reorder the maps so that a contiguous shard has a shard of each map, see fused.py; the
        # placements describe it as a shard of the parameter.
        for dim, names in enumerate(spec.axes):
            for axis in set(names).intersection(layout.column.axes[0]):
                full = interleaved(full, parts, dim, layout.comm.size(axis))
                placements[axes.index(axis)] = placement_of(parts, dim)
    held = (spec.shard(dim, size, layout.comm) for dim, size in enumerate(full.shape))
    shard = DTensor.from_local(
        full[tuple(slice(indices.start, indices.stop) for indices in held)].clone(
            memory_format=torch.contiguous_format
        ),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=stride,
    )
    sharded = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    if cast(DTensor, sharded.data).placements != shard.placements:  # from torch 2.14
        sizes = "+".join(map(str, parts))
        raise StrategyError(
            f"tp: '{placed.binding.name}' contains maps of sizes {sizes}, which need PyTorch 2.12 "
            f"or 2.13, and this is {torch.__version__}; use dp or fsdp"
        )
    return sharded
