"""Activation bytes of one decoder block, saved and at peak, counted by a run on the meta device.

A decoder of one block, with embedding and head, split as on a rank, runs forward and backward on
the meta device: nothing is computed, but every allocation and free is recorded.

    embedding -> [block] -> norm, head        bytes alive at the brackets and at the end:
    inputs       block      head              each difference is the bytes that a part saves

    loss, head <- [again, block]              peak bytes alive in each part, with temporaries:
    head_at_work  block_at_work               logits and their gradients, gradients in a block

Peaks are counted from the bytes alive when the last norm begins, the residual included. Gradients
of parameters do not count, because they outlive backward. The count assumes the kernels of the
given device (models/kernels.py) and its attention operator:

    cpu, by blocks    phalanx::causal_attention: bfloat16; documents and windows of any type
    cpu, else         _scaled_dot_product_flash_attention_for_cpu
    cuda, 16 bits     _scaled_dot_product_flash_attention; with documents or a window varlen_attn
    cuda, else        _scaled_dot_product_efficient_attention
    a ring            its own, on all devices
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.dry_run import CountingComm
from phalanx.models import kernels
from phalanx.models.attention import Documents
from phalanx.models.decoder import Block, Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

Device = Literal["cpu", "cuda"]
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """The inputs of a count: kind of block, parallel layout, sizes and kernels.

    Attributes:
        shape: a decoder of one block of this kind.
        strategy: the axes that split a block, and recomputation: `none`, `full` or `selective`.
        seq_len: tokens in one sequence.
        num_sequences: sequences in one microbatch of one rank.
        precision: data type of the arithmetic, such as "bfloat16".
        device: device type whose kernels run.
        has_documents: whether a sequence packs several documents.
        has_casts: whether the block's weights have 32 bits or more and are cast at each use.
    """

    shape: ModelShape
    strategy: Strategy
    seq_len: int
    num_sequences: int
    precision: str
    device: Device = "cpu"
    has_documents: bool = False
    has_casts: bool = False


class BlockBytes(NamedTuple):
    """Bytes of one microbatch on one rank.

    Attributes:
        inputs: saved by the embedding, and shared by all blocks.
        stream: the residual at the input of a block.
        block: saved by the block in forward, its input residual included.
        recompute: net bytes allocated when backward recomputes the block.
        head: saved by the last norm and the loss.
        head_at_work: peak while the head runs, forward and backward, with the residual.
        block_at_work: peak in the backward of the block, in addition to bytes that blocks saved.
    """

    inputs: int
    stream: int
    block: int
    recompute: int
    head: int
    head_at_work: int
    block_at_work: int


@functools.lru_cache(maxsize=256)
def one_block_shape(shape: ModelShape, window: int | None, seq_len: int) -> ModelShape:
    """Return a decoder of one block, equal to the blocks of `shape` whose window is `window`."""
    return dataclasses.replace(
        shape,
        num_layers=1,
        max_seq_len=max(seq_len, shape.max_seq_len),
        window=window,
        full_every=None,
        window_theta=None if window is None else shape.window_theta,
    )


@functools.lru_cache(maxsize=1 << 12)
def count(case: Case) -> BlockBytes:
    """Count the bytes of `case` by a run on the meta device; results are cached.

    Raises:
        StrategyError: the strategy cannot split this decoder.
    """
    model, spans = decoder_of(case), AllocationTrace()
    kernel_mode, (block, *_) = Kernels(case.device), model.blocks
    block.forward = MethodType(functools.partial(_forward_with_marks, spans, kernel_mode), block)
    split(case, model)
    streams: list[int] = []

    def enter(name: str, _module: Any, args: tuple[Tensor, ...]) -> None:
        spans.mark(name)
        streams.append(args[0].untyped_storage().nbytes())
        if name == "head":
            args[0].register_hook(functools.partial(spans.mark, "backward"))

    block.register_forward_pre_hook(functools.partial(enter, "block"))
    model.norm.register_forward_pre_hook(functools.partial(enter, "head"))
    labels_BT = labels_of(case)  # alive until the end, as all inputs of a step are
    with kernels.assumed_device(case.device, in_chunks=True), kernel_mode, spans:
        batch = batch_of(case)
        loss = model(labels_BT=labels_BT, **batch)
        spans.mark("loss")
        loss.backward()
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    levels, marks = spans.levels(gradients), spans.marks
    stream, stream_of_head = streams
    block_from, head_from, loss_from = (levels[marks[name]] for name in ("block", "head", "loss"))
    end = marks.get("end", len(levels) - 1)
    again = levels[marks["made again"]] - levels[marks["again"]] if "again" in marks else 0
    floor = head_from - stream_of_head
    return BlockBytes(
        inputs=block_from - stream,
        stream=stream,
        block=head_from - block_from,
        recompute=again,
        head=loss_from - floor,
        head_at_work=max(levels[marks["head"] : marks["backward"] + 1]) - floor,
        block_at_work=max(levels[marks["backward"] : end + 1]) - floor,
    )


def decoder_of(case: Case) -> Decoder:
    """Return the unsplit decoder of `case` on the meta device."""
    compute: torch.dtype = getattr(torch, case.precision)
    with torch.device("meta"):
        model = Decoder(case.shape).to(torch.promote_types(compute, torch.float32))
    model.compute_dtype = compute
    if not case.has_casts:
        model.blocks.to(compute)
    return model


def split(case: Case, model: Decoder) -> None:
    """Split `model` in place by the strategy of `case`, as one rank stores it."""
    compute: torch.dtype = getattr(torch, case.precision)
    comm = CountingComm(case.strategy.mesh_axes(), device=case.device)
    Plan(case.strategy, model, compute=compute).apply(comm)


def labels_of(case: Case) -> Tensor:
    """Return the labels of one microbatch on the meta device."""
    return torch.empty(case.num_sequences, case.seq_len, dtype=torch.int64, device="meta")


def batch_of(case: Case) -> dict[str, Any]:
    """Return the decoder's inputs for one microbatch, except labels, on the meta device."""
    rows, length = case.num_sequences, case.seq_len
    ints = functools.partial(torch.empty, dtype=torch.int64, device="meta")
    documents: Documents | None = None
    if case.has_documents:
        documents = ints(rows, length, 1), ints(rows, 2, 1), length
    return {
        "tokens_BT": ints(rows, length),
        "positions_BT": ints(rows if case.has_documents else 1, length),
        "documents_BT": documents,
        "dropout_keys_B": ints(rows),
    }


