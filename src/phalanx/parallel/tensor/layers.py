"""Tensor-parallel layers for any layout: the forward that replaces a module's own, by its role.

Modules and parameter names stay the same; the parameters become DTensors. The roles are

    embedding  vocabulary table                    full ids[B, T] -> residual
    table      small table, such as positions      full ids[B, T] -> residual
    branch     attention or MLP: reads the residual once for all of its column products
    column     linear map inside a branch          residual -> inner
    row        linear map at the end of a branch   inner -> residual
    lora_a     first of two low-rank maps, such as an adapter's   residual -> full on every rank
    lora_b     the second of them                  full on every rank -> inner
    norm       norm over the features of the residual
    inner_norm norm over a column map's output     inner -> inner
    local      acts on each head or element separately, with full parameters
    dropout    dropout of the residual, keyed by position
    head       the output projection               residual -> logits, or their loss
    token      acts on each token separately       residual -> residual
    gather     acts on full residual (pooler)      residual -> full
    full       acts on full tensors                full -> full
    scatter    makes the residual without ids      full[B, T, ...] -> residual
    experts    a branch with experts               residual -> residual, see bind_experts

token, gather, full and scatter replicate their parameters. Under the last three every rank
computes the same value, so only the first rank contributes a gradient and the others contribute
zeros; the usual sum over ranks stays correct. The same holds for norm, token, table and the bias of
row in a layout whose residual is full on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.comm import local_shard
from phalanx.errors import StrategyError
from phalanx.models.decoder import Head
from phalanx.models.experts import MoE
from phalanx.models.layers import Dropout, Linear
from phalanx.models.loss import IGNORE
from phalanx.models.random import dropout
from phalanx.parallel.batch_shape import BatchShape, batch_shape, note
from phalanx.parallel.local_parameters import local_parameters
from phalanx.parallel.tensor import operators
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.loss import check_range, token_loss_sum
from phalanx.parallel.tensor.norm import split_norm
from phalanx.parallel.tensor.spec import Spec

NORMS = (
    *("Norm", "LayerNorm", "RMSNorm"),
    *("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"),
    *("Olmo2RMSNorm", "Phi3RMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"),
)
"""Names of norm classes that compute the formula of norm.py."""

NORMS_AROUND_ONE = ("Gemma2RMSNorm", "Gemma3RMSNorm")
"""Names of the classes in `NORMS` that multiply by 1 + weight."""


def bind_embedding(module: nn.Module, layout: Layout) -> None:
    """Replace the forward by a vocabulary-parallel lookup, which the layout sums over shards."""

    def forward(self: nn.Module, ids_BT: Tensor) -> Tensor:
        shape = BatchShape(*ids_BT.shape)
        note(shape)
        num_ids = cast(Tensor, self.weight).shape[0]
        check_range(ids_BT, num_ids, "an id")
        # Ids are cut to the rows of `layout.ids`, and every rank of those rows looks up all of
        # them: one rank has the row of an id, the others add zeros.
        first = layout.features(layout.inner, num_ids).start
        ids = layout.rows_of(ids_BT, layout.ids, shape)
        padding = _padding(self)
        padding = None if padding is None else padding - first
        rows = operators.look_up(ids - first, shard_of_parameter(self, "weight"), padding)
        x = operators.reduce_embedding(layout, rows)
        scale: Any = getattr(self, "embed_scale", 1.0)  # a tensor in Gemma
        return x * scale.to(x.dtype) if isinstance(scale, Tensor) else x

    replace_forward(module, forward)


def bind_table(module: nn.Module, layout: Layout) -> None:
    """Replace the forward by a lookup of this rank's ids; the table is split by features only."""

    def forward(self: nn.Module, ids_BT: Tensor) -> Tensor:
        rows = layout.rows_of(ids_BT, layout.residual, batch_shape())
        ids = layout.positions_of(rows, layout.residual, 1)
        weight = _shard_with_gradient_owner(shard_of_parameter(self, "weight"), layout)
        return F.embedding(ids, weight, _padding(self))

    replace_forward(module, forward)


def bind_row(module: nn.Module, layout: Layout) -> None:
    """Replace the forward by a row-parallel product, inner -> residual."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = operators.row_parallel_linear(layout, x, matrix_of(self))
        if getattr(self, "bias", None) is not None:
            bias = _shard_with_gradient_owner(shard_of_parameter(self, "bias"), layout)
            y = y + bias.to(y.dtype)
        return self.adapted(y, x) if isinstance(self, Linear) else y

    replace_forward(module, forward)


def bind_norm(module: nn.Module, layout: Layout) -> None:
    """Normalize over the features of all ranks; keep the module's forward if they are not split."""
    if layout.residual.features is None:
        _run_on_shards(module, _gives_gradient(layout))
        return
    _split_norm(module, layout, layout.residual)


