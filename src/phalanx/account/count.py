"""Bytes and operations of one decoder block, counted by a run on the meta device.

A decoder of one block, with embedding and head, split as on a rank, runs forward and backward on
the meta device (recorder.py):

    inputs  ->  block  ->  head  ->  loss            forward; the parts of the run
    end     <-  after <- recompute <- backward  <-   backward; `loss` is the backward of the head

`count` returns bytes: alive when a part begins, so that each difference is what a part saves; and
the peaks in the head and in the block's backward, temporaries included. Peaks are counted from the
bytes alive when the last norm begins, the residual included. Gradients of parameters do not count,
because they outlive backward. `work_of` returns the operations of each part.

[Note: Tokens scale] The run of `work_of` has one whole sequence. More sequences, or a part of one,
change only the number of tokens: the rows of a product, or the inner size of the product that
computes a weight's gradient. So one run counts microbatches of any size. Operations on weights
alone, such as casts of weights and of their gradients, do not change with the number of tokens.

The run assumes the kernels of the given device (models/kernels.py) and its attention operator:

    cpu, by blocks    phalanx::causal_attention: bfloat16; documents and windows of any type
    cpu, else         _scaled_dot_product_flash_attention_for_cpu
    cuda, 16 bits     _scaled_dot_product_flash_attention; with documents or a window varlen_attn
    cuda, else        _scaled_dot_product_efficient_attention
    a ring            its own, on all devices
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from phalanx.account.parameters import BlockKind
from phalanx.account.recorder import MetaRecorder, Operation, storage_id, tensors_in
from phalanx.comm.dry_run import CountingComm
from phalanx.models import kernels
from phalanx.models.attention import Documents
from phalanx.models.decoder import Block, Decoder
from phalanx.models.shape import ModelShape, causal_pairs
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

    def __post_init__(self) -> None:
        if self.shape.experts is None:  # ep splits only blocks with experts
            of_dense = dataclasses.replace(self.strategy, ep=Strategy.ep)
            object.__setattr__(self, "strategy", of_dense)


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
def one_block_shape(shape: ModelShape, kind: BlockKind, seq_len: int) -> ModelShape:
    """Return a decoder of one block, equal to the blocks of `shape` of this kind.

    Losses of experts are left out: routers count for them in the step (train/balance.py).
    """
    experts = shape.experts if kind.has_experts else None
    if experts is not None:
        experts = dataclasses.replace(experts.without_losses, first_dense=0)
    return dataclasses.replace(
        shape,
        num_layers=1,
        max_seq_len=max(seq_len, shape.max_seq_len),
        window=kind.window,
        full_every=None,
        window_theta=None if kind.window is None else shape.window_theta,
        experts=experts,
    )


@functools.lru_cache(maxsize=1 << 12)
def count(case: Case) -> BlockBytes:
    """Count the bytes of `case` by a run on the meta device; results are cached.

    Raises:
        StrategyError: the strategy cannot split this decoder.
    """
    recorder = MetaRecorder()
    model, streams = _run(case, recorder, in_chunks=True)
    levels = recorder.levels([_local(p.grad) for p in model.parameters() if p.grad is not None])
    begins: dict[Any, int] = {"end": len(levels) - 1, **recorder.begins}
    begins.setdefault("backward", begins.get("recompute", 0))  # selective: no operator is before
    at = {part: levels[begin] for part, begin in begins.items()}
    stream, stream_of_head = streams
    # `at` has the live bytes when a part begins; a part saves the difference to the next:
    #
    #     inputs | stream, block | head | loss | backward | recompute | after | end
    #                            ^ floor: without the residual, which the head's norm reads
    floor = at["head"] - stream_of_head
    return BlockBytes(
        inputs=at["block"] - stream,
        stream=stream,
        block=at["head"] - at["block"],
        recompute=at["after"] - at["recompute"] if "recompute" in at else 0,
        head=at["loss"] - floor,
        head_at_work=max(levels[begins["head"] : begins["backward"] + 1]) - floor,
        block_at_work=max(levels[begins["backward"] : begins["end"] + 1]) - floor,
    )


class Work(NamedTuple):
    """The operations of one microbatch on one rank, by part.

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


@functools.lru_cache(maxsize=1 << 12)
def work_of(case: Case) -> Work:
    """Return the operations of a case; see [Note: Tokens scale].

    Raises:
        StrategyError: the strategy cannot split this decoder.
    """
    strategy = case.strategy
    one = dataclasses.replace(case, strategy=strategy.with_whole_positions(), num_sequences=1)
    whole, num, parts = _count(one), case.num_sequences, strategy.sample_shards
    if num == parts:
        return whole
    return Work(*(tuple(_of_rows(op, one, num, parts) for op in part) for part in whole))