@dataclass(eq=False)
class _Storage:
    """A tensor storage, from allocation until it is freed."""

    num_bytes: int


class AllocationTrace(TorchDispatchMode):
    """A dispatch mode that records allocations and frees of storages, and marks between them.

    Attributes:
        events: each storage with 1 when it is allocated and -1 when it is freed, in order.
        marks: name of a part of the run -> number of events before the part begins.
        mark_next: mark to set before the next operator; "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[_Storage, int]] = []
        self.marks: dict[str, int] = {}
        self.mark_next = ""
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}

    def mark(self, name: str, *_: Any) -> None:
        """Record that the part `name` begins now."""
        self.marks[name] = len(self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.mark_next:
            self.mark(self.mark_next)
            self.mark_next = ""
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.phalanx_tensor.ring_attention:
            # Running it would loop over all blocks of all ring ranks, and save the same tensors.
            q_BTHK: Tensor = args[0]
            wide = torch.promote_types(q_BTHK.dtype, torch.float32)
            sizes = q_BTHK.shape
            out: Any = (q_BTHK.new_empty(sizes), q_BTHK.new_empty(sizes[:3], dtype=wide))
        else:
            out = func(*args, **kwargs)
        given = {storage_id(x) for x in tensors_in(args, kwargs)}
        for x in tensors_in(out):
            if x.ndim and storage_id(x) not in given:
                self._add(x.untyped_storage())
        self.on_operator(func, args, kwargs, out)
        return out

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Handle an operator that has run; subclasses override this hook."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = cast(Any, storage)._cdata
        if key in self._live:
            return
        span = _Storage(storage.nbytes())

        def free(_: Any) -> None:
            del self._live[key]
            self.events.append((span, -1))

        self._live[key] = weakref.ref(storage, free), span
        self.events.append((span, 1))

    def levels(self, kept: list[Tensor]) -> list[int]:
        """Return the bytes alive before the first event and after each, `kept` excluded."""
        spans = {id(self._live[k][1]) for k in map(storage_id, kept) if k in self._live}
        sizes = (0 if id(span) in spans else sign * span.num_bytes for span, sign in self.events)
        return list(itertools.accumulate(sizes, initial=0))


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or results, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*cast(Sequence[Any], value))
        elif isinstance(value, dict):
            yield from tensors_in(*cast(dict[str, Any], value).values())


def storage_id(x: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return cast(Any, x.untyped_storage())._cdata


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _forward_with_marks(
    spans: AllocationTrace, kernel_mode: Kernels, block: Block, x: Tensor, *args: Any
) -> Tensor:
    """Run the block's forward; mark begin and end of recomputation, and the end of backward."""
    is_again = "loss" in spans.marks
    if is_again:
        spans.mark("again")
    elif x.requires_grad:
        x.register_hook(functools.partial(spans.mark, "end"))
    try:
        with kernel_mode:  # backward runs without the modes around it
            return Block.forward(block, x, *args)
    finally:
        spans.mark_next = "made again" if is_again else ""


class _FusedNorm(Function):
    """RMS norm that saves the tensors of `_fused_rms_norm` on cuda.

    On the meta device PyTorch would decompose the fused operator.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=wide), weight)
        return x.neg()  # reads and writes as many bytes as the norm

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight = ctx.saved_tensors
        return grad_outputs[0] + x, torch.empty_like(weight)


class Kernels(TorchFunctionMode):
    """A function mode that calls the fused kernels that PyTorch would choose on a device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._is_cuda = device == "cuda"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args[:3])
        if func is F.rms_norm and self._is_cuda:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        return func(*args, **kwargs)

    def _attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Call the device's causal attention operator."""
        factors = q_BHTK, k_BGTK, v_BGTK
        if not self._is_cuda:
            return _aten._scaled_dot_product_flash_attention_for_cpu(*factors, 0.0, True)[0]
        if q_BHTK.dtype.itemsize == 2:
            return _aten._scaled_dot_product_flash_attention(*factors, 0.0, True)[0]
        return _aten._scaled_dot_product_efficient_attention(*factors, None, True, 0.0, True)[0]
