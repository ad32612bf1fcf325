"""RMSNorm, rotary embedding and bf16 attention, optimized for the caches of a CPU.

On a CPU PyTorch computes the first two in a dozen passes over memory, and its bf16 attention runs
at a tenth of the speed of a matrix product. The functions here compute the same formulas block by
block, in buffers that stay in cache, and save for backward at most their inputs (RMSNorm also a
scale per row). On other devices, under torch.compile, and for few tokens in inference mode,
layers.py and attention.py use PyTorch's own functions.

Suffixes: see decoder.py; N is rows of any kind, n a block of N; t is a block of T.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, library
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

from phalanx.models.kernels import device_type

_BLOCK_ELEMENTS = 1 << 18
"""Number of elements of an fp32 buffer: small enough for caches, large enough to amortize calls."""

_SERVED_ELEMENTS = 1 << 16
"""Number of elements up to which, in inference mode, calls cost more than passes over memory: one
token of 64 sequences of 1,024 features."""

_QUERY_BLOCK = 256
"""Number of queries in a block, whose scores are held at a time."""


def is_preferred(x: Tensor) -> bool:
    """Return whether `rms_norm` and `rotate` are faster than PyTorch's functions for x."""
    return _is_here(x) and (not torch.is_inference_mode_enabled() or x.numel() > _SERVED_ELEMENTS)


def attends_by_blocks(x: Tensor) -> bool:
    """Return whether `causal_attention` is faster than PyTorch's attention for queries like x."""
    return x.dtype == torch.bfloat16 and _is_here(x)


def _is_here(x: Tensor) -> bool:
    return device_type(x) == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in the dtype of x."""
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor, out_BTHK: Tensor) -> Tensor:
    """Rotate the pair (x_i, x_{i + K/2}) of each head by its angle, and write it to `out_BTHK`.

    Cosines and sines are [B or 1, T, 1, K/2] in fp32 (fp64 for fp64). x and out may have any
    strides.
    """
    num_rows, length, num_heads, width = x_BTHK.shape
    half = width // 2
    for row in range(0 if x_BTHK.is_meta else num_rows):
        for positions in _blocks(length, num_heads * width):
            cos_t, sin_t = (table[row % len(table), positions] for table in (cos, sin))
            x_tHK = x_BTHK[row, positions].to(cos.dtype)
            left, right = x_tHK[..., :half], x_tHK[..., half:]
            y_tHK = torch.empty_like(x_tHK)
            torch.mul(left, cos_t, out=y_tHK[..., :half]).addcmul_(right, sin_t, value=-1)
            torch.mul(right, cos_t, out=y_tHK[..., half:]).addcmul_(left, sin_t)
            out_BTHK[row, positions] = y_tHK
    return out_BTHK


@library.custom_op("phalanx::causal_attention", mutates_args=())
def causal_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, starts_BT1: Tensor | None
) -> Tensor:
    """Return causal attention, a tensor like q_BTHK; there are as many key heads as query heads.

    For a block of queries, scores are computed for all keys from the first start of the block up to
    its last query, so that most of the upper triangle and of earlier documents is skipped. Backward
    recomputes the scores.

    This is one operator to PyTorch, so that recomputation can save its result alone, and a compiled
    block can contain it. It runs on any device.

    `starts_BT1` is the first position in its row that each query attends to: the start of its
    document or window. One row may stand for all rows. None means the start of the row.
    """
    o_BTHK = q_BTHK.new_empty(q_BTHK.shape)
    for row, blocks in enumerate(_blocks_of_rows(q_BTHK, starts_BT1)):
        q_HTK, k_HTK, v_HTK = (_by_head(x[row]) for x in (q_BTHK, k_BTHK, v_BTHK))
        for queries, keys, bias_tT in blocks:
            # Queries 256 to 511 of a row whose documents begin at 0, 200 and 300:
            #
            #   keys   0 ... 199    200 ... 299    300 ... 511    512 ...
            #          skipped      computed       computed       skipped
            #
            # Query 256 reads from 200 on; queries 300 to 511 mask the keys 200 to 299.
            p_HtT = _probabilities(q_HTK[:, queries], k_HTK[:, keys], bias_tT)
            o_BTHK[row, queries] = (p_HtT @ v_HTK[:, keys]).transpose(0, 1)
    return o_BTHK


@causal_attention.register_fake
def _like_queries(q_BTHK: Tensor, *_: Tensor | None) -> Tensor:
    return q_BTHK.new_empty(q_BTHK.shape)


def _blocks(num_rows: int, width: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // width)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        num_rows, width = x_ND.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        y_ND, scale_N1 = torch.empty_like(x_ND), x.new_empty(num_rows, 1, dtype=wide)
        for rows in () if x.is_meta else _blocks(num_rows, width):
            x_nD = torch.empty_like(x_ND[rows], dtype=wide).copy_(x_ND[rows])
            norm_n1 = torch.linalg.vector_norm(x_nD, dim=-1, keepdim=True)
            scale_N1[rows] = norm_n1.square_().div_(width).add_(eps).rsqrt_()
            y_ND[rows] = x_nD.mul_(scale_N1[rows]).mul_(weight_D)
        ctx.save_for_backward(x_ND, scale_N1, weight_D)
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = scale (dy w - u mean(dy w u)) and dw = sum(dy u), where u = x * scale."""
        (dy,) = grad_outputs
        x_ND, scale_N1, weight_D = ctx.saved_tensors
        num_rows, width = x_ND.shape
        dy_ND = dy.reshape(num_rows, width)
        dx_ND = torch.empty_like(x_ND)
        wide = scale_N1.dtype
        wide_weight_D = weight_D.to(wide)
        dw_D = torch.zeros_like(wide_weight_D)
        blocks = _blocks(num_rows, width)
        # On the meta device two blocks are enough to reach the peak memory.
        for rows in itertools.islice(blocks, 2) if x_ND.is_meta else blocks:
            u_nD = torch.empty_like(x_ND[rows], dtype=wide).copy_(x_ND[rows]).mul_(scale_N1[rows])
            dy_nD = torch.empty_like(u_nD).copy_(dy_ND[rows])
            both_nD = dy_nD * u_nD
            dw_D += both_nD.sum(0)
            # -mean(dy w u), so that one addcmul subtracts its product with u.
            mean_n1 = (both_nD @ wide_weight_D).div_(-width)[:, None]
            dy_nD.mul_(wide_weight_D).addcmul_(u_nD, mean_n1)
            dx_ND[rows] = dy_nD.mul_(scale_N1[rows])
        return dx_ND.view(dy.shape), dw_D.to(weight_D.dtype), None


