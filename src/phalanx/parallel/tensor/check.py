"""Refuse what a layout cannot split, before any process starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import Shard

from phalanx.errors import StrategyError
from phalanx.parallel.tensor.apply import layout_of, placements_of
from phalanx.parallel.tensor.layers import HEAD_COUNTS, is_transposed
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.roles import Patterns, Site, refuse_fused_rows, sites_of
from phalanx.strategy import Axis, Strategy


def check(model: nn.Module, strategy: Strategy, patterns: Patterns | None = None) -> None:
    """Refuse sizes that the layout of tp does not divide.

    Args:
        model: not split yet, on any device, meta too.
        strategy: how it is to be split.
        patterns: names of modules to roles; those known for the model if None.

    Raises:
        StrategyError: names the first that does not fit and the nearest degree with which all do;
            or see `sites_of`.
    """
    if strategy.tp.degree == 1:
        return
    sites = sites_of(model, patterns)
    refuse_fused_rows(sites, layout_of(strategy), strategy.fsdp.degree)
    problem = _problem(sites, layout_of(strategy))
    if problem is not None:
        nearest = _nearest(sites, strategy.tp)
        advice = (
            f"the nearest is {Strategy(tp=nearest)}"
            if nearest
            else "no degree of this kind fits it"
        )
        raise StrategyError(f"{Strategy(tp=strategy.tp)}: {problem}; {advice}")
    if strategy.fsdp.degree > 1:
        _check_rows(sites, strategy)


def _check_rows(sites: Sequence[Site], strategy: Strategy) -> None:
    """Refuse rows of which fsdp splits tp's uneven parts into what DTensor takes for other rows.

    Raises:
        StrategyError: names the parameter, the nearest number of rows and of fsdp's ranks.
    """
    layout, num_ranks = layout_of(strategy), strategy.fsdp.degree
    for site in sites:
        for name, placements in placements_of(site, layout).items():
            num_rows = site.module.get_parameter(name).shape[0]
            pairs = zip(layout.sizes.values(), placements, strict=True)
            sizes = [size for size, p in pairs if isinstance(p, Shard) and p.dim == 0]
            if lies_as_dtensor_says(num_rows, sizes, num_ranks):
                continue
            others = _from_nearest(num_ranks)
            fits = [n for n in others if lies_as_dtensor_says(num_rows, sizes, n)]
            multiple = math.prod(sizes)
            raise StrategyError(
                f"{Strategy(fsdp=strategy.fsdp, tp=strategy.tp)}: '{site.name}.{name}' has "
                f"{num_rows} rows, of which tp makes uneven parts, and PyTorch takes what fsdp "
                f"makes of those for other rows than they are; give it "
                f"{-(-num_rows // multiple) * multiple} rows"
                + (f", or take fsdp{fits[0]}" if fits else "")
            )


def lies_as_dtensor_says(num_rows: int, tp_sizes: Sequence[int], fsdp: int) -> bool:
    """Return whether each rank holds the rows that DTensor says it does.

    FSDP2 shards the local shard of tp; DTensor's `_StridedShard` reads the placement as if fsdp had
    sharded first. With uneven shards the two disagree about which global rows a rank holds (torch
    2.13).

    Args:
        num_rows: of the whole.
        tp_sizes: sizes of the sub-axes of tp over which the rows are split.
        fsdp: ranks of fsdp.
    """
    parts = _parts(num_rows, tp_sizes)
    held = zip(*(_cut(size, fsdp) for size in parts), strict=True)
    return parts == _cut(num_rows, len(parts)) and all(
        list(of_rank) == _parts(sum(of_rank), tp_sizes) for of_rank in held
    )


def _parts(size: int, degrees: Sequence[int]) -> list[int]:
    """Cut a size over one axis after another."""
    parts = [size]
    for degree in degrees:
        parts = [part for whole in parts for part in _cut(whole, degree)]
    return parts


def _cut(size: int, degree: int) -> list[int]:
    """Cut a size as torch.chunk does, with zeros for ranks that are left without."""
    part = -(-size // degree)
    return [min(part, max(0, size - number * part)) for number in range(degree)]


def _nearest(sites: Sequence[Site], tp: Axis) -> Axis | None:
    """Return the nearest degree that fits, the smaller of two as near; None if only 1 does."""
    for degree in _from_nearest(tp.degree):
        axis = dataclasses.replace(tp, degree=degree)
        try:
            strategy = Strategy(tp=axis)
        except StrategyError:  # its ranks cannot stand in the grid of the kind
            continue
        if _problem(sites, layout_of(strategy)) is None:
            return axis
    return None


def _from_nearest(degree: int) -> list[int]:
    """Return the degrees that may be meant instead, the nearest first, the smaller of two."""
    return sorted(range(2, 2 * degree), key=lambda other: (abs(other - degree), other))


def _problem(sites: Sequence[Site], layout: Layout) -> str | None:
    """Return what does not fit, in words."""
    for site in sites:
        for name, placements in placements_of(site, layout).items():
            shape = site.module.get_parameter(name).shape
            for dim, size in enumerate(shape):
                pairs = zip(layout.sizes.values(), placements, strict=True)
                parts = 1
                for axis_size, placement in pairs:
                    if isinstance(placement, Shard) and placement.dim == dim:
                        parts *= axis_size
                if parts > 1 and dim == (1 if is_transposed(site.module) else 0):
                    parts *= site.parts
                if size % parts and not (dim == 0 and site.role in ("embedding", "head")):
                    return (
                        f"'{site.name}.{name}' is of shape {tuple(shape)}, and {size} is not a "
                        f"multiple of {parts}"
                    )
        parts = layout.num_parts(layout.column.out)
        width = head_width(site.module)
        for column in site.columns if width > 1 else ():
            weight = column.module.get_parameter("weight")
            num_out = weight.shape[1 if is_transposed(column.module) else 0]
            num_heads = num_out // column.parts // width
            if num_heads % parts:
                return f"'{column.name}' has {num_heads} heads, which is not a multiple of {parts}"
        for name in HEAD_COUNTS if site.role == "branch" else ():
            count = getattr(site.module, name, None)
            if isinstance(count, int) and count % parts:
                return f"'{site.name}.{name}' is {count}, which is not a multiple of {parts}"
    return None


def head_width(branch: nn.Module) -> int:
    """Return the width of an attention's heads, which must stay whole; 1 for other branches."""
    for name in ("head_dim", "attention_head_size"):
        if isinstance(width := getattr(branch, name, None), int):
            return width
    return 1