def bind_inner_norm(module: nn.Module, layout: Layout) -> None:
    """Normalize over all output features of a column map, such as the queries of all heads."""
    if layout.inner.features is None:
        _run_on_shards(module)
        return
    _split_norm(module, layout, layout.inner)


def _split_norm(module: nn.Module, layout: Layout, spec: Spec) -> None:
    """Replace the forward by a norm over features that are split as `spec`.

    Raises:
        StrategyError: the class of the norm is not in `NORMS`.
    """
    if type(module).__name__ not in NORMS:
        raise StrategyError(
            f"tp: features are split, and {type(module).__name__} is not a norm that tp can "
            f"compute over split features; known norms are {', '.join(NORMS)}"
            + ("; the nearest is tp:1d" if spec is layout.residual else "")
        )
    is_centred = subtracts_mean(module)
    named = [getattr(module, name, None) for name in ("eps", "variance_epsilon")]
    own_eps = next((float(value) for value in named if value is not None), None)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        num_features = cast(Tensor, self.weight).shape[0]
        bias = None if getattr(self, "bias", None) is None else shard_of_parameter(self, "bias")
        weight = shard_of_parameter(self, "weight")
        if type(self).__name__ in NORMS_AROUND_ONE:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        elif offset := getattr(self, "offset", 0.0):
            weight = weight + offset
        eps = torch.finfo(x.dtype).eps if own_eps is None else own_eps  # default of torch's RMSNorm
        return split_norm(x, weight, bias, eps, num_features, is_centred, layout, spec)

    replace_forward(module, forward)


def bind_local(module: nn.Module, layout: Layout) -> None:
    """Run the module's own forward with this rank's shards of its parameters."""
    del layout
    _run_on_shards(module)


def bind_lora_b(module: nn.Module, layout: Layout) -> None:
    """Run the module's own forward with this rank's rows of its weight."""
    del layout
    _run_on_shards(module)


def bind_dropout(module: nn.Module, layout: Layout) -> None:
    """Replace the forward by dropout with this rank's shard of the single-process mask."""

    def forward(self: nn.Module, x: Tensor, keys_B: Tensor | None, salt: int) -> Tensor:
        if keys_B is None:
            return x
        shape = batch_shape()
        positions_T = cast(Dropout, self).row_positions(shape.length, x.device)
        positions_T = layout.positions_of(positions_T, layout.residual, 0)
        keys = layout.rows_of(keys_B, layout.residual, shape)
        axis = layout.residual.features
        # The mask depends on the place of an element in the full tensor, so a shard of the residual
        # needs the keys of its rows, its positions and its first feature.
        feature = 0 if axis is None else layout.comm.coord(axis) * x.shape[2]
        return dropout(x, cast(float, self.p), keys, salt, positions_T, feature)

    replace_forward(module, forward)


