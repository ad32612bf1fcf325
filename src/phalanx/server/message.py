"""The message format: a JSON frame, then the frames of each tensor, whose bytes are not copied.

A tensor has one frame, or more if it is larger than `FRAME_BYTES`; the receiver joins them.
Nothing is pickled, and a message in any other format is refused before it is processed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.errors import PhalanxError

PROTOCOL: Final = 5
"""Version of the messages. The coordinator refuses members of another version, and a worker that
joins refuses such a coordinator."""

MOST_HEADER_BYTES: Final = 1 << 20
MOST_FRAMES: Final = 1 << 14

FRAME_BYTES: Final = 1 << 20
"""Most bytes of a frame: few, so that a connection without the secret cannot fill the memory, and
encrypting one frame overlaps sending the previous."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class WireError(PhalanxError):
    """Received bytes are not a valid message."""


@dataclass(frozen=True)
class WireMessage:
    """A message between two processes of a job.

    Attributes:
        kind: kind of request or answer.
        fields: JSON-serializable values by name.
        tensors: flat contiguous tensors with a dtype in `DTYPES`.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: Sequence[Tensor] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise WireError(f"a message '{self.kind}' lacks '{name}'")
        return self.fields[name]

    def text(self, name: str) -> str:
        """Return a field that must be a string; raise WireError if it is not."""
        found = self[name]
        if not isinstance(found, str):
            raise WireError(f"'{name}' of a message '{self.kind}' is not a string")
        return found


def encode(message: WireMessage) -> list[Any]:
    """Encode a message as frames, without copying the bytes of its tensors."""
    shapes = [[NAMES[tensor.dtype], tensor.numel()] for tensor in message.tensors]
    header = {"kind": message.kind, "fields": dict(message.fields), "tensors": shapes}
    return [json.dumps(header).encode(), *(f for t in message.tensors for f in _frames_of(t))]


def in_frames(flat: Tensor) -> Sequence[Tensor]:
    """Cut a flat tensor into tensors of one frame each, see `num_frames`."""
    return flat.split(FRAME_BYTES // flat.itemsize)


def num_frames(size: int, dtype: torch.dtype) -> int:
    """Return the number of frames into which a flat tensor of `size` elements is cut."""
    return max(1, -(-size * dtype.itemsize // FRAME_BYTES))


def decode(frames: Sequence[Any]) -> WireMessage:
    """Decode frames to a message, whose tensors are views of the frames.

    Raises:
        WireError: the frames are not a valid message.
    """
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise WireError(f"a message of {len(frames)} frames; expected 1 to {MOST_FRAMES}")
    first = memoryview(frames[0])
    if first.nbytes > MOST_HEADER_BYTES:
        raise WireError(f"a header of {first.nbytes} bytes; at most {MOST_HEADER_BYTES}")
    try:
        text = bytes(first).decode()
        header = json.loads(text)
        if "\\u" in text:  # JSON accepts half a surrogate pair, which cannot be encoded
            json.dumps(header, ensure_ascii=False).encode()
        kind, fields, shapes = header["kind"], header["fields"], header["tensors"]
        sizes = [(DTYPES[name], size) for name, size in shapes]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"a header that cannot be read: {type(error).__name__}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireError("a header whose kind is not a string, or whose fields are not a dict")
    if not all(type(size) is int for _, size in sizes):
        raise WireError("a header with a size that is not a whole number")
    parts = [_num_parts(size * dtype.itemsize) for dtype, size in sizes]
    if sum(parts) != len(frames) - 1:
        raise WireError(
            f"{len(frames) - 1} frames of tensors; the header's {len(sizes)} tensors have "
            f"{sum(parts)}"
        )
    tensors: list[Tensor] = []
    rest = iter(frames[1:])
    for (dtype, size), num in zip(sizes, parts, strict=True):
        views = [memoryview(frame) for frame in islice(rest, num)]
        num_bytes = sum(view.nbytes for view in views)
        if num_bytes != size * dtype.itemsize:
            raise WireError(f"a tensor of {num_bytes} bytes; expected {size} x {dtype.itemsize}")
        tensors.append(_tensor_of(views, dtype))
    return WireMessage(kind, fields, tensors)


def _num_parts(num_bytes: int) -> int:
    """Return the number of frames of a tensor."""
    return max(1, -(-num_bytes // FRAME_BYTES))


def _frames_of(tensor: Tensor) -> list[memoryview]:
    if not tensor.numel():
        return [memoryview(b"")]
    raw: Any = tensor.detach().view(torch.uint8).numpy()
    view = memoryview(raw)
    return [view[at : at + FRAME_BYTES] for at in range(0, len(view), FRAME_BYTES)]


def _tensor_of(views: Sequence[memoryview], dtype: torch.dtype) -> Tensor:
    whole = views[0]
    if len(views) > 1 or whole.readonly:
        whole = bytearray().join(views)
    return torch.frombuffer(whole, dtype=dtype) if len(whole) else torch.empty(0, dtype=dtype)
