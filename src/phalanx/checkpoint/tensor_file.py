"""Write safetensors files as their tensors come, hashed on the way; read parts of them.

    8 bytes   length of the header
    header    JSON: {name: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}}
    data      the tensors' bytes, in the order of the header

https://github.com/huggingface/safetensors#format. The library's own writer wants all tensors at
once; its reader checks a header before it allocates anything, and runs no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.foreign import brief, check_plain
from phalanx.errors import CheckpointError
from phalanx.storage import Checksum, open_regular

SUFFIX: Final = ".safetensors"

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Data types by the names that the format gives them."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the data types that can be saved."""

CHUNK_BYTES: Final = 8 << 20
"""Bytes that are hashed and written at a time."""

SYNC_BYTES: Final = 256 << 20
"""Bytes after which the disk must hold the written part: a slow disk is seen to make progress."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors so that each begins at a multiple of its items' size."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    pieces: Iterable[torch.Tensor],
    moved: Callable[[int], None] | None = None,
) -> Checksum:
    """Write a file and have the disk hold it; return the checksum of what was meant to be written.

    The data comes in `pieces` of the CPU of any shapes, one after the other, in the order of
    `tensors`. `moved` is called now and then with the bytes written so far.

    Raises:
        OSError: the disk is full, say; names the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        begin, end = end, end + info.num_bytes
        header[name] = {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256, num_bytes, synced_bytes = hashlib.sha256(), 0, 0
    try:
        with path.open("wb", buffering=0) as file:
            for chunk in _chunks(len(text).to_bytes(8, "little") + text, pieces):
                sha256.update(chunk)  # lets other threads run
                rest = chunk
                while rest:
                    rest = rest[file.write(rest) :]
                num_bytes += len(chunk)
                if num_bytes - synced_bytes >= SYNC_BYTES:
                    os.fsync(file.fileno())
                    synced_bytes = num_bytes
                if moved is not None:
                    moved(num_bytes)
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    assert num_bytes == 8 + len(text) + end, "the pieces are not what was announced"
    return num_bytes, sha256.hexdigest()


def _chunks(head: bytes, pieces: Iterable[torch.Tensor]) -> Iterable[memoryview]:
    yield memoryview(head)
    for piece in pieces:  # without a variable for its bytes, which would hold it beside the next
        for begin in range(0, piece.nbytes, CHUNK_BYTES):
            yield bytes_of(piece)[begin : begin + CHUNK_BYTES]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the CPU, not copied."""
    flat = tensor.detach().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def open_file(path: Path) -> Any:
    """Open a file to read its tensors: `safe_open` of the library, which maps it into memory.

    Raises:
        CheckpointError: it is damaged or no regular file, or a name has control characters.
    """
    try:
        open_regular(path, may_be_link=True).close()  # a pipe would be waited for
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        file: Any = safe_open(path, framework="pt")
        check_plain(file.keys())
        return file
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {brief(error, 200)}; it is damaged or not whole, fetch it again"
        ) from error
