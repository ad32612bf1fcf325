"""Predicted communication of tensor parallelism, for its layers and its replicated parameters.

There are no separate formulas: the operators of the layers run on meta tensors, forward and
backward, over a communicator that counts. The count for each kind of layer is cached, because a
model has many equal layers and a planner evaluates thousands of strategies.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry
from phalanx.models.decoder import Head
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.reduce import buckets
from phalanx.parallel.skeleton import Weight
from phalanx.parallel.split import Target, entries_of, phases_of
from phalanx.parallel.tensor.layers import is_transposed, subtracts_mean
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.loss import token_loss_sum
from phalanx.parallel.tensor.norm import split_norm
from phalanx.parallel.tensor.operators import (
    column_parallel_linear,
    gather_features,
    gather_terms,
    reduce_embedding,
    row_parallel_linear,
    shard,
    sum_terms,
    unshard,
)
from phalanx.parallel.tensor.placed import ShardedParameter
from phalanx.parallel.tensor.roles import RoleBinding, reads_residual
from phalanx.parallel.tensor.spec import Spec
from phalanx.parallel.tensor.transformers_models import gathered_bases


@dataclass(frozen=True)
class _Operation:
    """One operation of a layer on a microbatch: everything that determines its communication.

    Attributes:
        kind: a case of `_forward`.
        sizes: numbers of features: input first, then outputs; for a norm, the second number is 1
            if the norm subtracts the mean, else 0.
        compute, master: dtypes of the arithmetic and of the weights.
        is_trained: False for a frozen embedding, which has no backward.
    """

    kind: Literal[
        "columns", "row", "embedding", "gather", "scatter", "token", "logits", "loss", "norm",
        "inner_norm", "experts",
    ]  # fmt: skip
    sizes: tuple[int, ...]
    compute: torch.dtype
    master: torch.dtype
    is_trained: bool = True


def traffic(
    target: Target,
    layout: Layout,
    bindings: Sequence[RoleBinding],
    parameters: Sequence[ShardedParameter],
    batches: Sequence[BatchShape],
) -> list[Entry]:
    """Return the communication of the first rank of tp over tp in one step."""
    grid = tuple((axis, layout.comm.size(axis)) for axis in layout.axes)
    works = Counter[tuple[_Operation, str]]()
    strategy, skeleton = target.strategy, target.skeleton
    master, compute = skeleton.dtype, target.compute_dtype
    blocks = tuple(f"{name}." for name in skeleton.blocks)
    # The number of features of the residual, from a weight that has it.
    roles = ("row", "embedding", "head")
    first = next(binding for role in roles for binding in bindings if binding.role == role)
    of_width = _table(first, bindings) if first.role == "head" else first.module
    width = _matrix_shape(of_width)[0 if first.role == "row" else 1]
    for binding in bindings:
        times = len(skeleton.named(binding.name))
        if times == 0:
            continue
        is_block = binding.name.startswith(blocks)
        # fsdp gathers the weights of blocks in the compute dtype.
        dtype = compute if is_block and strategy.fsdp.degree > 1 else master
        recompute = strategy.recompute.kind if is_block else "none"
        is_frozen = not any(p.requires_grad for p in binding.module.parameters())
        is_trained = not (binding.role == "embedding" and is_frozen)
        for kind, sizes in _kinds(binding, bindings, width):
            works[_Operation(kind, sizes, compute, dtype, is_trained), recompute] += times
    for _ in gathered_bases(skeleton.model, functools.partial(reads_residual, bindings)):
        works[_Operation("gather", (width,), compute, master), "none"] += 1
    rows = [
        (phase, entry.axis, entry.op, times * entry.calls, times * entry.payload_bytes)
        for batch, num_batches in Counter(batches).items()
        for (work, recompute), number in works.items()
        for times in (num_batches * number,)
        for entry in _entries(type(layout), grid, work, batch)
        for phase in phases_of(
            entry.phase, recompute, work.kind not in ("norm", "inner_norm", "loss", "experts")
        )
    ]
    # The gradients to be summed over tp, grouped by the axes of the sum, in the order of the model.
    # fsdp has split the rows of this rank's shard again before they are summed.
    axes_of: dict[Weight, tuple[tuple[str, ...], int]] = {}
    for row in parameters:
        if row.replicated_axes and row.weight.is_trained:
            num_rows, *rest = row.shard_shape
            size = -(-num_rows // target.strategy.num_shards) * math.prod(rest)
            axes_of[row.weight] = row.replicated_axes, size * row.weight.dtype.itemsize
    replicated: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for weight in target.skeleton.parameters():
        if weight in axes_of:
            axes, size = axes_of[weight]
            replicated[axes].append(size)
    rows += [
        ("reduce", axis, "all_reduce", len(buckets(sizes)), sum(sizes))
        for axes, sizes in replicated.items()
        for axis in axes
    ]
    return entries_of(rows, layout.comm.size)


def _kinds(
    binding: RoleBinding, bindings: Sequence[RoleBinding], width: int
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the kind and the sizes of each operation of a module."""
    if binding.role == "branch":
        shapes = [_matrix_shape(column.module) for column in binding.columns]
        yield "columns", (shapes[0][1], *(num_out for num_out, _ in shapes))
    elif binding.role == "row":
        num_out, num_in = _matrix_shape(binding.module)
        yield "row", (num_in, num_out)
    elif binding.role == "head":
        num_ids, num_in = _matrix_shape(_table(binding, bindings))
        yield "columns", (num_in, num_ids)
        yield "loss" if isinstance(binding.module, Head) else "logits", (num_ids,)
    elif binding.role in ("norm", "inner_norm"):
        width = binding.module.get_parameter("weight").shape[0]
        yield binding.role, (width, int(subtracts_mean(binding.module)))
    elif binding.role in ("embedding", "gather", "scatter", "token", "experts"):
        yield binding.role, (width,)


