"""Apply a strategy to a model: the one place that knows the order in which the axes are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Private module of a function that PyTorch documents; tests/parallel/test_sharded.py pins it.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.comm.join import device_of
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.parallel import data, recompute, sharded
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.groups import groups_of
from phalanx.parallel.holding import Holding
from phalanx.parallel.reduce import GradientReducer, ReplicaReducer, is_fused
from phalanx.parallel.tensor import account
from phalanx.parallel.tensor.apply import apply as apply_tensor
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.check import check as check_tensor
from phalanx.parallel.tensor.layout import Extent
from phalanx.parallel.tensor.roles import Patterns
from phalanx.strategy import Strategy, require_built

FirstWeights = Callable[[Tensor, str, tuple[int, ...], tuple[int, ...]], object]
"""Fills a part of a parameter: (part, name, shape of the whole, where the part begins in it)."""


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    first_weights: FirstWeights | None = None,
    roles: Patterns | None = None,
) -> GradientReducer | None:
    """Split `model`, in place, as `strategy` says.

    Args:
        model: a module with its first weights, on this rank's device; or on the meta device, with
            `first_weights`: then each rank makes its own parts alone, and never holds the whole.
        strategy: how to split.
        mesh: the mesh that `build_mesh(strategy)` made.
        compute: data type of the arithmetic; that of the parameters if None.
        first_weights: what fills the parameters of a model on the meta device.
        roles: patterns of module names to roles for tp, see `parallel.tensor.roles`; they come
            before those that are known for the model.

    Returns:
        What reduces the gradients, or None where there is nothing to reduce.

    Raises:
        StrategyError: a part of the strategy is not built yet, or the model does not allow it.
    """
    check(model, strategy, roles)
    if strategy.tp.degree > 1:
        apply_tensor(model, mesh, strategy, roles)
    recompute.apply(model, strategy.recompute)  # what runs again is what tp has made of a block
    reducer = None
    if strategy.fsdp.degree > 1:
        kind = cast(sharded.Kind, strategy.fsdp.kind)
        reducer = sharded.apply(model, mesh, kind, compute=compute)
    if first_weights is not None:
        model.to_empty(device=device_of(mesh))
        _fill(model, first_weights)
    if strategy.fsdp.degree == 1 and strategy.dp.degree > 1:
        reducer = data.apply(model, mesh, cast(data.Kind, strategy.dp.kind))
    if strategy.tp.degree > 1:
        return ReplicaReducer(model.parameters(), mesh, reducer)
    return reducer


def check(model: nn.Module, strategy: Strategy, roles: Patterns | None = None) -> None:
    """Refuse what `parallelize` would refuse of a model, before any process starts.

    Args:
        model: not split yet, on any device, meta too.
        strategy: how it is to be split.
        roles: see `parallelize`.

    Raises:
        StrategyError: a part of the strategy is not built yet, or the model does not allow it.
    """
    require_built(strategy)
    check_tensor(model, strategy, roles)
    if strategy.fsdp.degree > 1:
        groups_of(model)
        if strategy.tp.degree > 1:
            sharded.mesh_dims()
    recompute.check(model, strategy.recompute)


def row_parts(strategy: Strategy) -> int:
    """Return in how many parts tp splits the rows of a microbatch; others are padded."""
    if strategy.tp.degree == 1:
        return 1
    layout = layout_of(strategy)
    return layout.num_parts(layout.residual.rows)


def layout(
    model: nn.Module,
    strategy: Strategy,
    *,
    compute: torch.dtype | None = None,
    accumulation: int = 1,
    roles: Patterns | None = None,
) -> Holding:
    """Return what the first rank holds of the trained state of a model that is not split yet.

    Args:
        model: any module, on any device, meta too.
        strategy: how it is to be split.
        compute: data type of the arithmetic; that of the parameters if None.
        accumulation: microbatches a step.
        roles: see `parallelize`.
    """
    if strategy.tp.degree > 1:
        model = account.part_of_first(model, strategy, roles)
    if strategy.fsdp.degree > 1:
        kind = cast(sharded.Kind, strategy.fsdp.kind)
        groups = groups_of(model, compute)
        num_blocks = max(1, len(blocks_of(model)))
        return sharded.layout(
            groups,
            strategy.fsdp.degree,
            kind,
            accumulation=accumulation,
            segment_size=strategy.recompute.segment_size(num_blocks) or 1,
        )
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return data.layout(_trained_sizes(model), frozen)


def traffic(
    model: nn.Module,
    strategy: Strategy,
    microbatches: Sequence[tuple[int, int]],
    *,
    compute: torch.dtype | None = None,
    roles: Patterns | None = None,
) -> list[Entry]:
    """Return what the first rank sends in one step.

    Args:
        model: not split yet, on any device, meta too.
        strategy: how it is to be split.
        microbatches: rows and places of each of this rank's microbatches.
        compute: data type of the arithmetic; that of the parameters if None.
        roles: see `parallelize`.
    """
    entries: list[Entry] = []
    if strategy.tp.degree > 1:
        extents = [Extent(*microbatch) for microbatch in microbatches]
        entries = account.traffic(model, strategy, extents, compute=compute, patterns=roles)
        model = account.part_of_first(model, strategy, roles)
    if strategy.fsdp.degree > 1:
        return entries + sharded.traffic(
            groups_of(model, compute),
            strategy.fsdp.degree,
            cast(sharded.Kind, strategy.fsdp.kind),
            num_copies=strategy.dp.degree,
            accumulation=len(microbatches),
        )
    kind = cast(data.Kind, strategy.dp.kind)
    return entries + data.traffic(_trained_sizes(model), strategy.dp.degree, kind)


def _trained_sizes(model: nn.Module) -> list[int]:
    return [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]


def part_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a parameter, without gradient, and where it begins in the whole.

    A part may be empty: rows that are fewer than ranks leave some ranks without.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(offset)


def _fill(model: nn.Module, first_weights: FirstWeights) -> None:
    for name, parameter in model.named_parameters():
        if is_fused(parameter):
            raise StrategyError(
                f"tp: '{name}' holds several maps, each split by itself, so that a rank's part has "
                "no one place in the whole; give the model with its first weights, not on the meta "
                "device"
            )
        part, offset = part_of(parameter)
        if part.numel():
            first_weights(part, name, tuple(parameter.shape), offset)
