"""A branch under any layout: attention or an MLP, whose column maps read the residual once.

Queries, keys and values (gate and up) read the same residual, which a layout gathers, or broadcasts
panel by panel. It should do so once, but the module's forward, which is anybody's code, asks for
one product after another. So all are computed first, and the forward then finds them made:

    x, residual -> column_parallel_linear -> q, k, v, kept in `ready`
    forward(placeholder) -> self.q(placeholder) -> ready[self.q], and so on

The placeholder is one NaN without storage, expanded to the shape of the products. A column layer
knows it by its address, and refuses anything else; any other read of it yields NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.errors import StrategyError
from phalanx.parallel.batch_shape import BatchShape, batch_shape
from phalanx.parallel.tensor import operators
from phalanx.parallel.tensor.fused import maps_of
from phalanx.parallel.tensor.layers import (
    matrix_of,
    replace_forward,
    shard_of_parameter,
    with_bias,
)
from phalanx.parallel.tensor.layout import Layout

HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head",
    "n_heads",
    "n_kv_heads",
    "all_head_size",
    "split_size",
)
"""Attributes by which a branch knows how many heads there are, or how wide all of them are."""


def bind_branch(
    module: nn.Module, layout: Layout, columns: Sequence[nn.Module], parts: Sequence[Sequence[int]]
) -> None:
    """Multiply by all column weights of a branch before it runs, and cut its other arguments.

    A column map holds maps one after another, in the proportions that `parts` says.
    Head counts stored on the module are divided by the shards; where it cuts fused maps apart,
    the head counts of its configuration too, of which it gets a copy. Of its other arguments,
    tensors of three dimensions and more whose first is as long as the batch are cut to this rank's
    rows.
    """
    _divide_heads(module, layout)
    if hasattr(module, "config") and any(len(each) > 1 for each in parts):
        module.config = copy.copy(module.config)
        _divide_heads(module.config, layout)
    own, products = module.forward, _Products(module, layout, columns, parts)

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x, *rest = [*args, *kwargs.values()]
        shape = batch_shape()
        placeholder = products.make(x, shape)
        values = [placeholder, *(_rows_of(value, layout, shape) for value in rest)]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        return own(*values[: len(args)], **named)

    replace_forward(module, forward)
    for column in columns:
        replace_forward(column, products.take)


class _Products:
    """The column products of a branch, made at once and taken one by one."""

    def __init__(
        self,
        branch: nn.Module,
        layout: Layout,
        columns: Sequence[nn.Module],
        parts: Sequence[Sequence[int]],
    ) -> None:
        self._name, self._layout = type(branch).__name__, layout
        self._parts_of = dict(zip(columns, parts, strict=True))
        self._ready: dict[nn.Module, Tensor] = {}
        self._placeholder: Tensor | None = None

    def make(self, x: Tensor, shape: BatchShape) -> Tensor:
        """Multiply x by all column weights, and return the placeholder of x."""
        weights = [matrix_of(column) for column in self._parts_of]
        results = operators.column_parallel_linear(self._layout, x, weights, shape.length)
        self._ready.update(zip(self._parts_of, results, strict=True))
        sizes = (*results[0].shape[:2], x.shape[2])
        self._placeholder = x.new_full((), torch.nan).expand(*sizes)
        return self._placeholder

    def take(self, column: nn.Module, x: Tensor) -> Tensor:
        """Return the product of a column map, whose forward is given the placeholder."""
        known = self._placeholder
        if known is None or x.data_ptr() != known.data_ptr() or column not in self._ready:
            raise StrategyError(
                f"tp: a column map of {self._name} reads something else than what that is given "
                "first, or reads it twice; give the role branch to the module whose first argument "
                "its column maps read"
            )
        y, parts = self._ready.pop(column), self._parts_of[column]
        if len(parts) == 1 or getattr(column, "bias", None) is None:
            return with_bias(column, y)
        maps = maps_of(shard_of_parameter(column, "bias"), parts)
        held = [self._layout.features(self._layout.inner, len(bias)) for bias in maps]
        mine = [bias[rows.start : rows.stop] for bias, rows in zip(maps, held, strict=True)]
        return y + torch.cat(mine).to(y.dtype)


def _divide_heads(holder: Any, layout: Layout) -> None:
    names = {getattr(holder, "attribute_map", {}).get(name, name): None for name in HEAD_COUNTS}
    for name in names:  # each once: a configuration may have two names for one count
        if isinstance(count := getattr(holder, name, None), int):
            setattr(holder, name, count // layout.column.num_shards(0, layout.comm))


def _rows_of(value: Any, layout: Layout, shape: BatchShape) -> Any:
    """Cut tensors of all rows, and tuples of such, to the rows of the inner layout."""
    if isinstance(value, tuple):
        values = cast(tuple[Any, ...], value)
        return tuple(_rows_of(one, layout, shape) for one in values)
    if isinstance(value, Tensor) and value.ndim > 2 and len(value) in (1, shape.num_rows):
        return layout.rows_of(value, layout.inner, shape)
    return value