def bind_head(module: nn.Module, layout: Layout) -> None:
    """Replace the forward by the vocabulary-parallel projection: loss of labels, or full logits."""

    def shard_of(self: nn.Module, x: Tensor, weight: Tensor, length: int) -> Tensor:
        (logits,) = operators.column_parallel_linear(layout, x, [local_shard(weight)], length)
        return with_bias(self, logits)

    def full_logits(self: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        shape = batch_shape()
        shard = shard_of(self, x, weight, shape.length)
        return operators.unshard(layout, shard, layout.inner, shape, weight.shape[0])

    def loss_or_logits(
        self: Head, x: Tensor, labels_BT: Tensor | None = None, tied: Tensor | None = None
    ) -> Tensor:
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        if labels_BT is None:
            return full_logits(self, x, weight)
        logits = shard_of(self, x, weight, labels_BT.shape[1])
        labels = layout.labels_of(labels_BT, IGNORE).flatten()
        return token_loss_sum(logits.flatten(0, 1), labels, weight.shape[0], layout)

    def logits(self: nn.Module, x: Tensor) -> Tensor:
        return full_logits(self, x, cast(Tensor, self.weight))

    replace_forward(module, loss_or_logits if isinstance(module, Head) else logits)


def bind_token(module: nn.Module, layout: Layout) -> None:
    """Run the module on all features of this rank's tokens; keep this rank's output features."""
    axis = layout.residual.features
    if axis is None:
        _run_on_shards(module, _gives_gradient(layout))
        return
    own = module.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with _local_parameters(self):
            y = own(operators.gather_features(layout, x, axis))
        held = layout.features(layout.residual, y.shape[2])
        return y[..., held.start : held.stop]

    replace_forward(module, forward)


def bind_gather(module: nn.Module, layout: Layout) -> None:
    """Gather the residual and run the module on the full tensor, redundantly on every rank."""
    own = module.forward

    def forward(self: nn.Module, x: Tensor) -> Any:
        axis = layout.residual.features
        num_features = x.shape[2] * (1 if axis is None else layout.comm.size(axis))
        full = operators.unshard(layout, x, layout.residual, batch_shape(), num_features)
        with _local_parameters(self, layout.is_first):
            return own(full)

    replace_forward(module, forward)


def bind_full(module: nn.Module, layout: Layout) -> None:
    """Run the module on full tensors, redundantly on every rank."""
    _run_on_shards(module, layout.is_first)


def bind_scatter(module: nn.Module, layout: Layout) -> None:
    """Run the module on full tensors, and keep this rank's shard of its result [B, T, D]."""
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with _local_parameters(self, layout.is_first):
            full = own(*args, **kwargs)
        note(BatchShape(*full.shape[:2]))
        return operators.shard(layout, full, layout.residual)

    replace_forward(module, forward)


def bind_experts(module: nn.Module, layout: Layout) -> None:
    """Gather the residual, run the branch on a part of each expert, and sum the ranks' outputs.

    gate and up of each expert, and of the shared one, are split by columns and down by rows, so
    that a rank has a part of F and its output is a term of the sum over tp:

        x[T_tp] -> gather -> x -> router, the same on each rank -> experts[F_tp] -> y{sum tp}
                                                                  y -> scatter -> y[T_tp]

    The gradients of the router's weights of selections are such terms, too, and so is all that
    follows from them; of the auxiliary losses, which are the same on each rank, the first rank
    gives the gradient.
    """
    own = module.forward
    moe = cast(MoE, module)
    moe.router.gives_losses = layout.is_first

    def forward(self: nn.Module, x: Tensor, *args: Any) -> Tensor:
        full = operators.gather_terms(layout, x, batch_shape().length)
        with _local_parameters(self):
            y = own(full, *args)
        return operators.sum_terms(layout, y)

    replace_forward(module, forward)


def _run_on_shards(module: nn.Module, gives_gradient: bool = True) -> None:
    """Run the module's own forward inside `_local_parameters`."""
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters(self, gives_gradient):
            return own(*args, **kwargs)

    replace_forward(module, forward)


def _local_parameters(
    module: nn.Module, gives_gradient: bool = True
) -> AbstractContextManager[None]:
    """Replace the parameters of a module and its submodules by this rank's local shards.

    Without `gives_gradient` the gradients of this rank are zeros, because another rank computes
    and contributes the same gradients.
    """
    return local_parameters(module, *(() if gives_gradient else (operators.without_gradient,)))


def subtracts_mean(norm: nn.Module) -> bool:
    """Return whether a norm is a LayerNorm; any norm with a bias counts as one."""
    return isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear map stores its weight as [in, out], as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D"


def shard_of_parameter(module: nn.Module, name: str) -> Tensor:
    """Return this rank's local shard of a parameter; gradients flow through to the parameter."""
    return local_shard(cast(Tensor, getattr(module, name)))


def _shard_with_gradient_owner(shard: Tensor, layout: Layout) -> Tensor:
    """Return a shard used along the residual; its gradient is zero if another rank gives it."""
    return shard if _gives_gradient(layout) else operators.without_gradient(shard)


def _gives_gradient(layout: Layout) -> bool:
    """Return whether this rank contributes gradients of parameters used along the residual.

    If the residual is full on every rank, only the first rank does.
    """
    return layout.is_first or not layout.residual.is_replicated


def _padding(module: nn.Module) -> int | None:
    """Return the padding id of a table, whose row gets no gradient; None without one."""
    return cast("int | None", getattr(module, "padding_idx", None))


def matrix_of(module: nn.Module) -> Tensor:
    """Return this rank's shard of a linear map's weight as [out, in]."""
    weight = shard_of_parameter(module, "weight")
    return weight.T if is_transposed(module) else weight


def with_bias(module: nn.Module, y: Tensor) -> Tensor:
    """Add this rank's shard of a bias, if there is one."""
    if getattr(module, "bias", None) is None:
        return y
    return y + shard_of_parameter(module, "bias").to(y.dtype)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the module's forward by `forward(module, ...)`."""
    module.forward = MethodType(forward, module)
