"""RMSNorm and bf16 attention written for the caches of a CPU.

On a CPU PyTorch composes RMSNorm from a dozen passes over memory, and its bf16 attention runs at a
tenth of the speed of a matrix product. The functions here compute the same formulas block by block,
in buffers that stay in cache, and keep for backward only what they read. Everywhere else, and under
torch.compile, layers.py and attention.py use PyTorch's own.

Suffixes: see decoder.py; N is rows of any kind, n a block of them; t is a block of T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

_BLOCK_ELEMENTS = 1 << 18
"""Elements of an fp32 buffer: small enough for caches, large enough to hide the calls."""

_QUERY_BLOCK = 128
"""Queries whose scores are held at a time."""


def is_preferred(x: Tensor) -> bool:
    """Tell whether the functions of this file are the fast ones for x."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in the dtype of x."""
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


def causal_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask_B1TT: Tensor | None
) -> Tensor:
    """Attend causally, as many key heads as query heads; a tensor like q_BTHK.

    The scores of a block of queries against the keys up to its last one are made whole, so nothing
    is computed for most of the upper triangle; backward makes them again.
    """
    return cast(Tensor, _Attention.apply(q_BTHK, k_BTHK, v_BTHK, mask_B1TT))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(num_rows: int, width: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // width)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        num_rows, width = x_ND.shape
        wide = _wide(x.dtype)
        y_ND, scale_N1 = torch.empty_like(x_ND), x.new_empty(num_rows, 1, dtype=wide)
        for rows in _blocks(num_rows, width):
            x_nD = torch.empty_like(x_ND[rows], dtype=wide).copy_(x_ND[rows])
            norm_n1 = torch.linalg.vector_norm(x_nD, dim=-1, keepdim=True)
            scale_N1[rows] = norm_n1.square_().div_(width).add_(eps).rsqrt_()
            y_ND[rows] = x_nD.mul_(scale_N1[rows]).mul_(weight_D)
        ctx.save_for_backward(x_ND, scale_N1, weight_D)
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With u = x * scale: dx = scale * (dy * w - u * mean(dy * w * u)), dw = sum(dy * u)."""
        (dy,) = grad_outputs
        x_ND, scale_N1, weight_D = ctx.saved_tensors
        num_rows, width = x_ND.shape
        dy_ND = dy.reshape(num_rows, width)
        dx_ND = torch.empty_like(x_ND)
        wide = scale_N1.dtype
        wide_weight_D = weight_D.to(wide)
        dw_D = torch.zeros_like(wide_weight_D)
        for rows in _blocks(num_rows, width):
            u_nD = torch.empty_like(x_ND[rows], dtype=wide).copy_(x_ND[rows]).mul_(scale_N1[rows])
            dy_nD = torch.empty_like(u_nD).copy_(dy_ND[rows])
            both_nD = dy_nD * u_nD
            dw_D += both_nD.sum(0)
            mean_n1 = (both_nD @ wide_weight_D).div_(-width)[:, None]
            dy_nD.mul_(wide_weight_D).addcmul_(u_nD, mean_n1)
            dx_ND[rows] = dy_nD.mul_(scale_N1[rows])
        return dx_ND.view(dy.shape), dw_D.to(weight_D.dtype), None


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask_B1TT: Tensor | None
    ) -> Tensor:
        bias_BTT = _bias(mask_B1TT, q_BTHK)
        ctx.save_for_backward(q_BTHK, k_BTHK, v_BTHK, bias_BTT)
        o_BTHK = torch.empty_like(q_BTHK)
        num_rows, length = q_BTHK.shape[:2]
        for row in range(num_rows):
            q_HTK, k_HTK, v_HTK = (_by_head(x[row]) for x in (q_BTHK, k_BTHK, v_BTHK))
            bias_TT = bias_BTT[row % len(bias_BTT)]
            for start in range(0, length, _QUERY_BLOCK):
                stop = min(start + _QUERY_BLOCK, length)
                bias_tT = bias_TT[start:stop, :stop]
                p_HtT = _probabilities(q_HTK[:, start:stop], k_HTK[:, :stop], bias_tT)
                o_BTHK[row, start:stop] = (p_HtT @ v_HTK[:, :stop]).transpose(0, 1)
        return o_BTHK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (do_BTHK,) = grad_outputs
        q_BTHK, k_BTHK, v_BTHK, bias_BTT = ctx.saved_tensors
        dq_BTHK, dk_BTHK, dv_BTHK = (torch.empty_like(x) for x in (q_BTHK, k_BTHK, v_BTHK))
        for row in range(len(q_BTHK)):
            grads = _attention_backward(
                *(_by_head(x[row]) for x in (q_BTHK, k_BTHK, v_BTHK, do_BTHK)),
                bias_BTT[row % len(bias_BTT)],
            )
            for d_BTHK, d_HTK in zip((dq_BTHK, dk_BTHK, dv_BTHK), grads, strict=True):
                d_BTHK[row] = d_HTK.transpose(0, 1)
        return dq_BTHK, dk_BTHK, dv_BTHK, None


def _attention_backward(
    q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, do_HTK: Tensor, bias_TT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of one row of the batch; dk and dv are summed over blocks in fp32."""
    length, scale = q_HTK.shape[1], q_HTK.shape[2] ** -0.5
    dq_HTK = torch.empty_like(q_HTK)
    dk_HTK, dv_HTK = (torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (k_HTK, v_HTK))
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, length)
        q_HtK, do_HtK = q_HTK[:, start:stop], do_HTK[:, start:stop]
        p_HtT = _probabilities(q_HtK, k_HTK[:, :stop], bias_TT[start:stop, :stop])
        dv_HTK[:, :stop] += p_HtT.transpose(1, 2) @ do_HtK
        dp_HtT = do_HtK @ v_HTK[:, :stop].transpose(1, 2)
        ds_HtT = torch._softmax_backward_data(dp_HtT, p_HtT, -1, p_HtT.dtype).mul_(scale)
        dq_HTK[:, start:stop] = ds_HtT @ k_HTK[:, :stop]
        dk_HTK[:, :stop] += ds_HtT.transpose(1, 2) @ q_HtK
    return dq_HTK, dk_HTK, dv_HTK


def _probabilities(q_HtK: Tensor, k_HTK: Tensor, bias_tT: Tensor) -> Tensor:
    scores_HtT = torch.baddbmm(bias_tT, q_HtK, k_HTK.transpose(1, 2), alpha=q_HtK.shape[2] ** -0.5)
    return torch.softmax(scores_HtT, dim=-1, out=scores_HtT)


def _bias(mask_B1TT: Tensor | None, like_BTHK: Tensor) -> Tensor:
    """Return what is added to the scores, [B or 1, T, T]: 0 where a query may look, else -inf."""
    length = like_BTHK.shape[1]
    if mask_B1TT is None:
        return like_BTHK.new_full((1, length, length), -math.inf).triu_(1)
    bias_BTT = like_BTHK.new_zeros(mask_B1TT.shape[0], length, length)
    return bias_BTT.masked_fill_(~mask_B1TT[:, 0], -math.inf)


def _by_head(x_THK: Tensor) -> Tensor:
    return x_THK.transpose(0, 1).contiguous()
