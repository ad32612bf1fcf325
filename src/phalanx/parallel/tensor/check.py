"""Checks, before any process starts, that a layout can split the parameters of a model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import nn

from phalanx.errors import StrategyError
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.branch import HEAD_COUNTS
from phalanx.parallel.tensor.layers import is_transposed
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.placed import ShardedParameter
from phalanx.parallel.tensor.roles import RoleBinding
from phalanx.strategy import Axis, Strategy


def check(
    bindings: Sequence[RoleBinding],
    parameters: Sequence[ShardedParameter],
    layout: Layout,
    strategy: Strategy,
) -> None:
    """Raise a StrategyError for sizes that the layout of tp, or fsdp after it, cannot split."""
    adapter = next((b.name for b in bindings if b.role == "lora_a"), None)
    if adapter is not None and layout.residual.features is not None:
        raise StrategyError(
            f"{Strategy(tp=strategy.tp)}: '{adapter}' is a low-rank map, which "
            f"{strategy.tp.kind} cannot split; use tp{strategy.tp.degree}"
        )
    for experts in (binding for binding in bindings if binding.role == "experts"):
        name, tp = experts.name, Strategy(tp=strategy.tp)
        if strategy.tp.kind not in ("1d", "megatron"):
            raise StrategyError(
                f"{tp}: '{name}' is a branch with experts, which {strategy.tp.kind} cannot split; "
                f"the nearest is tp{strategy.tp.degree}"
            )
        for other, parameter in experts.module.named_parameters():
            if parameter.ndim == 1 or ".lora_" in other:
                raise StrategyError(
                    f"{tp}: '{name}.{other}' is a bias or an adapter in a branch with experts, "
                    "which tp does not split; use dp or ep"
                )
    problem = next(_problems(bindings, parameters, layout), None)
    if problem is not None:
        nearest = _nearest(bindings, parameters, strategy.tp)
        advice = "no degree of this kind fits it"
        if nearest is not None:
            advice = f"the nearest is {Strategy(tp=nearest)}"
        raise StrategyError(f"{Strategy(tp=strategy.tp)}: {problem}; {advice}")
    num_ranks = strategy.fsdp.degree
    # PyTorch has no placement for the rows of fused maps that are split twice. If tp's shards are
    # uneven, DTensor assigns wrong global rows to fsdp's shards.
    for row in parameters if num_ranks > 1 else ():
        if row.weight.ndim == 0:
            continue  # fsdp itself rejects 0-d parameters
        num_rows, sizes = row.weight.shape[0], tuple(row.degrees(0))
        num_maps = len(row.binding.parts)
        if num_maps > 1 and sizes:
            raise StrategyError(
                f"{Strategy(fsdp=strategy.fsdp)}: '{row.weight.name}' contains {num_maps} maps, "
                f"and tp splits its rows, which fsdp cannot split again; use dp{num_ranks}, or "
                f"make the maps {num_maps} modules"
            )
        if dtensor_shards_agree(num_rows, sizes, strategy.num_shards):
            continue
        others = _from_nearest(num_ranks)
        beside = strategy.num_shards // num_ranks
        fits = [n for n in others if dtensor_shards_agree(num_rows, sizes, n * beside)]
        multiple = math.prod(sizes)
        raise StrategyError(
            f"{Strategy(fsdp=strategy.fsdp, tp=strategy.tp)}: '{row.weight.name}' has {num_rows} "
            "rows, which tp splits unevenly, and PyTorch assigns wrong rows to fsdp's shards "
            f"of uneven parts; give it {-(-num_rows // multiple) * multiple} rows"
            + (f", or use fsdp{fits[0]}" if fits else "")
        )


@functools.lru_cache(maxsize=1 << 12)
def dtensor_shards_agree(num_rows: int, tp_sizes: tuple[int, ...], fsdp: int) -> bool:
    """Return whether each rank holds the global rows that its DTensor placement implies.

    FSDP2 shards the local shard of tp, but DTensor's `_StridedShard` interprets the placement as if
    fsdp had sharded first. With uneven shards the two disagree about which global rows a rank holds
    (torch 2.13).
    """
    if num_rows % (math.prod(tp_sizes) * fsdp) == 0:
        return True
    parts = _parts(num_rows, tp_sizes)
    held = zip(*(_chunk_sizes(size, fsdp) for size in parts), strict=True)
    return parts == _chunk_sizes(num_rows, len(parts)) and all(
        list(of_rank) == _parts(sum(of_rank), tp_sizes) for of_rank in held
    )


def _parts(size: int, degrees: Sequence[int]) -> list[int]:
    """Return the sizes of all shards after cutting `size` over one axis after another."""
    parts = [size]
    for degree in degrees:
        parts = [part for whole in parts for part in _chunk_sizes(whole, degree)]
    return parts


def _chunk_sizes(size: int, degree: int) -> list[int]:
    """Return the shard sizes of torch.chunk, with 0 for each rank that gets no shard."""
    part = -(-size // degree)
    return [min(part, max(0, size - number * part)) for number in range(degree)]


def _nearest(
    bindings: Sequence[RoleBinding], parameters: Sequence[ShardedParameter], tp: Axis
) -> Axis | None:
    """Return the axis with the nearest degree that fits (the smaller if tied), or None.

    Degree 1 is not considered.
    """
    for degree in _from_nearest(tp.degree):
        axis = dataclasses.replace(tp, degree=degree)
        try:
            strategy = Strategy(tp=axis)
        except StrategyError:  # `degree` ranks cannot form the grid of this kind
            continue
        layout = layout_of(strategy)
        under = [dataclasses.replace(row, layout=layout) for row in parameters]
        if not any(_problems(bindings, under, layout)):
            return axis
    return None


def _from_nearest(degree: int) -> list[int]:
    """Return alternatives to `degree` from 2 up, nearest first, the smaller first if tied."""
    return sorted(range(2, 2 * degree), key=lambda other: (abs(other - degree), other))


def _problems(
    bindings: Sequence[RoleBinding], parameters: Sequence[ShardedParameter], layout: Layout
) -> Iterator[str]:
    """Yield a message for each size that the layout does not divide; vocabularies always fit."""
    rows_of: dict[str, list[ShardedParameter]] = defaultdict(list)
    for row in parameters:
        rows_of[row.binding.name].append(row)
    num_shards = layout.column.num_shards(0, layout.comm)
    for binding in bindings:
        for row in rows_of[binding.name]:
            shape = row.weight.shape
            for dim, size in enumerate(shape):
                multiple = math.prod(row.degrees(dim))
                if multiple > 1 and dim == (1 if is_transposed(binding.module) else 0):
                    multiple *= sum(binding.parts)
                if size % multiple and not (dim == 0 and binding.role in ("embedding", "head")):
                    yield (
                        f"'{row.weight.name}' is of shape {shape}, and {size} is not a multiple of "
                        f"{multiple}"
                    )
        width = head_width(binding.module)
        columns = (each for each in binding.columns if each.role == "column")
        for column in columns if width > 1 else ():
            weight = column.module.get_parameter("weight")
            num_out = weight.shape[1 if is_transposed(column.module) else 0]
            for part in column.parts:
                num_heads = num_out * part // sum(column.parts) // width
                if num_heads % num_shards:
                    yield (
                        f"'{column.name}' has {num_heads} heads, which is not a multiple of "
                        f"{num_shards}"
                    )
        for name in HEAD_COUNTS if binding.role == "branch" else ():
            count = getattr(binding.module, name, None)
            if isinstance(count, int) and count % num_shards:
                yield f"'{binding.name}.{name}' is {count}, which is not a multiple of {num_shards}"


def head_width(branch: nn.Module) -> int:
    """Return the width of one attention head, which must not be split; 1 for other branches."""
    for name in ("head_dim", "attention_head_size"):
        if isinstance(width := getattr(branch, name, None), int):
            return width
    return 1
