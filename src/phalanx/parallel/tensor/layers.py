"""The layers over any layout: what a module does instead of its own forward, by its role.

Modules stay, and so do the names of their parameters, which become DTensors. The roles are

    embedding  a table of the vocabulary           ids[B, T] whole -> residual
    table      a small table, as of positions      ids[B, T] whole -> residual
    branch     attention or MLP: reads the residual once for all of its column products
    column     a linear map inside a branch        residual -> inner
    row        the linear map that ends a branch   inner -> residual
    norm       over the features of the residual
    local      acts on each head or element alone, with parameters held whole
    dropout    over the residual, keyed by position
    head       the output projection               residual -> logits, or their loss
    token      acts on each token by itself        residual -> residual
    gather     acts on the whole, as a pooler      residual -> whole
    whole      acts on what is whole already       whole -> whole
    scatter    makes the residual of what is no id whole[B, T, ...] -> residual

token, gather, whole and scatter replicate their parameters. Under the last three every rank
computes the same value, so only the first rank contributes a gradient and the others contribute
zeros; the usual sum over ranks stays right. The same holds of norm, token, table and the bias of
row in a layout whose residual is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.comm.primitives import all_gather, local_part, reduce_scatter
from phalanx.errors import StrategyError
from phalanx.models.decoder import Head
from phalanx.models.loss import IGNORE
from phalanx.models.random import dropout
from phalanx.parallel.tensor import products
from phalanx.parallel.tensor.layout import Extent, Layout
from phalanx.parallel.tensor.loss import check_range, token_loss_sum
from phalanx.parallel.tensor.norm import split_norm
from phalanx.parallel.tensor.products import first_order

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

NORMS = (
    *("Norm", "LayerNorm", "RMSNorm"),
    *("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"),
)
"""Classes whose formula is that of norm.py."""


def bind_embedding(module: nn.Module, layout: Layout) -> None:
    """Look up the ids of this rank's part of the vocabulary; the layout sums over the parts."""

    def forward(self: nn.Module, ids_BT: Tensor) -> Tensor:
        layout.extent = Extent(*ids_BT.shape)
        check_range(ids_BT, cast(Tensor, self.weight).shape[0], "an id")
        first, _ = layout.feature_range(layout.inner, cast(Tensor, self.weight).shape[0])
        ids = layout.rows_of(ids_BT, layout.entry)
        padding = _padding(self)
        padding = None if padding is None else padding - first
        rows = _LookUp.apply(ids - first, _part(self, "weight"), padding)
        return products.enter(layout, cast(Tensor, rows))

    _replace(module, forward)


def bind_table(module: nn.Module, layout: Layout) -> None:
    """Look up this rank's rows and places; the table is split by features alone."""

    def forward(self: nn.Module, ids_BT: Tensor) -> Tensor:
        ids = layout.places_of(layout.rows_of(ids_BT, layout.residual), layout.residual, 1)
        weight = _given(_part(self, "weight"), layout)
        return F.embedding(ids, weight, _padding(self))

    _replace(module, forward)


