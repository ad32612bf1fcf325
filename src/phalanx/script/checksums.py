"""Checksums that show whether ranks have equal values: pure functions.

Checksum words of 11 bits and their squares are summed over the ranks in float64, exactly for up to
2**15 ranks. N words are equal if and only if N (sum of squares) = (sum)^2, so every rank detects a
difference from the sums.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.checkpoint.frozen import bits_of
from phalanx.comm.comm import local_shard

_WORD_BITS: Final = 11

_MIX: Final = -0x61C8864680B583EB
"""Odd multiplier with mixed bits, for weights that make a swap of two tensors visible."""


def words_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of tensors' bits that depends on their order, as 6 words; float64."""
    bits = torch.stack([bits_of(tensor) for tensor in tensors])
    odd = 2 * torch.arange(len(tensors), device=bits.device) + 1
    total = (bits * (odd * _MIX)).sum()
    shifts = torch.arange(0, 64, _WORD_BITS, device=bits.device)
    return ((total >> shifts) & (2**_WORD_BITS - 1)).double()


def words_of(text: str) -> list[int]:
    """Return the CRC-32 of a text, as 3 words."""
    checksum = zlib.crc32(text.encode())
    return [checksum >> shift & (2**_WORD_BITS - 1) for shift in range(0, 32, _WORD_BITS)]


def with_squares(words: Sequence[int]) -> list[int]:
    """Return words followed by their squares, to be summed over the ranks."""
    return [*words, *(word**2 for word in words)]


def sums_show_equal(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether all ranks had equal words, given the sums of words and of squares."""
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return all(num_ranks * squares == total**2 for total, squares in pairs)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors, or of local shards, to compare between ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = local_shard(tensor.detach()).cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def first_unequal_rank(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value differs from rank 0's; None if all are equal."""
    return next((rank for rank, each in enumerate(values) if each != values[0]), None)
