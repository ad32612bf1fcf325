"""Whether ranks have the same bits, from sums over them: pure functions.

Words of 11 bits are added up over the ranks in float64 together with their squares, exactly for up
to 2**15 ranks: N words are alike if and only if N (sum of squares) = (sum)^2, so every rank learns
of a difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

WORD_BITS: Final = 11

_MIX: Final = -0x61C8864680B583EB
"""Odd, of mixed ones and zeros: by its multiples tensors that change places are noticed."""


def bits_of(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, in pieces of 64, as int64 that wraps; 0-d."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.data_ptr() % 8:  # a part of a buffer, whose bits would be cut elsewhere than others'
        flat = flat.clone()
    per_piece = 8 // flat.element_size()
    num_whole = len(flat) // per_piece * per_piece
    total = flat[:num_whole].view(torch.int64).sum()
    if num_whole < len(flat):
        rest = flat.new_zeros(per_piece)
        rest[: len(flat) - num_whole] = flat[num_whole:]
        total = total + rest.view(torch.int64)[0]
    return total


def words_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of the bits of tensors in their order, as words; float64."""
    bits = torch.stack([bits_of(tensor) for tensor in tensors])
    odd = 2 * torch.arange(len(tensors), device=bits.device) + 1
    total = (bits * (odd * _MIX)).sum()
    shifts = torch.arange(0, 64, WORD_BITS, device=bits.device)
    return ((total >> shifts) & (2**WORD_BITS - 1)).double()


def words_of(text: str) -> list[int]:
    """Return a checksum of a text, as words."""
    checksum = zlib.crc32(text.encode())
    return [checksum >> shift & (2**WORD_BITS - 1) for shift in range(0, 32, WORD_BITS)]


def with_squares(words: Sequence[int]) -> list[int]:
    """Return words and their squares, which are to be added up over the ranks."""
    return [*words, *(word**2 for word in words)]


def are_alike(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether ranks had the same words, from the sums of these and of their squares."""
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return all(num_ranks * squares == total**2 for total, squares in pairs)
