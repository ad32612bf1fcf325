"""Which device's kernels a model runs: the device of its tensors, or one named for meta tensors.

A forward on the meta device computes nothing, but it shows what a forward would keep, if it takes
the same way as on the device it stands for.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_ASSUMED: ContextVar[str] = ContextVar("device of meta tensors", default="meta")


_IN_CHUNKS: ContextVar[bool] = ContextVar("chunks of meta tensors", default=False)


@contextmanager
def assumed(device_type: str, *, in_chunks: bool = False) -> Generator[None]:
    """Run models on the meta device as if their tensors were on a "cpu" or on "cuda".

    The loss has all rows at once there, which takes fewer operators, if it is not `in_chunks`.
    """
    tokens = _ASSUMED.set(device_type), _IN_CHUNKS.set(in_chunks)
    try:
        yield
    finally:
        _ASSUMED.reset(tokens[0])
        _IN_CHUNKS.reset(tokens[1])


def device_type(x: Tensor) -> str:
    """Return the type of the device whose kernels compute with x."""
    return _ASSUMED.get() if x.is_meta else x.device.type


def chunked_type(x: Tensor) -> str:
    """Return the type of the device whose chunks of rows the loss takes."""
    return _ASSUMED.get() if x.is_meta and _IN_CHUNKS.get() else x.device.type


def chunk_starts(x: Tensor, num_rows: int) -> list[int]:
    """Return where chunks of `num_rows` rows of x begin.

    On the meta device the first two and the last: what the others make and free is as large.
    """
    starts = [*range(0, len(x), num_rows)]
    return [*starts[:2], *starts[2:][-1:]] if x.is_meta else starts
