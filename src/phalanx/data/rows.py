"""Batches of any structure: a tensor, or mappings, lists, tuples and dataclasses of tensors.

The first dimension of every tensor is the sample dimension; its entries are called rows. A list of
strings or numbers whose length is the number of rows has one entry per row, as default_collate
returns strings. Any other value, also a tensor without dimensions, belongs to all rows. The text
batches of `samples.py` are one such structure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from phalanx.errors import ConfigError


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Tensor],
    otherwise: Callable[[Any], Any] = lambda x: x,
    is_value: Callable[[Any], bool] | None = None,
) -> Any:
    """Apply `function` to every tensor of a batch and `otherwise` to other values.

    The result has the same structure. A list or tuple for which `is_value` returns True is passed
    to `otherwise` as one value.
    """

    def mapped(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor):
            return None if leaf is None else function(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **map_tensors(values, function, otherwise, is_value))
        if isinstance(leaf, Mapping):  # not a dict, such as BatchEncoding of transformers
            return map_tensors(dict(cast("Mapping[str, Any]", leaf)), function, otherwise, is_value)
        return otherwise(leaf)

    return tree_map(mapped, batch, is_leaf=is_value)


def map_batch(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to every tensor of a batch; the result has the same structure.

    Raises:
        ConfigError: the batch contains a value that is neither a tensor nor None.
    """

    def refuse(leaf: Any) -> Any:
        raise ConfigError(
            f"a batch holds a {type(leaf).__name__}; expected tensors, and mappings, lists, tuples "
            "or dataclasses of them, or None"
        )

    return map_tensors(batch, function, refuse)


def cast_batch(batch: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Copy a batch to a device, and cast its floating-point tensors to `dtype`."""
    return map_tensors(batch, lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype))


def take_rows(batch: Any, rows: Tensor | slice) -> Any:
    """Return the rows of a batch that an index tensor or a slice selects."""
    num_rows = count_rows(batch)
    numbers = range(num_rows)[rows] if isinstance(rows, slice) else rows.tolist()

    def has_rows(part: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
        if not isinstance(part, list | tuple) or hasattr(part, "_fields"):
            return False
        values = cast("Sequence[Any]", part)
        return len(values) == num_rows and all(isinstance(v, str | int | float) for v in values)

    def take(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]

    return map_tensors(
        batch,
        take,
        lambda part: type(part)(part[at] for at in numbers) if has_rows(part) else part,
        has_rows,
    )


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []
    map_tensors(batch, lambda tensor: (found.append(tensor), tensor)[1])
    return found


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the size of its tensors' first dimension.

    Raises:
        ConfigError: no tensor of the batch has rows, or the numbers of rows differ.
    """
    sizes = {len(tensor) for tensor in tensors_of(batch) if tensor.ndim}
    if not sizes:
        raise ConfigError(
            f"a batch is a {type(batch).__name__} without a tensor whose first dimension is the "
            "samples; expected at least one"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"the tensors of a batch have {sorted(sizes)} rows; expected the same number for all, "
            "the samples"
        )
    return sizes.pop()
