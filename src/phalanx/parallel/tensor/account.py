"""What tensor parallelism sends, said before any process starts: by its layers and replicas."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from phalanx.comm.ledger import Entry, sent_bytes
from phalanx.models.decoder import Head
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.reduce import BUCKET_BYTES, buckets
from phalanx.parallel.split import Target
from phalanx.parallel.tensor.layers import is_transposed, subtracts_mean
from phalanx.parallel.tensor.layout import Extent, Layout, Move
from phalanx.parallel.tensor.placed import Placed
from phalanx.parallel.tensor.roles import Role, Site, reads_residual
from phalanx.parallel.tensor.transformers_models import gathered_bases


def traffic(
    target: Target,
    layout: Layout,
    sites: Sequence[Site],
    parameters: Sequence[Placed],
    extents: Sequence[Extent],
) -> list[Entry]:
    """Return what the first rank of tp sends over tp in one step.

    Args:
        target: the model, and how it is to be split.
        layout: that of the strategy.
        sites: the modules with a role.
        parameters: where theirs lie.
        extents: of each microbatch of the step.
    """
    strategy, model = target.strategy, target.model
    master = next(model.parameters()).dtype
    compute = target.compute or master
    blocks = tuple(f"{name}." for name, _ in blocks_of(model))
    sums: Counter[tuple[str, str, str]] = Counter()
    calls: Counter[tuple[str, str, str]] = Counter()

    def count(phase: str, move: Move, item_bytes: int) -> None:
        if layout.sizes.get(move.axis, strategy.tp.degree) > 1 and move.elements:
            calls[phase, move.axis, move.op] += move.calls
            sums[phase, move.axis, move.op] += move.elements * item_bytes

    for extent, site in itertools.product(extents, sites):
        layout.extent = extent
        again = strategy.recompute.kind if site.name.startswith(blocks) else "none"
        for move in _product_moves(site, sites, layout):
            # fsdp gathers the weights of blocks in the data type of the arithmetic.
            is_narrow = strategy.fsdp.degree > 1 and site.name.startswith(blocks)
            item_bytes = (master if move.is_master and not is_narrow else compute).itemsize
            count(move.phase, move, item_bytes)
            if move.phase == "forward" and again not in ("none", "selective"):
                count("backward", move, item_bytes)
        for move in _statistic_moves(site, layout):
            item_bytes = torch.promote_types(compute, torch.float32).itemsize
            count(move.phase, move, item_bytes)
            if move.phase == "forward" and again != "none":
                count("backward", move, item_bytes)
    for extent in extents:
        layout.extent = extent
        for _ in gathered_bases(model, functools.partial(reads_residual, sites)):
            for move in layout.whole_moves(layout.residual, _width(sites)):
                count(move.phase, move, compute.itemsize)
    for axes, sizes in _replicas(parameters, strategy.fsdp.degree).items():
        for axis in axes:
            move = Move("reduce", axis, "all_reduce", len(buckets(sizes, BUCKET_BYTES)), sum(sizes))
            count("reduce", move, 1)
    degrees = {"tp": strategy.tp.degree, **layout.sizes}
    return [
        Entry(*key, calls[key], payload, sent_bytes(key[2], payload, degrees[key[1]]))
        for key, payload in sums.items()
    ]


def _product_moves(site: Site, sites: Sequence[Site], layout: Layout) -> list[Move]:
    """Return what the products and the look-up of a module move."""
    if site.role == "branch":
        shapes = [_matrix_shape(column.module) for column in site.columns]
        return layout.columns_moves(shapes[0][1], [num_out for num_out, _ in shapes])
    if site.role == "row":
        num_out, num_in = _matrix_shape(site.module)
        return layout.back_moves(num_in, num_out)
    if site.role == "embedding":
        return layout.enter_moves(_matrix_shape(site.module)[1])
    if site.role == "head":
        num_ids, num_in = _matrix_shape(_table(site, sites))
        moves = layout.columns_moves(num_in, [num_ids])
        is_loss = isinstance(site.module, Head)
        return moves if is_loss else moves + layout.whole_moves(layout.inner, num_ids)
    if site.role in ("token", "gather", "scatter"):
        return _whole_moves(site.role, _width(sites), layout)
    return []


def _whole_moves(role: Role, num_features: int, layout: Layout) -> list[Move]:
    """Return what brings the residual together for a module that takes it whole, or back."""
    moves = layout.whole_moves(layout.residual, num_features)
    if role == "scatter":
        return [dataclasses.replace(move, phase="backward") for move in moves]
    if role == "gather":
        return moves
    features = [move for move in moves if move.axis == layout.residual.features]
    back = [dataclasses.replace(m, phase="backward", op="reduce_scatter") for m in features]
    return features + back


def _width(sites: Sequence[Site]) -> int:
    """Return the number of features of the residual."""
    site = next(site for site in sites if site.role in ("row", "embedding"))
    return _matrix_shape(site.module)[1 if site.role == "embedding" else 0]


def _statistic_moves(site: Site, layout: Layout) -> list[Move]:
    """Return the sums over features of norms, and those of the loss."""
    if site.role == "norm" and layout.residual.features is not None:
        axis = layout.residual.features
        num_rows = layout.elements(layout.residual, layout.sizes[axis])
        count = 2 if subtracts_mean(site.module) else 1
        return [
            Move("forward", axis, "all_reduce", count, count * num_rows),
            Move("backward", axis, "all_reduce", 1, count * num_rows),
        ]
    if isinstance(site.module, Head):
        axis = layout.inner.features
        assert axis is not None
        num_rows = layout.elements(layout.inner, layout.sizes[axis])
        of_rows = [Move("forward", row, "all_reduce", 1, 1) for row in layout.inner.rows]
        return [Move("forward", axis, "all_reduce", 2, 3 * num_rows), *of_rows]
    return []


def _replicas(parameters: Sequence[Placed], num_shares: int) -> dict[tuple[str, ...], list[int]]:
    """Return the bytes of each gradient that owes a sum, by the axes over which it does.

    Args:
        parameters: where they lie.
        num_shares: degree of fsdp, which splits the rows of this rank's shard again.
    """
    sizes: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in parameters:
        if row.partial_axes and row.parameter.requires_grad:
            num_rows, *rest = row.shard_shape
            share = -(-num_rows // num_shares) * math.prod(rest)
            sizes[row.partial_axes].append(share * row.parameter.itemsize)
    return sizes


def _matrix_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear map, or (ids, features) of a table."""
    num_out, num_in = module.get_parameter("weight").shape
    return (num_in, num_out) if is_transposed(module) else (num_out, num_in)


def _table(site: Site, sites: Sequence[Site]) -> nn.Module:
    """Return the module that holds the weight of an output projection: the embedding if tied."""
    if getattr(site.module, "weight", None) is not None:
        return site.module
    return next(other.module for other in sites if other.role == "embedding")
