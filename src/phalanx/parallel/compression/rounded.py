"""Gradients rounded to bfloat16, or to int8 in blocks, and summed in two hops.

    each rank    rounds its bucket, and sends slice s to rank s            all-to-all
    rank s       sums slice s of all ranks in float32, in rank order
                 rounds the sum, and sends it to all ranks                 all-gather

A value is thus rounded twice for any number of ranks, as in the compressed all-reduce of 1-bit Adam
(Tang et al., 2021, section 4.2); a ring would round partial sums N - 1 times. All ranks read the
same bytes, so replicas stay bitwise equal. Both roundings have error feedback.

A rank sends 2 (N-1)/N bytes a parameter in int8, 4 (N-1)/N in bfloat16, and 8 (N-1)/N in float32.
In int8, each block of `BLOCK` values adds a scale of four bytes: its largest absolute value / 127.
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
from phalanx.parallel.compression.compressor import AXIS, Compressor, zero_nonfinite

BLOCK: Final = 1024
"""Number of int8 values that have one scale."""

CHUNK: Final = 128 * BLOCK
"""Number of values that are rounded at a time, small enough for the cache of a core."""


class Code(ABC):
    """A compact encoding of float32 values as bytes."""

    @abstractmethod
    def num_bytes(self, size: int) -> int:
        """Return the number of bytes for `size` values; `size` is a multiple of `BLOCK`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encode `values` into the bytes of `out`, and overwrite `values` with the error."""

    @abstractmethod
    def add(self, given: Tensor, total: Tensor) -> None:
        """Decode the bytes `given`, and add the values to `total`."""


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
    """Values quantized to 255 levels between plus and minus the largest magnitude in their block.

    A block with a non-finite value decodes to non-finite values.
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
            # A block of zeros has the scale 0; the clamp avoids 0 / 0.
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
        """Split bytes, blocks before scales, into codes[blocks, BLOCK] and scales[blocks, 1]."""
        num_blocks = len(given) // (BLOCK + 4)
        codes, scales = given.split([BLOCK * num_blocks, 4 * num_blocks])
        return codes.view(torch.int8).view(-1, BLOCK), scales.view(torch.float32).view(-1, 1)


class RoundedSum(Compressor):
    """Sum of gradient buckets rounded by a `Code`; see the module docstring."""

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
        # `values` [N, slice] is the error of the last step plus the gradient; `encode` overwrites
        # it with the new error, so that one buffer serves both.
        #
        #   | slice 0 -> rank 0 | slice 1 -> rank 1 | slice 2, zeros at its end -> rank 2 |
        values = self._errors[number]
        values[: len(flat)].add_(flat)
        like = torch.empty(0, dtype=torch.uint8, device=flat.device)
        sent = self.comm.empty([self._size, self._code.num_bytes(slice_size)], like)
        for piece, out in zip(values.view(self._size, -1), sent, strict=True):
            self._code.encode(piece, out)
        zero_nonfinite(values)
        received = torch.empty_like(sent)
        hop = self.comm.exchange_start(received, sent, AXIS)
        return Pending(flat, begin=functools.partial(self._finish, number, flat, received, hop))

    def _finish(self, number: int, flat: Tensor, received: Tensor, hop: Pending) -> Pending:
        hop.wait()
        # The same for the second rounding: `total` starts as the error of the sum of the last step.
        total = self._slice_errors[number]
        for piece in received:
            self._code.add(piece, total)
        encoded = torch.empty_like(received[0])
        self._code.encode(total, encoded)
        zero_nonfinite(total)
        gathered = self.comm.all_gather(encoded, AXIS, 0).view(self._size, -1)
        values = torch.zeros_like(total)
        # Every rank decodes the same bytes, also its own slice: it does not keep the exact sum that
        # it has, because the replicas would drift apart. A short bucket has fewer slices than
        # ranks.
        for piece, out in zip(gathered, flat.split(len(total)), strict=False):
            self._code.add(piece, values.zero_())
            out.copy_(values[: len(out)])
        return Pending(flat)

    @override
    def reset_errors(self) -> None:
        self._errors.clear()
        self._slice_errors.clear()