def bind_branch(
    module: nn.Module, layout: Layout, columns: Sequence[nn.Module], parts: Sequence[int]
) -> None:
    """Multiply by all column weights of a branch before it runs, and cut its other arguments.

    All column products share one gather of the residual, so they are computed together, first. The
    module's forward then receives a NaN placeholder without storage, of the shape that its column
    products have; its column layers return the results computed before, and any other read of it
    yields NaN. A column layer that is given anything else is an error. Head counts stored on the
    module are divided by the parts. Of its other arguments, tensors of three dimensions and more
    whose first is as long as the batch are cut to this rank's rows.

    Args:
        module: takes the residual first.
        layout: how to split.
        columns: its column maps.
        parts: the maps that each of them holds, one after another.
    """
    for name in HEAD_COUNTS:
        if isinstance(count := getattr(module, name, None), int):
            setattr(module, name, count // layout.num_parts(layout.column.out))
    own = module.forward
    num_parts = dict(zip(columns, parts, strict=True))
    ready: dict[nn.Module, Tensor] = {}
    shell: Tensor | None = None

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal shell
        x, *rest = [*args, *kwargs.values()]
        results = products.columns(layout, x, [_matrix(column) for column in columns])
        ready.update(zip(columns, results, strict=True))
        shell = x.new_full((), torch.nan).expand(*results[0].shape[:2], x.shape[2])
        values = [shell, *(_rows_of(value, layout) for value in rest)]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        return own(*values[: len(args)], **named)

    def product(self: nn.Module, x: Tensor) -> Tensor:
        if shell is None or x.data_ptr() != shell.data_ptr() or self not in ready:
            raise StrategyError(
                f"tp: a column map of {type(module).__name__} reads something else than what that "
                "is given first, or reads it twice; give the role branch to the module whose first "
                "argument its column maps read"
            )
        y = ready.pop(self)
        if num_parts[self] == 1 or getattr(self, "bias", None) is None:
            return _with_bias(self, y)
        bias = _part(self, "bias").unflatten(0, (num_parts[self], -1))
        first, size = layout.feature_range(layout.inner, bias.shape[1])
        return y + bias[:, first : first + size].flatten().to(y.dtype)

    _replace(module, forward)
    for column in columns:
        _replace(column, product)


def bind_row(module: nn.Module, layout: Layout) -> None:
    """Multiply, back to the residual."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = products.back(layout, x, _matrix(self))
        if getattr(self, "bias", None) is None:
            return y
        return y + _given(_part(self, "bias"), layout).to(y.dtype)

    _replace(module, forward)


def bind_norm(module: nn.Module, layout: Layout) -> None:
    """Normalise over features of all ranks that share them; the module's own where none does."""
    if layout.residual.features is None:
        _bind_to_residual(module, layout)
        return
    if type(module).__name__ not in NORMS:
        raise StrategyError(
            f"tp: features are split, and what {type(module).__name__} computes over them is not "
            f"known; known norms are {', '.join(NORMS)}; the nearest is tp:1d"
        )
    is_centred = subtracts_mean(module)
    named = [getattr(module, name, None) for name in ("eps", "variance_epsilon")]
    given = next((float(value) for value in named if value is not None), None)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        num_features = cast(Tensor, self.weight).shape[0]
        bias = None if getattr(self, "bias", None) is None else _part(self, "bias")
        weight = _part(self, "weight")
        eps = torch.finfo(x.dtype).eps if given is None else given  # as torch's RMSNorm has it
        return split_norm(x, weight, bias, eps, num_features, is_centred, layout)

    _replace(module, forward)


def bind_local(module: nn.Module, layout: Layout) -> None:
    """Run the module's own forward with this rank's parts of its parameters."""
    del layout
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _parts_in_place(self):
            return own(*args, **kwargs)

    _replace(module, forward)


def _bind_to_residual(module: nn.Module, layout: Layout) -> None:
    """Run the module's own forward on the residual, of which a rank has all features."""
    bind = bind_whole if layout.is_residual_whole else bind_local
    bind(module, layout)


def bind_dropout(module: nn.Module, layout: Layout) -> None:
    """Draw this rank's part of the mask that one process would draw."""

    def forward(self: nn.Module, x: Tensor, keys_B: Tensor | None, salt: int) -> Tensor:
        if keys_B is None:
            return x
        first, size = layout.place_range(layout.residual)
        places_T = torch.arange(first, first + size, device=x.device)
        keys = layout.rows_of(keys_B, layout.residual)
        axis = layout.residual.features
        feature = 0 if axis is None else layout.coords[axis] * x.shape[2]
        return dropout(x, cast(float, self.p), keys, salt, places_T, feature)

    _replace(module, forward)


def bind_head(module: nn.Module, layout: Layout) -> None:
    """Multiply by the vocabulary; return the loss of labels, or logits gathered whole."""

    def logits_of(self: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        return _with_bias(self, products.columns(layout, x, [local_part(weight)])[0])

    def loss_or_logits(
        self: Head, x: Tensor, labels_BT: Tensor | None = None, tied: Tensor | None = None
    ) -> Tensor:
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        logits = logits_of(self, x, weight)
        if labels_BT is None:
            return layout.whole(logits, layout.inner, weight.shape[0])
        labels = layout.labels_of(labels_BT, IGNORE).flatten()
        return token_loss_sum(logits.flatten(0, 1), labels, weight.shape[0], layout)

    def logits(self: nn.Module, x: Tensor) -> Tensor:
        weight = cast(Tensor, self.weight)
        return layout.whole(logits_of(self, x, weight), layout.inner, weight.shape[0])

    _replace(module, loss_or_logits if isinstance(module, Head) else logits)


def bind_token(module: nn.Module, layout: Layout) -> None:
    """Run the module on all features of this rank's tokens, and keep this rank's features."""
    axis = layout.residual.features
    if axis is None:
        _bind_to_residual(module, layout)
        return
    own = module.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _parts_in_place(self):
            y = own(_Features.apply(x, layout, axis))
        first, size = layout.feature_range(layout.residual, y.shape[2])
        return y[..., first : first + size]

    _replace(module, forward)


def bind_gather(module: nn.Module, layout: Layout) -> None:
    """Gather the residual and run the module on the whole, the same on every rank."""
    own = module.forward

    def forward(self: nn.Module, x: Tensor) -> Any:
        axis = layout.residual.features
        num_features = x.shape[2] * (1 if axis is None else layout.sizes[axis])
        whole = layout.whole(x, layout.residual, num_features)
        with _parts_in_place(self, layout.is_first):
            return own(whole)

    _replace(module, forward)


def bind_whole(module: nn.Module, layout: Layout) -> None:
    """Run the module on the whole, the same on every rank."""
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _parts_in_place(self, layout.is_first):
            return own(*args, **kwargs)

    _replace(module, forward)


def bind_scatter(module: nn.Module, layout: Layout) -> None:
    """Run the module on the whole, and keep this rank's part of what it returns, [B, T, D]."""
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with _parts_in_place(self, layout.is_first):
            whole = own(*args, **kwargs)
        layout.extent = Extent(*whole.shape[:2])
        return layout.cut(whole, layout.residual)

    _replace(module, forward)


class _Features(Function):
    """Gather features; backward sums what the ranks have, each of its own features' use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: str) -> Tensor:
        ctx.layout, ctx.axis = layout, axis
        return all_gather(x, layout.mesh, axis, 2)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(grad_outputs[0], ctx.layout.mesh, ctx.axis, 2), None, None


class _NoGradient(Function):
    """The same tensor, whose gradient is zeros."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return torch.zeros_like(grad_outputs[0])


class _LookUp(Function):
    """Rows of a table, zeros where the id is not of this part."""

    @staticmethod
    def forward(ctx: Any, ids_BT: Tensor, weight_VD: Tensor, padding: int | None) -> Tensor:
        is_mine_BT = (ids_BT >= 0) & (ids_BT < len(weight_VD))
        has_grad_BT = is_mine_BT if padding is None else is_mine_BT & (ids_BT != padding)
        places_BT = ids_BT.where(is_mine_BT, 0)
        ctx.save_for_backward(places_BT, has_grad_BT)
        ctx.shape = weight_VD.shape
        if not len(weight_VD):  # a vocabulary of fewer ids than ranks
            return weight_VD.new_zeros(*ids_BT.shape, weight_VD.shape[1])
        return F.embedding(places_BT, weight_VD).masked_fill_(~is_mine_BT[..., None], 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        places_BT, has_grad_BT = ctx.saved_tensors
        grad_BTD = grad_outputs[0].masked_fill(~has_grad_BT[..., None], 0)
        d_weight_VD = grad_BTD.new_zeros(ctx.shape)
        if len(d_weight_VD):
            d_weight_VD.index_add_(0, places_BT.flatten(), grad_BTD.flatten(0, 1))
        return None, d_weight_VD, None


@contextmanager
def _parts_in_place(module: nn.Module, gives_gradient: bool = True) -> Generator[None]:
    """Let a module see this rank's parts instead of its parameters.

    Args:
        module: with all that is in it.
        gives_gradient: or else zeros for it, as another rank computes the same.
    """
    # Private, as a module's attribute of a parameter's name takes nothing but a parameter.
    homes: list[dict[str, Any]] = [
        inner._parameters  # pyright: ignore[reportPrivateUsage]
        for inner in module.modules()
    ]
    before = [dict(home) for home in homes]
    try:
        for home in homes:
            parts = {name: local_part(p) for name, p in home.items() if p is not None}
            if not gives_gradient:
                parts = {name: _NoGradient.apply(part) for name, part in parts.items()}
            home.update(parts)
        yield
    finally:
        for home, parameters in zip(homes, before, strict=True):
            home.update(parameters)


def subtracts_mean(norm: nn.Module) -> bool:
    """Tell LayerNorm from RMSNorm, which has no bias."""
    return isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None


def is_transposed(module: nn.Module) -> bool:
    """Tell whether a linear map holds its weight as [in, out], as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D"


def _part(module: nn.Module, name: str) -> Tensor:
    """Return this rank's part of a parameter, through which gradients flow to it."""
    return local_part(cast(Tensor, getattr(module, name)))


def _given(part: Tensor, layout: Layout) -> Tensor:
    """Return a parameter used along the residual, with a gradient from who is to give it."""
    gives_gradient = layout.is_first or not layout.is_residual_whole
    return part if gives_gradient else cast(Tensor, _NoGradient.apply(part))


def _padding(module: nn.Module) -> int | None:
    """Return the id of a table whose row gets no gradient."""
    return cast("int | None", getattr(module, "padding_idx", None))


def _matrix(module: nn.Module) -> Tensor:
    """Return this rank's part of a linear map's weight as [out, in]."""
    weight = _part(module, "weight")
    return weight.T if is_transposed(module) else weight


def _with_bias(module: nn.Module, y: Tensor) -> Tensor:
    if getattr(module, "bias", None) is None:
        return y
    return y + _part(module, "bias").to(y.dtype)


def _rows_of(value: Any, layout: Layout) -> Any:
    """Cut tensors of all rows, and tuples of such, to the rows of the inner layout."""
    if isinstance(value, tuple):
        parts = cast(tuple[Any, ...], value)
        return tuple(_rows_of(part, layout) for part in parts)
    if isinstance(value, Tensor) and value.ndim > 2 and len(value) in (1, layout.extent.num_rows):
        return layout.rows_of(value, layout.inner)
    return value


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)
