"""A branch (attention or MLP) under any layout, with one gather for all of its column maps.

Queries, keys and values (gate and up) read the same residual, which a layout gathers, or broadcasts
panel by panel. That should happen once per branch, but the module's forward is arbitrary code that
calls one linear map after another. So all column products are computed before the forward runs,
and each column map then returns its precomputed product:

    x, residual -> column_parallel_linear -> q, k, v, stored in `_ready`
    forward(placeholder) -> self.q(placeholder) -> _ready[self.q], and so on

The placeholder is one NaN, expanded with stride 0 to the rows and positions of the products and the
features of the residual shard. A column map identifies the placeholder by its address and raises an
error for any other input; if the forward reads the placeholder elsewhere, it gets NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.errors import StrategyError
from phalanx.models.layers import Linear
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
"""Attributes in which a branch stores its number of heads, or the total width of all heads."""


def bind_branch(
    module: nn.Module, layout: Layout, columns: Sequence[nn.Module], parts: Sequence[Sequence[int]]
) -> None:
    """Compute all column products of a branch before its forward, and shard its other arguments.

    `parts` gives for each column map the proportions of the maps that its weight fuses. Head counts
    stored on the module are divided by the number of shards. If a column map is fused, the module
    also gets a copy of its configuration with divided head counts. Other arguments are cut to this
    rank's rows if they are tensors of three or more dimensions whose first is as long as the batch.
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
    for each in cast("list[Any]", [*module.modules()]):
        if getattr(each, "base_layer", None) in columns:  # else PEFT copies the placeholder
            each.cast_input_dtype_enabled = False


class _Products:
    """The column products of a branch: computed together, then returned one by one."""

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
        """Multiply x by all column weights, store the products, and return the placeholder."""
        weights = {column: matrix_of(column) for column in self._parts_of}
        # Adapters in float32 beside a base in bfloat16 read x in float32, as on one process.
        # The linear maps of a decoder cast their weights instead.
        types = {c: x.dtype if isinstance(c, Linear) else w.dtype for c, w in weights.items()}
        first, *others = dict.fromkeys(types.values())
        for dtype in (first, *others):
            columns = [column for column in weights if types[column] == dtype]
            results = operators.column_parallel_linear(
                self._layout,
                x if dtype == first else x.to(dtype),
                [weights[column] for column in columns],
                shape.length,
            )
            self._ready.update(zip(columns, results, strict=True))
        sizes = (*next(iter(self._ready.values())).shape[:2], x.shape[2])
        self._placeholder = x.new_full((), torch.nan).expand(*sizes)
        return self._placeholder

    def take(self, column: nn.Module, x: Tensor) -> Tensor:
        """Return the stored product of `column`, whose forward this is; x is the placeholder."""
        known = self._placeholder
        if known is None or x.data_ptr() != known.data_ptr() or column not in self._ready:
            raise StrategyError(
                f"tp: a column map of {self._name} reads a tensor that is not the first argument "
                f"of {self._name}, or reads that argument twice; give the role branch to the "
                "module whose first argument its column maps read"
            )
        y, parts = self._ready.pop(column), self._parts_of[column]
        if len(parts) == 1 or getattr(column, "bias", None) is None:
            y = with_bias(column, y)
            return column.adapted(y, x) if isinstance(column, Linear) else y
        maps = maps_of(shard_of_parameter(column, "bias"), parts)
        held = [self._layout.features(self._layout.inner, len(bias)) for bias in maps]
        mine = [bias[rows.start : rows.stop] for bias, rows in zip(maps, held, strict=True)]
        return y + torch.cat(mine).to(y.dtype)


def _divide_heads(holder: Any, layout: Layout) -> None:
    names = {getattr(holder, "attribute_map", {}).get(name, name): None for name in HEAD_COUNTS}
    for name in names:  # each count once: `attribute_map` gives a configuration aliases
        if isinstance(count := getattr(holder, name, None), int):
            setattr(holder, name, count // layout.column.num_shards(0, layout.comm))


def _rows_of(value: Any, layout: Layout, shape: BatchShape) -> Any:
    """Cut tensors with the rows of the batch, also inside tuples, to this rank's inner rows."""
    if isinstance(value, tuple):
        values = cast(tuple[Any, ...], value)
        return tuple(_rows_of(one, layout, shape) for one in values)
    if isinstance(value, Tensor) and value.ndim > 2 and len(value) in (1, shape.num_rows):
        return layout.rows_of(value, layout.inner, shape)
    return value
