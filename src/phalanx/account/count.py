"""What one block of a decoder keeps for backward, and multiplies, counted by running it.

A decoder of one block, its embedding and its head, split within samples as on a rank, runs on the
meta device: nothing is computed, and all storages are seen to come and go.

    embedding -> [block] -> norm, head        bytes alive at the brackets and at the end:
    inputs       block      head              their differences are the parts

Then backward, up to where it has run the block again, shows what that makes. The count is of the
kernels of the device that is named (models/kernels.py), and of its attention:

    cpu, by blocks    phalanx::causal_attention: bfloat16; documents and windows of any type
    cpu, else         _scaled_dot_product_flash_attention_for_cpu
    cuda, 16 bits     _scaled_dot_product_flash_attention; with documents or a window varlen_attn
    cuda, else        _scaled_dot_product_efficient_attention
    a ring            its own, on all devices
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from phalanx.comm.comm import Counting
from phalanx.models import kernels
from phalanx.models.attention import Documents
from phalanx.models.decoder import Block, Decoder
from phalanx.models.loss import chunk_rows
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

Device = Literal["cpu", "cuda"]
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """What decides how much a block keeps: a kind of block, its layout, sizes and kernels.

    Attributes:
        shape: a decoder of one block of the kind.
        strategy: what splits samples, and its recomputation: `none`, `full` or `selective`.
        seq_len: tokens in one sequence.
        num_sequences: sequences in one microbatch of one rank.
        precision: data type of the arithmetic, such as "bfloat16".
        device: whose kernels.
        has_documents: several documents stand in a row.
        has_casts: the block's weights are in 32 bits or more, and cast where they are used.
    """

    shape: ModelShape
    strategy: Strategy
    seq_len: int
    num_sequences: int
    precision: str
    device: Device = "cpu"
    has_documents: bool = False
    has_casts: bool = False


class Counted(NamedTuple):
    """Bytes on one rank of one microbatch, and FLOPs of products with weights.

    Attributes:
        inputs: what all blocks share, and the embedding's.
        stream: of the residual, as it enters a block.
        block: kept by the block from forward on, the stream that it reads included.
        again: made when backward runs the block again, less what that lets go.
        head: kept by the last norm and the loss.
        block_flops: of the block's forward.
        again_flops: of what backward runs again of the block.
        head_flops: of the output projection, forward and backward: the loss makes both at once.
    """

    inputs: int
    stream: int
    block: int
    again: int
    head: int
    block_flops: int
    again_flops: int
    head_flops: int


def kind_of(shape: ModelShape, window: int | None, seq_len: int) -> ModelShape:
    """Return a decoder of one block, like the blocks of `shape` that have `window`."""
    return dataclasses.replace(
        shape,
        num_layers=1,
        max_seq_len=max(seq_len, shape.max_seq_len),
        window=window,
        full_every=None,
        window_theta=None if window is None else shape.window_theta,
    )


@functools.lru_cache(maxsize=1 << 12)
def count(case: Case) -> Counted:
    """Count a case by running it on the meta device; each case runs once.

    More sequences add what the second does, if the loss has full chunks of rows from the first on.

    Raises:
        StrategyError: the strategy does not split such a decoder.
    """
    strategy, num = case.strategy, case.num_sequences
    tokens, vocabulary = case.seq_len // strategy.sample_shards, case.shape.vocab_size
    shard = max(1, vocabulary // strategy.tp.degree)  # a block alone has no vocabulary
    rows = chunk_rows(shard, getattr(torch, case.precision), case.device)
    if num <= 2 or tokens < rows:
        return _count(case)
    one, two = (_count(dataclasses.replace(case, num_sequences=n)) for n in (1, 2))
    return Counted(*(a + (num - 1) * (b - a) for a, b in zip(one, two, strict=True)))


@functools.lru_cache(maxsize=1 << 12)
def _count(case: Case) -> Counted:
    model = decoder_of(case)
    live, kernel_mode, (block, *_) = _Live(), Kernels(case.device), model.blocks
    block.forward = MethodType(functools.partial(_marked, live, kernel_mode), block)
    split(case, model)
    for module in (block, model.norm):
        module.register_forward_pre_hook(live.mark)
    labels_BT = labels_of(case)
    with kernels.assumed(case.device), kernel_mode, live:
        batch = batch_of(case)  # alive until the end, as a step has it
        loss = model(labels_BT=labels_BT, **batch)
        end = live.now_with_flops()
        if case.strategy.recompute.kind != "none":
            live.is_backward = True
            try:
                loss.backward()
            except _RunAgain:
                pass
    before, after = live.marks
    begin, over = live.again
    return Counted(
        inputs=before.num_bytes - before.stream,
        stream=before.stream,
        block=after.num_bytes - before.num_bytes,
        again=over.num_bytes - begin.num_bytes,
        head=end.num_bytes - after.num_bytes + after.stream,
        block_flops=after.flops - before.flops,
        again_flops=over.flops - begin.flops,
        head_flops=end.flops - after.flops,
    )


def decoder_of(case: Case) -> Decoder:
    """Return a decoder of one block on the meta device, not yet split."""
    compute: torch.dtype = getattr(torch, case.precision)
    with torch.device("meta"):
        model = Decoder(case.shape).to(torch.promote_types(compute, torch.float32))
    model.compute_dtype = compute
    if not case.has_casts:
        model.blocks.to(compute)
    return model


def split(case: Case, model: Decoder) -> None:
    """Split a decoder as on a rank of the case, in place."""
    compute: torch.dtype = getattr(torch, case.precision)
    Plan(case.strategy, model, compute=compute).apply(Counting(case.strategy.mesh_axes()))


def labels_of(case: Case) -> Tensor:
    """Return labels of one microbatch, on the meta device."""
    return torch.empty(case.num_sequences, case.seq_len, dtype=torch.int64, device="meta")


def batch_of(case: Case) -> dict[str, Any]:
    """Return what a decoder reads of one microbatch besides its labels, on the meta device."""
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


class _Moment(NamedTuple):
    """Bytes alive and FLOPs done at a point of the run, and the bytes of the residual there."""

    num_bytes: int
    flops: int
    stream: int = 0


class _RunAgain(Exception):
    """Backward has run the block again, and all is known."""


class _Live(TorchDispatchMode):
    """Counts the bytes of arrays that operators make until they are freed, and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.flops = 0
        self.marks: list[_Moment] = []
        self.again = [_Moment(0, 0), _Moment(0, 0)]
        self.is_backward = self.is_over = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def mark(self, _module: Any, args: tuple[Tensor, ...]) -> None:
        """Note the bytes alive where a module begins, whose input is the residual."""
        self.marks.append(_Moment(self.now, self.flops, args[0].untyped_storage().nbytes()))

    def now_with_flops(self) -> _Moment:
        return _Moment(self.now, self.flops)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_over:
            self.again[1] = self.now_with_flops()
            raise _RunAgain
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is torch.ops.phalanx_tensor.ring_attention:
            # Run here, it would go through all blocks of all rows, and keep no more.
            q_BTHK: Tensor = args[0]
            wide = torch.promote_types(q_BTHK.dtype, torch.float32)
            sizes = q_BTHK.shape
            out = q_BTHK.new_empty(sizes), q_BTHK.new_empty(sizes[:3], dtype=wide)
        else:
            out = func(*args, **kwargs)
        if packet in flop_registry and "attention" not in str(packet):
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        given = {storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.ndim and storage_id(x) not in given:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = cast(Any, storage)._cdata, storage.nbytes()
        if key in self._known:
            return

        def free(_: Any) -> None:
            del self._known[key]
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, free)
        self.now += num_bytes


