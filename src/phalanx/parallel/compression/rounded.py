"""Gradients rounded to bfloat16, or to int8 by blocks, and summed in two hops.

    each rank    rounds its bucket, and sends slice s to rank s            all-to-all
    rank s       adds up slice s of all ranks in float32, in their order
                 rounds the sum, and sends it to all                       all-gather

A value is so rounded twice, however many ranks there are: a ring would round partial sums N - 1
times (as in the compressed all-reduce of 1-bit Adam, Tang et al., 2021, section 4.2). All ranks
read the same bytes, so replicas stay equal to the bit. Both roundings have error feedback.

A rank sends 2 (N-1)/N bytes a parameter in int8, and twice as many in bfloat16; float32 takes four
times as many. A block of `BLOCK` values has one scale, its largest value / 127, in four bytes more.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.pending import Pending
from phalanx.parallel.compression.compressor import AXIS, Compressor, keep_finite

BLOCK: Final = 1024
"""Values of a block of int8, which has one scale."""

CHUNK: Final = 128 * BLOCK
"""Values that are rounded at a time: they stay in the cache of a core."""


class Code(ABC):
    """A smaller form of float32 values, as bytes."""

    @abstractmethod
    def num_bytes(self, size: int) -> int:
        """Return the bytes of as many values, a multiple of `BLOCK`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write values to bytes, and leave in `values` the error."""

    @abstractmethod
    def add(self, given: Tensor, total: Tensor) -> None:
        """Add the values of bytes to `total`."""


class Bf16(Code):
    """Values rounded to bfloat16."""

    @override
    def num_bytes(self, size: int) -> int:
        return 2 * size

    @override
    def encode(self, values: Tensor, out: Tensor) -> None:
        values.sub_(out.view(torch.bfloat16).copy_(values))

    @override
    def add(self, given: Tensor, total: Tensor) -> None:
        total.add_(given.view(torch.bfloat16))


class Int8(Code):
    """Values in 255 steps between the largest of their block and its negative.

    A block that has a value which is not finite comes out not finite.
    """

    @override
    def num_bytes(self, size: int) -> int:
        return size + 4 * size // BLOCK

    @override
    def encode(self, values: Tensor, out: Tensor) -> None:
        codes, scales = self._parts(out)
        for rows, code, scale in zip(
            values.view(-1, BLOCK).split(CHUNK // BLOCK),
            codes.split(CHUNK // BLOCK),
            scales.split(CHUNK // BLOCK),
            strict=True,
        ):
            scale.copy_(rows.abs().amax(1, keepdim=True)).div_(127)
            # A block of zeros has the scale 0, and any step but 0 makes zeros of it.
            code.copy_((rows / scale.clamp(min=torch.finfo(scale.dtype).tiny)).round_())
            rows.addcmul_(code.to(rows.dtype), scale, value=-1)

    @override
    def add(self, given: Tensor, total: Tensor) -> None:
        codes, scales = self._parts(given)
        for rows, code, scale in zip(
            total.view(-1, BLOCK).split(CHUNK // BLOCK),
            codes.split(CHUNK // BLOCK),
            scales.split(CHUNK // BLOCK),
            strict=True,
        ):
            rows.addcmul_(code.to(rows.dtype), scale)

    @staticmethod
    def _parts(given: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes[blocks, BLOCK] and scales[blocks, 1] of bytes, which are blocks + scales."""
        num_blocks = len(given) // (BLOCK + 4)
        codes, scales = given.split([BLOCK * num_blocks, 4 * num_blocks])
        return codes.view(torch.int8).view(-1, BLOCK), scales.view(torch.float32).view(-1, 1)


class RoundedSum(Compressor):
    """Sums buckets as the head of this file says."""

    def __init__(self, comm: Comm, code: Code) -> None:
        super().__init__(comm)
        self._code = code
        self._size = comm.size(AXIS)
        self._errors: dict[int, Tensor] = {}
        self._slice_errors: dict[int, Tensor] = {}

    @override
    def _start(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Pending:
        slice_size = -(-len(flat) // (self._size * BLOCK)) * BLOCK
        if number not in self._errors:
            self._errors[number] = flat.new_zeros(self._size * slice_size, dtype=torch.float32)
            self._slice_errors[number] = flat.new_zeros(slice_size, dtype=torch.float32)
        values = self._errors[number]
        values[: len(flat)].add_(flat)
        like = torch.empty(0, dtype=torch.uint8, device=flat.device)
        sent = self.comm.empty([self._size, self._code.num_bytes(slice_size)], like)
        for own, out in zip(values.view(self._size, -1), sent, strict=True):
            self._code.encode(own, out)
        keep_finite(values)
        received = torch.empty_like(sent)
        hop = self.comm.exchange_start(received, sent, AXIS)
        return Pending(flat, begin=functools.partial(self._finish, number, flat, received, hop))

    def _finish(self, number: int, flat: Tensor, received: Tensor, hop: Pending) -> Pending:
        hop.wait()
        total = self._slice_errors[number]
        for given in received:
            self._code.add(given, total)
        own = torch.empty_like(received[0])
        self._code.encode(total, own)
        keep_finite(total)
        gathered = self.comm.all_gather(own, AXIS, 0).view(self._size, -1)
        values = torch.zeros_like(total)
        for given, out in zip(gathered, flat.split(len(total)), strict=False):
            self._code.add(given, values.zero_())
            out.copy_(values[: len(out)])
        return Pending(flat)

    @override
    def forget(self) -> None:
        self._errors.clear()
        self._slice_errors.clear()
