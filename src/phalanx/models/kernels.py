"""Device type by which models select kernels: their tensors', or an assumed one on meta tensors.

A forward on the meta device computes nothing, but shows which tensors a forward saves for backward,
provided that it takes the same code path as on the real device.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_ASSUMED: ContextVar[str] = ContextVar("device of meta tensors", default="meta")


_IN_CHUNKS: ContextVar[bool] = ContextVar("chunks of meta tensors", default=False)


@contextmanager
def assumed_device(device_type: str, *, in_chunks: bool = False) -> Generator[None]:
    """Run models on the meta device with the code paths of "cpu" or "cuda".

    Unless `in_chunks`, the loss processes all rows at once, which runs fewer operators.
    """
    tokens = _ASSUMED.set(device_type), _IN_CHUNKS.set(in_chunks)
    try:
        yield
    finally:
        _ASSUMED.reset(tokens[0])
        _IN_CHUNKS.reset(tokens[1])


def device_type(x: Tensor) -> str:
    """Return the device type whose kernels x selects: `assumed_device` for a meta tensor."""
    return _ASSUMED.get() if x.is_meta else x.device.type


def chunked_type(x: Tensor) -> str:
    """Return the device type whose chunk size the loss uses: "meta" on meta unless `in_chunks`."""
    return _ASSUMED.get() if x.is_meta and _IN_CHUNKS.get() else x.device.type


def chunk_starts(x: Tensor, num_rows: int) -> list[int]:
    """Return the first row of each chunk of `num_rows` rows of x.

    On the meta device only the first two chunks and the last are returned; the others allocate and
    free tensors of the same sizes.
    """
    starts = [*range(0, len(x), num_rows)]
    return [*starts[:2], *starts[2:][-1:]] if x.is_meta else starts