def _tokens_of(of: Operation, case: Case) -> int:
    """Return the rows of a sequence that a product, or each of grouped products, multiplies."""
    if of.groups == 1:
        return case.seq_len
    assert case.shape.experts is not None
    return -(-case.seq_len * case.shape.experts.top_k // of.groups)


def _of_rows(of: Operation, case: Case, num_sequences: int, parts: int) -> Operation:
    """Scale an operation with the number of tokens; in a product, the size that counts tokens."""
    if of.reads_only_weights:
        return of
    rows, columns, inner = of.product
    num_tokens = _tokens_of(of, case)
    if rows:
        # Tokens T are the rows of a product in forward and of an input's gradient, and the inner
        # size in the gradient of a weight:
        #
        #     y = x W         [T, I] x [I, O]      rows  T
        #     dx = dy W'      [T, O] x [O, I]      rows  T
        #     dW = x' dy      [I, T] x [T, O]      inner T
        by_rows = rows == num_tokens or inner != num_tokens
        size = -(-(rows if by_rows else inner) * num_sequences // parts)
        product = (size, columns, inner) if by_rows else (rows, columns, size)
        rows, columns, inner = product
        item_bytes = of.num_bytes / _elements(of.product)
        num_bytes = int(item_bytes * _elements(product))
    else:
        product, num_bytes = of.product, of.num_bytes * num_sequences // parts
    return of._replace(
        flops=of.flops * num_sequences // parts,
        num_bytes=num_bytes,
        product=product,
        scores=of.scores * num_sequences // parts,
    )


def _elements(product: tuple[int, int, int]) -> int:
    rows, columns, inner = product
    return rows * columns + rows * inner + inner * columns


@functools.lru_cache(maxsize=1 << 10)
def _count(case: Case) -> Work:
    """Return the operations of `case` from a run on the meta device; results are cached."""
    unmasked = causal_pairs(case.seq_len, case.shape.window) / case.seq_len**2
    num_scores = case.shape.num_heads * case.seq_len**2 // case.strategy.tp.degree
    weights: dict[int, Tensor] = {}
    """Weights, and results computed from weights alone: storage id -> tensor, kept alive so that no
    new storage reuses the id."""

    def adjust(operation: Operation, arguments: Any, results: Any) -> Operation:
        if "attention" in operation.name:
            flops = int(operation.flops * unmasked)
            operation = operation._replace(flops=flops, scores=num_scores)
        # Weights, and all that is computed from them alone (casts, transposes), do not grow with
        # tokens. The gradient of a weight joins them: later operations on it have the weight's
        # size too.
        inputs = [*tensors_in(arguments)]
        is_of_weights = all(storage_id(x) in weights for x in inputs if x.ndim)
        rows, _, inner = operation.product
        num_tokens = _tokens_of(operation, case)
        if is_of_weights or (inner == num_tokens and rows != inner):  # a weight's gradient
            weights.update((storage_id(x), x) for x in tensors_in(results))
        return operation._replace(reads_only_weights=is_of_weights and bool(inputs))

    recorder = MetaRecorder(adjust)
    _run(case, recorder, weights=weights)
    of = recorder.operations
    return Work(
        inputs=(*of["inputs"], *of["end"]),
        block=tuple(of["block"]),
        backward=(*of["backward"], *of["after"]),
        recompute=tuple(of["recompute"]),
        head=(*of["head"], *of["loss"]),
    )


def _run(
    case: Case,
    recorder: MetaRecorder,
    *,
    in_chunks: bool = False,
    weights: dict[int, Tensor] | None = None,
) -> tuple[Decoder, list[int]]:
    """Run the decoder of `case` forward and backward, by the parts of the drawing above.

    Returns the decoder with its gradients, and the bytes of the residual at the block and at the
    head. Adds the parameters as split to `weights`, by the id of their storage.
    """
    compute: torch.dtype = getattr(torch, case.precision)
    model = Decoder.on_meta(case.shape, torch.promote_types(compute, torch.float32), compute)
    if not case.has_casts:
        model.blocks.to(compute)
    kernel_mode, (block, *_), streams = Kernels(case.device), model.blocks, list[int]()

    def forward(self: Block, x: Tensor, *args: Any) -> Tensor:
        is_again = "loss" in recorder.begins
        recorder.enter("recompute" if is_again else "block")
        if not is_again:
            streams.append(x.untyped_storage().nbytes())
            if x.requires_grad:
                x.register_hook(functools.partial(recorder.enter, "end"))
        try:
            with kernel_mode:  # backward runs without the modes around it
                return Block.forward(self, x, *args)
        finally:
            recorder.enter("after" if is_again else "head")

    def enter_head(_module: Any, args: tuple[Tensor, ...]) -> None:
        recorder.enter("head")
        streams.append(args[0].untyped_storage().nbytes())
        args[0].register_hook(functools.partial(recorder.enter, "backward"))

    block.forward = MethodType(forward, block)
    strategy = case.strategy
    comm = CountingComm(strategy.mesh_axes(), device=case.device)
    Plan(strategy, model, compute=compute).apply(comm)
    model.norm.register_forward_pre_hook(enter_head)
    if weights is not None:
        weights |= {storage_id(_local(p)): _local(p) for p in model.parameters()}
    recorder.enter("inputs")
    rows, length = case.num_sequences, case.seq_len
    ints = functools.partial(torch.empty, dtype=torch.int64, device="meta")
    labels_BT = ints(rows, length)  # alive until the end, as all inputs of a step are
    with kernels.assumed_device(case.device, in_chunks=in_chunks), kernel_mode, recorder:
        documents: Documents | None = None
        if case.has_documents:
            documents = ints(rows, length, 1), ints(rows, 2, 1), length
        batch: dict[str, Any] = {
            "tokens_BT": ints(rows, length),
            "positions_BT": ints(rows if case.has_documents else 1, length),
            "documents_BT": documents,
            "dropout_keys_B": ints(rows),
        }
        loss = model(labels_BT=labels_BT, **batch)
        recorder.enter("loss")
        loss.backward()
    return model, streams


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


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
            factors: tuple[Tensor, Tensor, Tensor] = args[:3]  # q_BHTK, k_BGTK, v_BGTK
            if not self._is_cuda:
                return _aten._scaled_dot_product_flash_attention_for_cpu(*factors, 0.0, True)[0]
            if factors[0].dtype.itemsize == 2:
                return _aten._scaled_dot_product_flash_attention(*factors, 0.0, True)[0]
            return _aten._scaled_dot_product_efficient_attention(*factors, None, True, 0.0, True)[0]
        if func is F.rms_norm and self._is_cuda:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        return func(*args, **kwargs)
