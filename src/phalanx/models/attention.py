"""Causal attention with grouped heads, rotary embedding, sliding windows and document masks.

Suffixes: see models/decoder.py.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention.varlen import varlen_attn

from phalanx.models import cpu
from phalanx.models.kernels import device_type
from phalanx.models.layers import Linear, Norm
from phalanx.models.shape import ModelShape, Yarn

Documents = tuple[Tensor, Tensor, int]
"""Boundaries of the documents in the rows of a microbatch, for `attend`; see `documents_of`.

    starts_BT1   int64, start of each token's document, as a position in its row
    ends_BN1     int64, ends of the documents of each row; the last end repeats
    longest      upper bound of the longest document's number of tokens, at most T

The third dimension, of size 1, marks the tensors for tensor parallelism: it cuts arguments of three
or more dimensions by rows.
"""


GQA_ARGUMENTS: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""Arguments with which `varlen_attn` accepts fewer key heads than query heads; torch 2.11 needs
none."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, from `rotation`."""


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023).

    Attributes:
        window: number of positions that a query attends to, its own the last; None for all up to
            its own.
        attend: the attention function, `attend` below; replaced by one that reads the positions of
            other ranks where each rank has a part of the positions.
    """

    def __init__(self, shape: ModelShape, window: int | None) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.window = window
        self.attend = attend
        heads_width = shape.num_heads * shape.head_dim
        groups_width = shape.num_kv_heads * shape.head_dim
        has_bias = shape.has_bias("qkv")
        self.q = Linear(shape.hidden, heads_width, has_bias)
        self.k = Linear(shape.hidden, groups_width, has_bias)
        self.v = Linear(shape.hidden, groups_width, has_bias)
        self.norms_heads = shape.qk_norm is True
        q_width, k_width = (
            (shape.head_dim, shape.head_dim) if self.norms_heads else (heads_width, groups_width)
        )
        self.q_norm = Norm(q_width, shape) if shape.qk_norm else None
        self.k_norm = Norm(k_width, shape) if shape.qk_norm else None
        self.output = Linear(heads_width, shape.hidden, shape.has_bias("other"))

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the output of the branch, like x_BTD; for the arguments see `Block.forward`."""
        q_BTHK = self._heads(self.q(x_BTD), self.q_norm)
        k_BTGK = self._heads(self.k(x_BTD), self.k_norm)
        v_BTGK = self._heads(self.v(x_BTD), None)
        if rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, *rotation), rotate(k_BTGK, *rotation)
        mixed_BTHK = self.attend(q_BTHK, k_BTGK, v_BTGK, documents, self.window)
        return self.output(mixed_BTHK.flatten(2))

    def _heads(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Split a projection into heads, and normalize each head or, before the split, all."""
        if norm is not None and not self.norms_heads:
            x = norm(x)
        x_BTHK = x.unflatten(-1, (-1, self.head_dim))
        return norm(x_BTHK) if norm is not None and self.norms_heads else x_BTHK


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1).

    R is the width of the latent vector of keys and values, S of queries; a head's query and key
    have a plain part and a rotated one, K = P + E features in all, and its value has U.

        x_BTD -> q_down -> norm -> q ---> [H, P | E] -> rotate E ----------------> q_BTHK
        x_BTD -> kv_down -> [R | E]   E -> rotate -> the same for all heads --+
                             R -> norm -> kv -> [H, P | U]   P ---------------+-> k_BTHK
                                                             U -> zeros to K ---> v_BTHK

    Attributes:
        window, attend: as in `Attention`.
        num_heads: number of heads, of which tensor parallelism has a part on each rank.
        score_scale: factor of the scores beside 1 / sqrt(K), see `Yarn`.
    """

    def __init__(self, shape: ModelShape, window: int | None) -> None:
        super().__init__()
        assert shape.latent is not None
        self.latent, self.window, self.attend = shape.latent, window, attend
        self.num_heads = shape.num_heads
        yarn = shape.rope_scaling
        self.score_scale = yarn.score_scale if isinstance(yarn, Yarn) else 1.0
        of = shape.latent
        if of.query_rank is not None:
            self.q_down = Linear(shape.hidden, of.query_rank, False)
            self.q_latent_norm = Norm(of.query_rank, shape)
        width = shape.num_heads * shape.head_dim
        self.q = Linear(of.query_rank or shape.hidden, width, False)
        self.kv_down = Linear(shape.hidden, of.kv_rank + of.rope_dim, False)
        self.kv_latent_norm = Norm(of.kv_rank, shape)
        self.kv = Linear(of.kv_rank, shape.num_heads * (of.plain_dim + of.value_dim), False)
        self.output = Linear(shape.num_heads * of.value_dim, shape.hidden, False)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the output of the branch, like x_BTD; for the arguments see `Block.forward`."""
        of = self.latent
        assert rotation is not None, "a shape with `latent` has rotary positions"
        read = x_BTD if of.query_rank is None else self.q_latent_norm(self.q_down(x_BTD))
        q_BTHK = self.q(read).unflatten(-1, (-1, of.plain_dim + of.rope_dim))
        plain, turned = q_BTHK.split([of.plain_dim, of.rope_dim], -1)
        q_BTHK = torch.cat([plain, rotate(turned, *rotation)], -1)
        if self.score_scale != 1.0:  # the attention functions have no argument for it
            q_BTHK = q_BTHK * self.score_scale
        latent_BTR, turned = self.kv_down(x_BTD).split([of.kv_rank, of.rope_dim], -1)
        kv = self.kv(self.kv_latent_norm(latent_BTR))
        k, v = kv.unflatten(-1, (-1, of.plain_dim + of.value_dim)).split(
            [of.plain_dim, of.value_dim], -1
        )
        turned = rotate(turned[:, :, None], *rotation).expand(*k.shape[:3], -1)
        # The attention functions take heads of one width; zeros add nothing to the output.
        v = F.pad(v, (0, q_BTHK.shape[-1] - of.value_dim))
        mixed = self.attend(q_BTHK, torch.cat([k, turned], -1), v, documents, self.window)
        return self.output(mixed[..., : of.value_dim].flatten(2))


def attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, causal and inside documents, a tensor like q_BTHK.

    No code path makes a mask of size T x T. With documents or a window, the variable-length flash
    kernel runs if it is supported, and otherwise the blockwise attention of models/cpu.py.

    G divides H, and each key head serves H / G consecutive query heads. A query attends to its own
    document (its row if `documents` is None) up to itself, but to at most the last `window`
    positions (Beltagy et al. 2020, section 3.1).
    """
    is_grouped = q_BTHK.shape[2] != k_BTGK.shape[2]
    window = None if window is None or window >= q_BTHK.shape[1] else window
    is_cut = documents is not None or window is not None
    if is_cut and runs_flash(q_BTHK):
        return _attend_by_lengths(q_BTHK, k_BTGK, v_BTGK, documents, window)
    by_blocks = is_cut or cpu.attends_by_blocks(q_BTHK)
    # Of PyTorch's fused kernels on a GPU only flash supports fewer key heads than query heads.
    is_cuda = device_type(q_BTHK) == "cuda"
    if is_grouped and (by_blocks or (is_cuda and not runs_flash(q_BTHK))):
        repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
        k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) for x in (k_BTGK, v_BTGK))
        is_grouped = False
    if by_blocks:
        positions_T = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
        starts_BT1 = first_attended(positions_T, documents, window)
        return cpu.causal_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT1)
    mixed_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        is_causal=True,
        enable_gqa=is_grouped,
    )
    return mixed_BHTK.transpose(1, 2)


