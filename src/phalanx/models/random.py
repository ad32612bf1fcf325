"""Counter-based random numbers, which depend on a position and not on the process.

A number is a pure function of a 64-bit key and an index. So any rank can draw any part of a
parameter or of a dropout mask, and gets the same numbers as a single process.

    key(seed, "name")         64-bit hash of its arguments: one stream
    bits(key, index)          SplitMix64: element `index` of the stream
    uniform, fill_normal      distributions computed from those bits

SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014),
figure 17. Its state is `key + index * _GOLDEN`, so an element does not depend on earlier ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_INVERSE = pow(0x9E3779B97F4A7C15, -1, 1 << 64) - (1 << 64)
"""_INVERSE * _GOLDEN = 1 modulo 2**64."""
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Number of elements drawn at a time, by device type. On a CPU their int64 and float64 values
together fit a core's L2 cache; on a GPU they need few kernel launches, and half a GiB."""


def key(*parts: int | str) -> int:
    """Hash `parts` into the key of a stream, a signed 64-bit integer, with BLAKE2b.

    The hash depends on the types and the boundaries of parts: `key("ab", "c")`, `key("a", "bc")`
    and `key("abc")` differ, as do `key(1)` and `key("1")`.
    """
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(stream: int | Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits, int64, for each index into a stream.

    `stream` is a key, or a tensor of keys (int64) that broadcasts against `index`.
    """
    if isinstance(stream, Tensor):
        # index * _GOLDEN + stream, with the sum first: torch.compile would fold a product of
        # positions into its 32-bit indices, and Triton rejects the factor.
        state = (index + stream * _INVERSE).mul_(_GOLDEN)
    else:
        state = index * _GOLDEN + stream
    _mix(state, torch.empty_like(state))
    return state


def uniform(stream: int | Tensor, index: Tensor) -> Tensor:
    """Return float64 numbers, uniform in the open interval (0, 1); see `bits`."""
    return _unit(bits(stream, index))


def fill_normal(
    out: Tensor,
    stream: int,
    std: float,
    *,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
    is_uniform: bool = False,
) -> Tensor:
    """Fill `out` with its shard of a normally distributed tensor, and return `out`.

    Element i of the full tensor, flat and row-major, is `std * normal(bits(stream, i))`, so shards
    drawn on different ranks are consistent. Every dtype gets the same float32 numbers, cast to it.

    The full tensor, with key `stream`, has shape `shape` (default: the shape of `out`), and `out`
    begins at `offset` in it, one index a dimension (default: at its beginning). If `is_uniform`,
    the numbers are uniform, with the same standard deviation.
    """
    scale = math.sqrt(2) * std
    whole = tuple(out.shape if shape is None else shape)
    start = (0,) * out.ndim if offset is None else tuple(offset)
    row_size = out.shape[-1]
    if out.numel() == 0:
        return out
    # The flat index in the full tensor of the first element of each row of `out`. Rows 1 and 2,
    # columns 2 and 3 of a [4, 4] tensor begin at 6 and 10.
    first_R = torch.full((1,), start[-1], dtype=torch.int64, device=out.device)
    stride = whole[-1]
    for dim in range(out.ndim - 2, -1, -1):
        along = torch.arange(start[dim], start[dim] + out.shape[dim], device=out.device)
        first_R = (along[:, None] * stride + first_R).flatten()
        stride *= whole[dim]
    out_RC = out.detach().view(-1, row_size)
    column_C = torch.arange(row_size, device=out.device)
    block_elements = _BLOCK_ELEMENTS.get(out.device.type, _BLOCK_ELEMENTS["cuda"])
    rows_at_once = min(len(first_R), max(1, block_elements // row_size))
    state = torch.empty(rows_at_once, row_size, dtype=torch.int64, device=out.device)
    scratch = torch.empty_like(state)
    for row in range(0, len(first_R), rows_at_once):
        index_R1 = first_R[row : row + rows_at_once, None]
        z = torch.add(index_R1, column_C, out=state[: len(index_R1)])
        z.mul_(_GOLDEN).add_(stream)
        _mix(z, scratch[: len(z)])
        drawn = _unit(z).mul_(2).sub_(1)
        drawn = drawn.mul_(math.sqrt(3) * std) if is_uniform else drawn.erfinv_().mul_(scale)
        # Compute in float64 and round once to float32: devices whose erfinv differs in the last bit
        # of a float64 still agree on the float32.
        out_RC[row : row + rows_at_once] = drawn.float()
    return out


def row_keys(seed: int, step: int, rows_B: Tensor) -> Tensor:
    """Return dropout keys, int64, for rows given by their indices in the global sample order."""
    return bits(key(seed, "dropout", step), rows_B.to(torch.int64))


def layer_keys(keys_B: Tensor, layer: int) -> Tensor:
    """Return the dropout keys of layer `layer`, derived from the keys of the rows."""
    return bits(keys_B, torch.full_like(keys_B, layer + 1))  # index 0 is the embedding's salt


def dropout(
    x_BTD: Tensor,
    p: float,
    keys_B: Tensor,
    salt: int,
    positions_T: Tensor | None = None,
    first_feature: int = 0,
) -> Tensor:
    """Zero each element with probability `p` and scale the others so that the mean is unchanged.

    The mask depends only on (key, salt, position in the row, feature), not on the batch size. One
    draw of 64 bits serves four features, so `p` is rounded to a multiple of 1/65536; the scale uses
    the rounded `p`.

    Args:
        x_BTD: batch, position in the row, feature.
        p: probability of a zero, in [0, 1).
        keys_B: a key for each row, from `row_keys` or `layer_keys`.
        salt: number of this use of the keys, so that two uses draw different masks.
        positions_T: positions of the T tokens in their full row; 0..T-1 if None.
        first_feature: index in the full row of the first feature of `x_BTD`.

    Returns:
        A tensor like `x_BTD`.
    """
    levels = 1 << 16
    dropped_levels = min(round(p * levels), levels - 1)
    if dropped_levels == 0:
        return x_BTD
    _, length, width = x_BTD.shape
    if positions_T is None:
        positions_T = torch.arange(length, device=x_BTD.device)
    salted_B1 = bits(keys_B, torch.full_like(keys_B, salt))[:, None]
    keys_BT1 = bits(salted_B1, positions_T)[:, :, None]
    # Features 6 to 9 of a row, as on a rank of tp, take the quads 1 and 2, from lane 2 on:
    #
    #   quad 1    4 5 6 7      64 bits are four int16 lanes, each uniform from -32768 on: an element
    #   quad 2    8 9 . .      is kept if its lane is at least dropped_levels - 32768
    #
    # [B, 1, 1] row, [B, T, 1] position, [B, T, quads] -> [B, T, 4 quads]
    first_quad, lane = divmod(first_feature, 4)
    quads = torch.arange(first_quad, (first_feature + width + 3) // 4, device=x_BTD.device)
    lanes_BTD = bits(keys_BT1, quads).view(torch.int16)[:, :, lane : lane + width]
    keep_BTD = lanes_BTD >= dropped_levels - levels // 2
    return torch.where(keep_BTD, x_BTD * (levels / (levels - dropped_levels)), 0)


def _mix(z: Tensor, scratch: Tensor) -> None:
    """Apply SplitMix64's output function to `z` in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        z.bitwise_xor_(_shift_right(z, shift, scratch)).mul_(factor)
    z.bitwise_xor_(_shift_right(z, 31, scratch))


def _shift_right(z: Tensor, shift: int, out: Tensor) -> Tensor:
    """Shift right logically, with zeros; torch's own shift is arithmetic."""
    torch.bitwise_right_shift(z, shift, out=out)
    return out.bitwise_and_((1 << (64 - shift)) - 1)


def _unit(z: Tensor) -> Tensor:
    """Map 64 bits to (k + 1/2) / 2**52, where k is the upper 52 bits: never 0, never 1."""
    return ((z >> 12) & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
