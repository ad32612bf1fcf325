"""Causal attention with grouped heads, rotary positions and masks between documents.

Suffixes: see models/decoder.py.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.models import cpu
from phalanx.models.layers import Linear, Norm
from phalanx.models.shape import ModelShape


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        heads_width = shape.num_heads * shape.head_dim
        groups_width = shape.num_kv_heads * shape.head_dim
        self.q = Linear(shape.hidden, heads_width, shape.bias)
        self.k = Linear(shape.hidden, groups_width, shape.bias)
        self.v = Linear(shape.hidden, groups_width, shape.bias)
        self.q_norm = Norm(shape.head_dim, shape) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape) if shape.qk_norm else None
        self.output = Linear(heads_width, shape.hidden, shape.bias)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        bias_B1TT: Tensor | None = None,
    ) -> Tensor:
        """Map x_BTD to a tensor like it; the arguments are those of `Block.forward`."""
        q_BTHK = self.q(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.k(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.v(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, *rotation), rotate(k_BTGK, *rotation)
        return self.output(attend(q_BTHK, k_BTGK, v_BTGK, bias_B1TT).flatten(2))


def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, bias_B1TT: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, a tensor like q_BTHK.

    Args:
        q_BTHK: queries.
        k_BTGK: keys; G divides H, and each key head serves H / G query heads that stand together.
        v_BTGK: values.
        bias_B1TT: added to the scores of each query (first T), see `document_bias`; None is plain
            causal attention.
    """
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    by_blocks = cpu.attends_by_blocks(q_BTHK)
    if repeats > 1 and (by_blocks or bias_B1TT is not None):
        # With a mask, PyTorch's fused kernels want as many key heads as query heads.
        k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) for x in (k_BTGK, v_BTGK))
    if by_blocks:
        return cpu.causal_attention(q_BTHK, k_BTGK, v_BTGK, bias_B1TT)
    mixed_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        attn_mask=bias_B1TT,
        is_causal=bias_B1TT is None,
        enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
    )
    return mixed_BHTK.transpose(1, 2)


def document_bias(documents_BT: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return bias_B1TT: 0 where a query (first T) may look at a key (second T), else -inf.

    A query looks at its own document, up to itself. None stands for plain causal attention, which
    is also what rows of one document each need.

    Made once for all blocks: a mask of booleans would be turned into this, and kept, by each.

    Args:
        documents_BT: number of the document that each token belongs to; None if one a row.
        dtype: that of the queries.
    """
    if documents_BT is None or bool((documents_BT == documents_BT[:, :1]).all()):
        return None
    sees_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril_()
    bias_BTT = torch.zeros_like(sees_BTT, dtype=dtype).masked_fill_(~sees_BTT, -math.inf)
    return bias_BTT[:, None]


def rotation(
    shape: ModelShape, positions_BT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines that turn each half of a head by its position.

    Angles are position * theta ** (-2i / head_dim) for feature pair i (Su et al. 2021, section
    3.2.2), with Llama 3.1's scaling of the frequencies where the shape asks for it.

    Args:
        shape: the decoder's shape.
        positions_BT: int64; B may be 1 for all rows alike.
        dtype: of what will be rotated; the angles themselves are made in float64.

    Returns:
        Two tensors [B, T, 1, head_dim / 2], fp32 (fp64 for fp64); None without rotary positions.
    """
    if shape.position != "rope":
        return None
    half = torch.arange(0, shape.head_dim, 2, device=positions_BT.device, dtype=torch.float64)
    frequency = shape.rope_theta ** (-half / shape.head_dim)
    if shape.rope_scaling is not None:
        frequency = _scaled(frequency, *shape.rope_scaling)
    angle = positions_BT[:, :, None, None].to(torch.float64) * frequency
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(wide), angle.sin().to(wide)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x_i, x_{i + K/2}) of each head by its angle."""
    return cast(Tensor, _Rotation.apply(x_BTHK, cos, sin))


class _Rotation(Function):
    """Its backward is the turn back, so that nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if not cpu.attends_by_blocks(x_BTHK):
            # PyTorch's attention lays its result out as its queries: as the projection reads it.
            return _turn(x_BTHK, cos, sin, torch.empty_like(x_BTHK))
        # Laid out as [B, H, T, K] in memory, which is how attention reads it.
        out_BHTK = torch.empty_like(x_BTHK.transpose(1, 2), memory_format=torch.contiguous_format)
        return _turn(x_BTHK, cos, sin, out_BHTK.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (grad_BTHK,) = grad_outputs
        out_BTHK = torch.empty_like(grad_BTHK, memory_format=torch.contiguous_format)
        return _turn(grad_BTHK, cos, -sin, out_BTHK), None, None


def _turn(x_BTHK: Tensor, cos: Tensor, sin: Tensor, out_BTHK: Tensor) -> Tensor:
    if cpu.is_preferred(x_BTHK):
        return cpu.turn(x_BTHK, cos, sin, out_BTHK)
    left, right = x_BTHK.chunk(2, dim=-1)
    out_BTHK.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))
    return out_BTHK


def _scaled(
    frequency: Tensor, factor: float, low: float, high: float, original_length: int
) -> Tensor:
    """Slow the frequencies whose waves are long against the original length (Llama 3.1).

    Waves longer than original_length / low are slowed by `factor`, those shorter than
    original_length / high not at all, and between the two the change is linear.
    """
    turns = original_length * frequency / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)