def first_attended(
    positions_T: Tensor, documents: Documents | None, window: int | None
) -> Tensor | None:
    """Return the first position that each query attends to, [B or 1, T, 1]; None for the row start.

    `positions_T` are the positions of the queries in their rows; the starts in `documents` are at
    the same positions.
    """
    starts_BT1 = None if documents is None else documents[0]
    if window is None:
        return starts_BT1
    reached_1T1 = (positions_T - (window - 1)).clamp(min=0)[None, :, None]
    return reached_1T1 if starts_BT1 is None else torch.maximum(starts_BT1, reached_1T1)


def _attend_by_lengths(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    documents: Documents | None,
    window: int | None,
) -> Tensor:
    """Attend on a GPU with all documents as sequences of one flash call, without a host sync.

    Each row has as many sequences as the row with the most documents; the surplus ones are empty.
    """
    num_rows, length = q_BTHK.shape[:2]
    if documents is None:  # each row is one document
        ends_BN1 = torch.full((num_rows, 1, 1), length, device=q_BTHK.device)
        longest = length
    else:
        _, ends_BN1, longest = documents
    row_starts_B1 = torch.arange(num_rows, device=q_BTHK.device)[:, None] * length
    # Two rows of 4, documents of 3 + 1 and of 4: ends 3 4 and 4 4, borders 0 3 4 8 8: the last
    # sequence is empty.
    borders = F.pad((ends_BN1[:, :, 0] + row_starts_B1).flatten(), (1, 0)).int()
    joined = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    mixed = varlen_attn(
        *joined,
        cu_seq_q=borders,
        cu_seq_k=borders,
        max_q=longest,
        max_k=longest,
        window_size=(-1 if window is None else window - 1, 0),
        **(GQA_ARGUMENTS if q_BTHK.shape[2] != k_BTGK.shape[2] else {}),
    )
    return cast(Tensor, mixed).unflatten(0, (num_rows, length))


