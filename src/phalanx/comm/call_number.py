"""Detect mismatched calls by a description of each call, which all ranks compare.

It is a number for shared memory (posted_calls.py), and words for messages (algorithms/running.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from phalanx.comm.reductions import REDUCTIONS
from phalanx.errors import CollectiveMismatch, ConfigError, named

OPS: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "swap", "message", "barrier"),
)

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.complex32),
    # Dtypes below have no reduction; they can only be copied.
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)


def number_of(op: str, dtype: torch.dtype, option: Any = None) -> int:
    """Encode op, dtype and option (reduction or root) as a number that is equal on all ranks.

    Raises:
        ConfigError: shared memory does not carry this data type.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"{op}: shared memory does not support {dtype}; pass tensor.view(torch.uint8), or let "
            "gloo send by --no-shared-memory (shared_memory=False)"
        )
    # bits  0 to 7 op,  8 to 15 dtype,  16 and above reduction or root
    number = [*REDUCTIONS].index(option) if isinstance(option, str) else option or 0
    return OPS.index(op) | DTYPES.index(dtype) << 8 | number << 16


def dtype_of(what: int) -> torch.dtype:
    """Return the dtype of an encoded call."""
    return DTYPES[what >> 8 & 255]


def describe(what: int, num_bytes: int) -> str:
    """Describe an encoded call of `num_bytes` in words, for an error message."""
    op, dtype, number = OPS[what & 255], str(dtype_of(what)).removeprefix("torch."), what >> 16
    option = f" {[*REDUCTIONS][number]}" if op == "all_reduce" else ""
    root = f" with root {number}" if op in ("broadcast", "reduce") else ""
    return f"{op}{option} of {num_bytes // dtype_of(what).itemsize} {dtype}{root}"


def mismatch(calls: Mapping[str, Sequence[int]]) -> CollectiveMismatch:
    """Return the error for different calls: words of a call -> global ranks that make it."""
    (call, ranks), *others = sorted(calls.items(), key=lambda side: min(side[1]))
    sides = [f"{named(ranks)} {'calls' if len(ranks) == 1 else 'call'} {call}"]
    sides += [f"{named(ranks)} {call}" for call, ranks in others]
    return CollectiveMismatch(
        f"{', but '.join(sides)}; each rank must make the same calls, and under fsdp run the same "
        "modules, also experts without rows; --debug-comm, or phalanx.init(debug_comm=True), "
        "reports the place of each call",
        min(ranks),
    )
