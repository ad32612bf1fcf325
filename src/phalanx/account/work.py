"""The kernels of one microbatch on one rank, with the FLOPs, bytes and product sizes of each.

As for saved bytes (count.py), a decoder of one block, split as on a rank, runs on the meta device.
The run includes backward and the recomputation of the block.

    embedding -> [block] -> norm, head       forward
    inputs       block      head
    inputs     <- [recompute, backward] <- head  backward

[Note: Tokens scale] The run has one whole sequence. More sequences, or a part of one, change only
the number of tokens: the rows of a product, or the inner size of the product that computes a
weight's gradient. So one run counts microbatches of any size. Operations on weights alone, such as
casts of weights and of their gradients, do not change with the number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from phalanx.account.count import (
    Case,
    Kernels,
    batch_of,
    decoder_of,
    labels_of,
    split,
    storage_id,
    tensors_in,
)
from phalanx.models import kernels
from phalanx.models.decoder import Block
from phalanx.models.shape import causal_pairs

_FREE = ("empty", "new_empty", "empty_like", "_unsafe_view", "arange", "scalar_tensor")
"""Operators without a kernel, and small ones that a step runs once; none of these is counted."""


class Operation(NamedTuple):
    """One kernel call.

    Attributes:
        name: name of the operator.
        flops: FLOPs of a matrix product or of attention; 0 for other operators.
        num_bytes: bytes read and written.
        product: rows, columns and inner size of a matrix product; zeros for other operators.
        scores: attention scores, all queries x all keys, masked pairs included; 0 for others.
        reads_only_weights: whether it reads only weights or their gradients.
    """

    name: str
    flops: int
    num_bytes: int
    product: tuple[int, int, int] = (0, 0, 0)
    scores: int = 0
    reads_only_weights: bool = False


class Work(NamedTuple):
    """The operations of one microbatch on one rank, by part; see the drawing above.

    Attributes:
        inputs: the embedding, forward and backward.
        block: forward of one block.
        backward: backward of one block, without recomputation.
        recompute: recomputation of one block in backward.
        head: the last norm, the output projection and the loss, forward and backward.
    """

    inputs: tuple[Operation, ...]
    block: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    recompute: tuple[Operation, ...]
    head: tuple[Operation, ...]


def product_flops(part: Iterable[Operation]) -> int:
    """Return the FLOPs of matrix products, without attention."""
    return sum(each.flops for each in part if any(each.product))


def work_of(case: Case) -> Work:
    """Return the operations of a case; see [Note: Tokens scale].

    Raises:
        StrategyError: the strategy cannot split this decoder.
    """
    strategy = case.strategy
    one = dataclasses.replace(case, strategy=strategy.with_whole_positions(), num_sequences=1)
    return _scaled(one, case.num_sequences, strategy.sample_shards)


@functools.lru_cache(maxsize=1 << 12)
def _scaled(one: Case, num_sequences: int, parts: int) -> Work:
    """Return the work of `num_sequences` sequences, each split into `parts` by position."""
    whole, num_tokens = _count(one), one.seq_len
    if num_sequences == parts:
        return whole
    return Work(
        *(
            tuple(_of_rows(each, num_tokens, num_sequences, parts) for each in part)
            for part in whole
        )
    )


def _of_rows(of: Operation, num_tokens: int, num_sequences: int, parts: int) -> Operation:
    """Scale an operation with the number of tokens; in a product, the size that counts tokens."""
    if of.reads_only_weights:
        return of
    rows, columns, inner = of.product
    if rows:
        by_rows = rows == num_tokens or inner != num_tokens
        size = (rows if by_rows else inner) * num_sequences // parts
        product = (size, columns, inner) if by_rows else (rows, columns, size)
        rows, columns, inner = product
        item_bytes = of.num_bytes / _elements(of.product)
        num_bytes = int(item_bytes * _elements(product))
    else:
        product, num_bytes = of.product, of.num_bytes * num_sequences // parts
    return Operation(
        of.name,
        of.flops * num_sequences // parts,
        num_bytes,
        product,
        of.scores * num_sequences // parts,
    )


def _elements(product: tuple[int, int, int]) -> int:
    rows, columns, inner = product
    return rows * columns + rows * inner + inner * columns


@functools.lru_cache(maxsize=1 << 10)
def _count(case: Case) -> Work:
    """Return the operations of `case` from a run on the meta device; results are cached."""
    model, seen = decoder_of(case), _Operations(case)
    kernel_mode, (block, *_) = Kernels(case.device), model.blocks
    block.forward = MethodType(functools.partial(_forward_by_part, seen, kernel_mode), block)
    split(case, model)
    model.norm.register_forward_pre_hook(seen.enter_head)
    seen.register_weights(model.parameters())
    with kernels.assumed_device(case.device), kernel_mode, seen:
        batch = batch_of(case)
        loss = model(labels_BT=labels_of(case), **batch)
        seen.is_backward = True
        loss.backward()
    return Work(*(tuple(seen.parts[name]) for name in Work._fields))


class _Operations(TorchDispatchMode):
    """A dispatch mode that records each operator by the part of the model that runs it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts: dict[str, list[Operation]] = {name: [] for name in Work._fields}
        self.part, self.is_backward = "inputs", False
        window = case.shape.window
        self._seen = causal_pairs(case.seq_len, window) / case.seq_len**2
        self._num_scores = case.shape.num_heads * case.seq_len**2 // case.strategy.tp.degree
        self._num_tokens = case.seq_len
        self._weights: list[Tensor] = []  # kept alive, so that no new storage reuses their ids
        self._of_weights: set[int] = set()

    def register_weights(self, weights: Iterable[Tensor]) -> None:
        """Register tensors that are weights, or results computed from weights alone."""
        for each in weights:
            local = each.to_local() if isinstance(each, DTensor) else each
            self._weights.append(local)
            self._of_weights.add(storage_id(local))

    def enter_head(self, _module: Any, args: tuple[Tensor, ...]) -> None:
        """Begin the head; the block's backward begins when the gradient of its input is ready."""
        self.part = "head"
        args[0].register_hook(functools.partial(self.leave, "backward"))

    def enter(self, part: str) -> None:
        """Count the operators that run from now for `part`."""
        self.part = part

    def leave(self, part: str, _gradient: Tensor) -> None:
        """Enter `part`; a tensor hook, called when the gradient of the tensor is ready."""
        self.enter(part)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = operation_of(func, args, kwargs, out)
        if found is None:
            return out
        if "attention" in found.name:
            flops = int(found.flops * self._seen)
            found = found._replace(flops=flops, scores=self._num_scores)
        inputs, outputs = [*tensors_in(args, kwargs)], [*tensors_in(out)]
        is_of_weights = all(storage_id(x) in self._of_weights for x in inputs if x.ndim)
        rows, _, inner = found.product
        if is_of_weights or (inner == self._num_tokens and rows != inner):  # a weight's gradient
            self.register_weights(outputs)
        of_weights = is_of_weights and bool(inputs)
        self.parts[self.part].append(found._replace(reads_only_weights=of_weights))
        return out