@library.custom_op("phalanx::causal_attention_backward", mutates_args=())
def _causal_attention_backward(
    do_BTHK: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, starts_BT1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq_BTHK, dk_BTHK, dv_BTHK = (x.new_empty(x.shape) for x in (q_BTHK, k_BTHK, v_BTHK))
    for row, blocks in enumerate(_blocks_of_rows(q_BTHK, starts_BT1)):
        q_HTK, k_HTK, v_HTK, do_HTK = (_by_head(x[row]) for x in (q_BTHK, k_BTHK, v_BTHK, do_BTHK))
        grads_HTK = _row_backward(q_HTK, k_HTK, v_HTK, do_HTK, blocks)
        for d_BTHK, d_HTK in zip((dq_BTHK, dk_BTHK, dv_BTHK), grads_HTK, strict=True):
            d_BTHK[row] = d_HTK.transpose(0, 1)
    return dq_BTHK, dk_BTHK, dv_BTHK


@_causal_attention_backward.register_fake
def _like_operands(_: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in operands[:3])


def _keep_operands(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _operand_gradients(ctx: Any, do_BTHK: Tensor) -> tuple[Tensor | None, ...]:
    return *_causal_attention_backward(do_BTHK, *ctx.saved_tensors), None


causal_attention.register_autograd(_operand_gradients, setup_context=_keep_operands)


@register_flop_formula(torch.ops.phalanx.causal_attention)
def _attention_flops(q_shape: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """Count the products of each block with all keys up to its end; ignore documents."""
    num_rows, length, num_heads, width = q_shape
    pairs = sum((stop - start) * stop for start, stop in _query_blocks(length))
    return 4 * num_rows * num_heads * width * pairs


@register_flop_formula(torch.ops.phalanx.causal_attention_backward)
def _attention_backward_flops(
    do_shape: tuple[int, ...], q_shape: tuple[int, ...], *args: Any, **kwargs: Any
) -> int:
    """Count five products; one of them recomputes the scores."""
    return _attention_flops(q_shape) * 5 // 2


_Block = tuple[slice, slice, Tensor]
"""A block of queries, the keys that any of them attends to, and the bias of their scores."""


def _row_backward(
    q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, do_HTK: Tensor, blocks: Iterator[_Block]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of one row; with several blocks, dk and dv are summed in fp32."""
    scale = q_HTK.shape[2] ** -0.5
    dq_HTK = torch.empty_like(q_HTK)
    sums_HTK: tuple[Tensor, Tensor] | None = None
    if q_HTK.shape[1] > _QUERY_BLOCK:
        wide = torch.promote_types(q_HTK.dtype, torch.float32)
        sums_HTK = torch.zeros_like(k_HTK, dtype=wide), torch.zeros_like(v_HTK, dtype=wide)
    parts_HTK = (k_HTK, v_HTK)
    for queries, keys, bias_tT in blocks:
        q_HtK, do_HtK = q_HTK[:, queries], do_HTK[:, queries]
        p_HtT = _probabilities(q_HtK, k_HTK[:, keys], bias_tT)
        dv_part_HTK = p_HtT.transpose(1, 2) @ do_HtK
        dp_HtT = do_HtK @ v_HTK[:, keys].transpose(1, 2)
        ds_HtT = torch.ops.aten._softmax_backward_data(dp_HtT, p_HtT, -1, p_HtT.dtype).mul_(scale)
        dq_HTK[:, queries] = ds_HtT @ k_HTK[:, keys]
        parts_HTK = (ds_HtT.transpose(1, 2) @ q_HtK, dv_part_HTK)
        for sum_HTK, part_HTK in zip(sums_HTK or (), parts_HTK, strict=False):
            sum_HTK[:, keys] += part_HTK
    dk_HTK, dv_HTK = sums_HTK or parts_HTK
    return dq_HTK, dk_HTK, dv_HTK


def _probabilities(q_HtK: Tensor, k_HTK: Tensor, bias_tT: Tensor) -> Tensor:
    scores_HtT = torch.baddbmm(bias_tT, q_HtK, k_HTK.transpose(1, 2), alpha=q_HtK.shape[2] ** -0.5)
    return torch.softmax(scores_HtT, dim=-1, out=scores_HtT)


def _blocks_of_rows(q_BTHK: Tensor, starts_BT1: Tensor | None) -> Iterator[Iterator[_Block]]:
    """Yield the blocks of queries of each row of the batch."""
    num_rows, length = q_BTHK.shape[:2]
    blocks = _query_blocks(length)
    widest, last = min(_QUERY_BLOCK, length), blocks[-1][0]
    # The causal bias of a block is 0 for earlier keys, then a triangle: a slice of this tensor.
    causal_tT = q_BTHK.new_full((widest, last + widest), -math.inf).triu_(last + 1)

    def of_row(row: int) -> Iterator[_Block]:
        starts_T1 = None if starts_BT1 is None else starts_BT1[row % len(starts_BT1)]
        # Reading starts on a GPU would make the host wait; there blocks take all earlier keys.
        for start, stop in blocks:
            first = int(starts_T1[start]) if starts_T1 is not None and starts_T1.is_cpu else 0
            # `causal_tT` is the bias of the last block and all keys before it. An earlier block has
            # fewer keys before it, so its slice begins later; its triangle is the same.
            bias_tT = causal_tT[: stop - start, last - start + first : last - start + stop]
            if starts_T1 is not None:
                keys_T = torch.arange(first, stop, device=starts_T1.device)
                bias_tT = bias_tT.masked_fill(keys_T < starts_T1[start:stop], -math.inf)
            yield slice(start, stop), slice(first, stop), bias_tT

    return (of_row(row) for row in range(num_rows))


def _query_blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + _QUERY_BLOCK, length)) for start in range(0, length, _QUERY_BLOCK)]


def _by_head(x_THK: Tensor) -> Tensor:
    return x_THK.transpose(0, 1).contiguous()
