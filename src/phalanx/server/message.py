"""What a message is: a frame of JSON, and a frame for each tensor, whose bytes are not copied.

Nothing is pickled, and anything else is refused before anything is done with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.errors import PhalanxError

MOST_HEADER_BYTES: Final = 1 << 20
MOST_FRAMES: Final = 1 << 14

FRAME_BYTES: Final = 1 << 20
"""Bytes of a frame of weights: one is encrypted while the one before is sent."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class WireError(PhalanxError):
    """Bytes that are no message."""


@dataclass(frozen=True)
class WireMessage:
    """What one end sends another.

    Attributes:
        kind: what it is.
        fields: values that JSON knows.
        tensors: flat and contiguous, of a data type in `DTYPES`.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: Sequence[Tensor] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise WireError(f"a message '{self.kind}' lacks '{name}'")
        return self.fields[name]

    def text(self, name: str) -> str:
        """Return a field that has to be text."""
        found = self[name]
        if not isinstance(found, str):
            raise WireError(f"'{name}' of a message '{self.kind}' is no text")
        return found


def encode(message: WireMessage) -> list[Any]:
    """Return the frames of a message; the bytes of its tensors are not copied."""
    shapes = [[NAMES[tensor.dtype], tensor.numel()] for tensor in message.tensors]
    header = {"kind": message.kind, "fields": dict(message.fields), "tensors": shapes}
    return [json.dumps(header).encode(), *(_bytes_of(tensor) for tensor in message.tensors)]


def in_frames(flat: Tensor) -> Sequence[Tensor]:
    """Cut a flat tensor into tensors of a frame each, see `num_frames`."""
    return flat.split(FRAME_BYTES // flat.itemsize)


def num_frames(size: int, dtype: torch.dtype) -> int:
    """Return how many frames a flat tensor of `size` elements is cut into."""
    return max(1, -(-size * dtype.itemsize // FRAME_BYTES))


def decode(frames: Sequence[Any]) -> WireMessage:
    """Return the message of some frames, whose tensors are views of them.

    Raises:
        WireError: they are no message.
    """
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise WireError(f"a message of {len(frames)} frames; expected 1 to {MOST_FRAMES}")
    first = memoryview(frames[0])
    if first.nbytes > MOST_HEADER_BYTES:
        raise WireError(f"a header of {first.nbytes} bytes; at most {MOST_HEADER_BYTES}")
    try:
        text = bytes(first).decode()
        header = json.loads(text)
        if "\\u" in text:  # JSON lets half of a surrogate pair through, which no text can hold
            json.dumps(header, ensure_ascii=False).encode()
        kind, fields, shapes = header["kind"], header["fields"], header["tensors"]
        sizes = [(DTYPES[name], size) for name, size in shapes]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header that cannot be read: {type(error).__name__}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireError("a header whose kind is no text, or whose fields are none")
    if not all(type(size) is int for _, size in sizes):
        raise WireError("a header with a size that is no whole number")
    if len(sizes) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} tensors came; the header has {len(sizes)}")
    tensors: list[Tensor] = []
    for (dtype, size), frame in zip(sizes, frames[1:], strict=True):
        view = memoryview(frame)
        if view.nbytes != size * dtype.itemsize:
            raise WireError(f"a tensor of {view.nbytes} bytes; expected {size} x {dtype.itemsize}")
        tensors.append(_tensor_of(view, dtype))
    return WireMessage(kind, fields, tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    raw: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(raw)


def _tensor_of(view: memoryview, dtype: torch.dtype) -> Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    writable = bytearray(view) if view.readonly else view
    return torch.frombuffer(writable, dtype=dtype)