def _forward_by_part(
    seen: _Operations, kernel_mode: Kernels, block: Block, x: Tensor, *args: Any
) -> Tensor:
    """Run the block's forward, and set the part of its forward, recomputation and backward."""
    seen.enter("recompute" if seen.is_backward else "block")
    if not seen.is_backward and x.requires_grad:
        x.register_hook(functools.partial(seen.leave, "inputs"))
    try:
        with kernel_mode:  # backward runs without the modes around it
            return Block.forward(block, x, *args)
    finally:
        seen.enter("backward")


def operation_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Operation | None:
    """Return the operation of an operator that has run; None if no kernel needs to be counted."""
    packet = func.overloadpacket
    read = {name: value for name, value in kwargs.items() if name != "out"}
    inputs, outputs = [*tensors_in(args, read)], [*tensors_in(out)]
    name = str(packet).split(".", 1)[-1]
    known = {storage_id(x) for x in inputs}
    is_view = not func._schema.is_mutable and all(storage_id(x) in known for x in outputs)
    if name in _FREE or is_view or not any(x.ndim for x in outputs):
        return None
    num_bytes, product = sum(map(_nbytes, (*inputs, *outputs))), (0, 0, 0)
    flops = scores = 0
    if "embedding" in name or "index_add" in name:  # reads and writes only the selected rows
        num_bytes = 2 * min(map(_nbytes, (x for x in (*inputs, *outputs) if x.ndim > 1)))
    elif name.startswith("_scaled_dot_product"):
        is_backward = "backward" in name
        q, k = inputs[1:3] if is_backward else inputs[:2]
        scores = q.shape[:-1].numel() * k.shape[-2]
        # Two products, backward five. torch has no formula for the operators of a CPU.
        flops = (10 if is_backward else 4) * scores * q.shape[-1]
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if "attention" in name:
            scores = inputs[0].shape[:-1].numel() * inputs[1].shape[-2]
        elif flops:
            inner = inputs[0].shape[-1]
            rows = max(x.shape[:-1].numel() for x in (inputs[0], outputs[0]))
            product = rows, max(1, flops // (2 * rows * inner)), inner
    return Operation(name, flops, num_bytes, product, scores)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
