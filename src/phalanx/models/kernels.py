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


@contextmanager
def assumed(device_type: str) -> Generator[None]:
    """Run models on the meta device as if their tensors were on a "cpu" or on "cuda"."""
    token = _ASSUMED.set(device_type)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def device_type(x: Tensor) -> str:
    """Return the type of the device whose kernels compute with x."""
    return _ASSUMED.get() if x.is_meta else x.device.type
