"""The message format: a line of JSON, then the bytes of each tensor, which are not copied.

Line and tensors have as many frames as a connection's frame size needs; the receiver joins them.
Nothing is pickled, and a message in any other format is refused before it is processed.
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

FRAME_BYTES: Final = 1 << 20
"""Most bytes of a frame, and of a piece of weights (`in_frames`)."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


END: Final = b"\n"
"""End of the header, which has no other such byte."""


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


def answer(kind: str, tensors: Sequence[Tensor] = (), **fields: Any) -> WireMessage:
    """Return a message by the names of its fields."""
    return WireMessage(kind, fields, tensors)


def encode(message: WireMessage, frame_bytes: int = FRAME_BYTES) -> list[Any]:
    """Encode a message as frames of at most `frame_bytes`, without copying bytes of tensors."""
    shapes = [[NAMES[tensor.dtype], tensor.numel()] for tensor in message.tensors]
    header = {"kind": message.kind, "fields": dict(message.fields), "tensors": shapes}
    raw: list[Any] = [tensor.detach().view(torch.uint8).numpy() for tensor in message.tensors]
    parts = [json.dumps(header).encode() + END, *raw]
    return [
        view[at : at + frame_bytes]
        for view in map(memoryview, parts)
        for at in range(0, len(view), frame_bytes)
    ]


def in_frames(flat: Tensor) -> Sequence[Tensor]:
    """Cut a flat tensor into tensors of at most `FRAME_BYTES`, see `num_frames`."""
    return flat.split(FRAME_BYTES // flat.itemsize)


def num_frames(size: int, dtype: torch.dtype) -> int:
    """Return the number of tensors into which `in_frames` cuts one of `size` elements."""
    return max(1, -(-size * dtype.itemsize // FRAME_BYTES))


def decode(frames: list[Any]) -> WireMessage:
    """Decode frames to a message, whose tensors are views of the frames, or join several.

    The list is emptied, so that a frame is freed once it is joined.

    Raises:
        WireError: the frames are not a valid message.
    """
    frames.reverse()
    views = (memoryview(frames.pop()) for _ in range(len(frames)))
    first = bytearray()
    while not first.endswith(END):
        if (view := next(views, None)) is None or len(first) > MOST_HEADER_BYTES:
            raise WireError(f"a header of {len(first)} bytes without an end")
        first += view
    try:
        text = first.decode()
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
    tensors: list[Tensor] = []
    for dtype, size in sizes:
        #     frames    | header ...\n | tensor 0 | tensor 0 | tensor 1 |
        # A tensor begins with a frame of its own; one frame is used in place, several are joined.
        parts, missing = list[memoryview](), size * dtype.itemsize  # begins with the next frame
        while missing > 0 and (view := next(views, None)) is not None:
            parts.append(view)
            missing -= view.nbytes
        if missing:
            due = size * dtype.itemsize
            raise WireError(f"a tensor of {due - missing} bytes; expected {due}")
        is_one = len(parts) == 1 and not parts[0].readonly
        joined = parts[0] if is_one else bytearray().join(parts)
        tensors.append(
            torch.frombuffer(joined, dtype=dtype) if parts else torch.empty(0, dtype=dtype)
        )
    if (view := next(views, None)) is not None:
        raise WireError(f"a frame of {view.nbytes} bytes after the last tensor")
    return WireMessage(kind, fields, tensors)