def storage_id(x: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return cast(Any, x.untyped_storage())._cdata


def _marked(live: _Live, kernel_mode: Kernels, block: Block, *args: Any) -> Tensor:
    """Run a block's own forward, and note where backward begins and ends to run it again."""
    if live.is_backward:
        live.again[0] = live.now_with_flops()
    try:
        with kernel_mode:  # backward runs without the modes around it
            return Block.forward(block, *args)
    finally:
        live.is_over = live.is_backward


class _FusedNorm(Function):
    """What `_fused_rms_norm` keeps on cuda; on the meta device PyTorch takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=wide), weight)
        return x.neg()  # which reads and writes as much

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight = ctx.saved_tensors
        return grad_outputs[0] + x, torch.empty_like(weight)


class Kernels(TorchFunctionMode):
    """Calls by their names the fused kernels that PyTorch would choose on a device."""

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
        """Attend causally."""
        factors = q_BHTK, k_BGTK, v_BGTK
        if not self._is_cuda:
            return _aten._scaled_dot_product_flash_attention_for_cpu(*factors, 0.0, True)[0]
        if q_BHTK.dtype.itemsize == 2:
            return _aten._scaled_dot_product_flash_attention(*factors, 0.0, True)[0]
        return _aten._scaled_dot_product_efficient_attention(*factors, None, True, 0.0, True)[0]
