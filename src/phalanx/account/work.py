"""The operations of one microbatch on one rank: what each multiplies, reads and writes.

As the bytes that a block keeps (count.py), they are seen by running a decoder of one block on the
meta device, split as on a rank. Backward runs too, and what it runs again of the block.

    embedding -> [block] -> norm, head       forward
    inputs       block      head
    inputs     <- [again, backward] <- head  backward

[Note: Tokens scale] One whole sequence is run. More sequences, or parts of one, are the same with
more rows, or fewer: rows of a product, and the inner size of the product that makes a weight's
gradient. So one run counts microbatches of any size. What works on weights alone, as casts of them
and of their gradients, is the same for any.
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
"""Operators of no kernel, and small ones that a step runs once."""


class Operation(NamedTuple):
    """A kernel call.

    Attributes:
        name: of the operator.
        flops: of a product or of attention; 0 of others.
        num_bytes: read and written.
        product: rows, columns and inner size of a product of matrices; zeros of others.
        scores: of attention, all queries times all keys, masked ones too; 0 of others.
        is_of_weights: it reads weights, or their gradients, alone.
    """

    name: str
    flops: int
    num_bytes: int
    product: tuple[int, int, int] = (0, 0, 0)
    scores: int = 0
    is_of_weights: bool = False


class Work(NamedTuple):
    """What one rank runs for one microbatch, by part; see the drawing above.

    Attributes:
        inputs: the embedding, forward and backward.
        block: forward of one block.
        backward: of one block.
        again: what backward runs again of one block.
        head: the last norm, the output projection and the loss, forward and backward.
    """

    inputs: tuple[Operation, ...]
    block: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    again: tuple[Operation, ...]
    head: tuple[Operation, ...]


def product_flops(part: Iterable[Operation]) -> int:
    """Return the FLOPs of products of matrices, attention's not among them."""
    return sum(each.flops for each in part if any(each.product))


def work_of(case: Case) -> Work:
    """Return the operations of a case; see [Note: Tokens scale].

    Raises:
        StrategyError: the strategy does not split such a decoder.
    """
    strategy = case.strategy
    one = dataclasses.replace(case, strategy=strategy.with_whole_positions(), num_sequences=1)
    return _scaled(one, case.num_sequences, strategy.sample_shards)


@functools.lru_cache(maxsize=1 << 12)
def _scaled(one: Case, num_sequences: int, parts: int) -> Work:
    """Return the work of more sequences, or of a part of each."""
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
    """Scale an operation over the tokens of one sequence; of a product, what tokens number."""
    if of.is_of_weights:
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
    """Return the operations of a case by running it on the meta device; each case runs once."""
    model, seen = decoder_of(case), _Operations(case)
    kernel_mode, (block, *_) = Kernels(case.device), model.blocks
    block.forward = MethodType(functools.partial(_seen, seen, kernel_mode), block)
    split(case, model)
    model.norm.register_forward_pre_hook(seen.enter_head)
    seen.know(model.parameters())
    with kernels.assumed(case.device), kernel_mode, seen:
        batch = batch_of(case)
        loss = model(labels_BT=labels_of(case), **batch)
        seen.is_backward = True
        loss.backward()
    return Work(*(tuple(seen.parts[name]) for name in Work._fields))


class _Operations(TorchDispatchMode):
    """Notes each operator that is run, by the part of the model that runs it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts: dict[str, list[Operation]] = {name: [] for name in Work._fields}
        self.part, self.is_backward = "inputs", False
        window = case.shape.window
        self._seen = causal_pairs(case.seq_len, window) / case.seq_len**2
        self._num_scores = case.shape.num_heads * case.seq_len**2 // case.strategy.tp.degree
        self._num_tokens = case.seq_len
        self._weights: list[Tensor] = []  # alive, so that no other storage has their identity
        self._of_weights: set[int] = set()

    def know(self, weights: Iterable[Tensor]) -> None:
        """Note tensors that are weights, or are made of weights alone."""
        for each in weights:
            local = each.to_local() if isinstance(each, DTensor) else each
            self._weights.append(local)
            self._of_weights.add(storage_id(local))

    def enter_head(self, _module: Any, args: tuple[Tensor, ...]) -> None:
        """Begin the head, whose backward ends with the gradient of the residual that it reads."""
        self.part = "head"
        args[0].register_hook(functools.partial(self.leave, "backward"))

    def enter(self, part: str) -> None:
        """Count what runs from now on as of another part."""
        self.part = part

    def leave(self, part: str, _gradient: Tensor) -> None:
        """Enter a part once the gradient of the tensor before it is there."""
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
            self.know(outputs)
        of_weights = is_of_weights and bool(inputs)
        self.parts[self.part].append(found._replace(is_of_weights=of_weights))
        return out


def _seen(seen: _Operations, kernel_mode: Kernels, block: Block, x: Tensor, *args: Any) -> Tensor:
    """Run a block's own forward, and note where it and its backward begin and end."""
    seen.enter("again" if seen.is_backward else "block")
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
    """Return what an operator does that has run; None if it has no kernel worth counting."""
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
    if "embedding" in name or "index_add" in name:  # reads and writes the rows alone
        num_bytes = 2 * min(map(_nbytes, (x for x in (*inputs, *outputs) if x.ndim > 1)))
    elif packet in flop_registry and name.startswith("_scaled_dot_product"):
        is_backward = "backward" in name
        q, k = inputs[1:3] if is_backward else inputs[:2]
        scores = q.shape[:-1].numel() * k.shape[-2]
        if q.shape[1] == k.shape[1]:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        else:  # two products, or five: torch 2.11 refuses to count grouped heads
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