@functools.lru_cache(maxsize=1 << 14)
def _entries(
    kind: type[Layout], grid: tuple[tuple[str, int], ...], work: _Operation, batch: BatchShape
) -> list[Entry]:
    """Return the communication of one operation on one microbatch, forward and backward."""
    comm = CountingComm(dict(grid))
    with comm.phase("forward"):
        results = _forward(kind(comm), comm, work, batch)
    with comm.phase("backward"):
        if work.is_trained:
            torch.autograd.backward(results, results)
    return comm.entries()


def _forward(
    layout: Layout, comm: CountingComm, work: _Operation, batch: BatchShape
) -> Sequence[Tensor]:
    """Run the operation `work` on meta tensors, and return its results."""
    residual, inner, (width, *others) = layout.residual, layout.inner, work.sizes

    def empty(shape: Sequence[int], dtype: torch.dtype = work.compute) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def activation(spec: Spec) -> Tensor:
        return empty([len(held) for held in layout.shard_ranges(spec, batch, width)])

    def weight(spec: Spec, *shape: int) -> Tensor:
        return empty(spec.shard_shape(shape, comm), work.master)

    if work.kind == "columns":
        weights = [weight(layout.column, num_out, width) for num_out in others]
        return column_parallel_linear(layout, activation(residual), weights, batch.length)
    if work.kind == "row":
        return [row_parallel_linear(layout, activation(inner), weight(layout.row, *others, width))]
    if work.kind == "embedding":
        num_rows = len(layout.rows(layout.ids, batch))
        held = layout.column.shard(1, width, comm)
        looked_up = empty((num_rows, batch.length, len(held)), work.master)
        return [reduce_embedding(layout, looked_up)]
    if work.kind == "experts":
        full = gather_terms(layout, activation(residual), batch.length)
        return [sum_terms(layout, full)]
    if work.kind == "gather":
        return [unshard(layout, activation(residual), residual, batch, width)]
    if work.kind == "scatter":
        return [shard(layout, empty((batch.num_rows, batch.length, width)), residual)]
    if work.kind == "token":
        x = activation(residual)
        return [x if residual.features is None else gather_features(layout, x, residual.features)]
    if work.kind == "logits":
        return [unshard(layout, activation(inner), inner, batch, width)]
    if work.kind in ("norm", "inner_norm"):
        spec = residual if work.kind == "norm" else inner
        w, is_centred = weight(Spec.of(spec.axes[2]), width), bool(others[0])
        return [split_norm(activation(spec), w, None, 0.0, width, is_centred, layout, spec)]
    logits = activation(inner).flatten(0, 1)
    labels = torch.empty(len(logits), dtype=torch.int64, device="meta")
    return [token_loss_sum(logits, labels, width, layout)]


def _matrix_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear map, or (ids, features) of a table."""
    num_out, num_in = module.get_parameter("weight").shape
    return (num_in, num_out) if is_transposed(module) else (num_out, num_in)


def _table(binding: RoleBinding, bindings: Sequence[RoleBinding]) -> nn.Module:
    """Return the module that has the weight of an output projection: the embedding if tied."""
    if getattr(binding.module, "weight", None) is not None:
        return binding.module
    return next(other.module for other in bindings if other.role == "embedding")