def runs_flash(q_BTHK: Tensor) -> bool:
    """Return whether PyTorch's flash kernels support queries like these."""
    width = q_BTHK.shape[-1]
    return (
        device_type(q_BTHK) == "cuda"
        and q_BTHK.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and (q_BTHK.is_meta or _has_flash(q_BTHK.device.index))
    )


@torch.compiler.assume_constant_result
def _has_flash(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (8, 0)


def documents_of(
    documents_BT: Tensor | None, device: torch.device | str | None = None
) -> Documents | None:
    """Return the document boundaries of a microbatch; None if each row is one document.

    The host computes them, because their number fixes tensor shapes: a `documents_BT` on a GPU
    forces a synchronization, and one on the host does not.

    Args:
        documents_BT: number of the document of each token; the tokens of a document are
            consecutive. None if each row is one document.
        device: device that attention runs on; the device of `documents_BT` if None.
    """
    if documents_BT is None:
        return None
    device = torch.device(documents_BT.device if device is None else device)
    documents_BT = documents_BT.cpu()
    num_rows, length = documents_BT.shape
    # One row of documents 7 7 7 9 9 4:
    #
    #   begins       0 0 0 1 0 1      a document begins here, the row's first one not counted
    #   starts       0 0 0 3 3 5
    #   number       0 0 0 1 1 2
    #   ends         3 5 6            begins of the next documents; `length` fills up shorter lists
    begins_BT = torch.zeros(num_rows, length, dtype=torch.bool)
    torch.ne(documents_BT[:, 1:], documents_BT[:, :-1], out=begins_BT[:, 1:])
    if not begins_BT.any():
        return None
    starts_BT = torch.arange(length).where(begins_BT, 0).cummax(1).values
    number_BT = begins_BT.cumsum(1)
    ends_BN = torch.full((num_rows, int(number_BT.max()) + 1), length)
    row, position = begins_BT.nonzero(as_tuple=True)
    ends_BN[row, number_BT[row, position] - 1] = position
    # Round up to a power of two, so that compiled blocks see few values; only an upper bound is
    # needed, for the kernel launch.
    longest = int(ends_BN.diff(dim=1, prepend=torch.zeros(num_rows, 1, dtype=torch.int64)).max())
    longest = min(length, 1 << (longest - 1).bit_length())
    return to_device(starts_BT[..., None], device), to_device(ends_BN[..., None], device), longest


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, without waiting for kernels that run there."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # a copy from pageable memory may wait for the stream
    return tensor.to(device, non_blocking=True)


def rotation(
    shape: ModelShape, positions_BT: Tensor, dtype: torch.dtype, has_window: bool = False
) -> Rotation | None:
    """Return the cosines and sines of the rotary embedding at each position.

    Angles are position * theta ** (-2i / width) for feature pair i (Su et al. 2021, section 3.2.2),
    with YaRN's or Llama 3.1's frequency scaling if `shape.rope_scaling` is set. `width` is
    head_dim, or with `shape.latent` its rope_dim. Blocks with a window (`has_window`) use
    `shape.window_theta`, without scaling, if it is set.

    `positions_BT` is int64; B may be 1 if all rows have the same positions. `dtype` is the dtype of
    the heads to rotate; the angles are computed in float64.

    Returns:
        Two tensors [B, T, 1, width / 2], fp32 (fp64 for fp64); None without rotary positions.
    """
    if shape.position != "rope":
        return None
    # Angles in float64: at position 100,000 a float32 angle would be off by up to 0.004.
    width = shape.head_dim if shape.latent is None else shape.latent.rope_dim
    half = torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float64)
    is_own = has_window and shape.window_theta is not None
    theta = shape.window_theta if is_own else shape.rope_theta
    assert theta is not None
    frequency = theta ** (-half / width)
    scaling, scale = None if is_own else shape.rope_scaling, 1.0
    if isinstance(scaling, Yarn):
        # Pair i turns original_length * theta ** (-2i / width) / 2 pi times. So the borders are
        # pairs, between which the part that keeps its frequency falls from 1 to 0:
        #
        #     pair    0 .. | low ........ high | .. width / 2
        #     keep    1      1 - (i - low) / (high - low)     0
        low, high = (
            width * math.log(scaling.original_length / (turns * 2 * math.pi)) / 2 / math.log(theta)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        keep = 1 - ((half / 2 - low) / (high - low or 0.001)).clamp(0, 1)  # as in transformers
        frequency, scale = frequency * (keep + (1 - keep) / scaling.factor), scaling.rotation_scale
    elif scaling is not None:
        # Llama 3.1: frequencies with wavelengths above original_length / low are divided by
        # `factor`, those below original_length / high are unchanged, and between the two they are
        # interpolated linearly.
        factor, low, high, original_length = scaling
        turns = original_length * frequency / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / factor)
    angle = positions_BT[:, :, None, None].to(torch.float64) * frequency
    wide = torch.promote_types(dtype, torch.float32)
    return (angle.cos() * scale).to(wide), (angle.sin() * scale).to(wide)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (x_i, x_{i + K/2}) of each head by its angle."""
    return cast(Tensor, _Rotation.apply(x_BTHK, cos, sin))


class _Rotation(Function):
    """Rotary embedding; backward rotates by the negative angles and needs only the angles."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if not cpu.attends_by_blocks(x_BTHK):
            # PyTorch's attention returns the memory layout of its queries: here [B, T, H, K], which
            # the output projection reads.
            return _turn(x_BTHK, cos, sin, torch.empty_like(x_BTHK))
        # The memory layout is [B, H, T, K], which attention reads.
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
        return cpu.rotate(x_BTHK, cos, sin, out_BTHK)
    left, right = x_BTHK.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        # Out of place: torch 2.11 compiles wrong gradients for in-place writes here.
        halves = left * cos - right * sin, right * cos + left * sin
        return torch.cat([half.to(x_BTHK.dtype) for half in halves], -1)
    # Four kernels; each half of the result is rounded once, when it is written.
    half = left.shape[-1]
    torch.addcmul(left * cos, right, sin, value=-1, out=out_BTHK[..., :half])
    torch.addcmul(right * cos, left, sin, out=out_BTHK[..., half:])
    return out_BTHK
