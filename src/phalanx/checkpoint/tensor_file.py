"""Write safetensors files as a stream of tensors, hashed while writing; open them for reading.

    8 bytes   length of the header
    header    JSON: {name: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}}
    data      the tensors' bytes, in the order of the header

https://github.com/huggingface/safetensors#format. The library's writer is not used, because it
needs all tensors in memory at once. Its reader is used: it checks the header before it allocates
memory, and runs no code from the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.untrusted import brief, check_plain
from phalanx.errors import CheckpointError
from phalanx.object_store import get, stream
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
"""dtype by its name in the safetensors format."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Name in the safetensors format by dtype, for each dtype that can be saved."""

CHUNK_BYTES: Final = 8 << 20
"""Bytes that are hashed and written in one call."""

BLOCK_BYTES: Final = CHUNK_BYTES
"""Bytes of an object that have a checksum of their own in the manifest; part of the format."""

NUM_REQUESTS: Final = 8
"""Blocks of an object that are read at once."""

SYNC_BYTES: Final = 256 << 20
"""Bytes between two fsync calls, so that reported progress reflects a slow disk."""


@dataclass(frozen=True)
class TensorInfo:
    """dtype and shape of a tensor, as in the header of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors sorted by falling item size, so that each is aligned in the file."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    pieces: Iterable[torch.Tensor],
    moved: Callable[[int], None] | None = None,
) -> Checksum:
    """Write a file and sync it to disk; return the checksum of the data passed to the writes.

    Args:
        path: file to write.
        tensors: header entries, in the order of the data.
        pieces: CPU tensors of any shapes whose bytes, concatenated, are the data of `tensors`.
        moved: called after each chunk with the bytes written so far.

    Raises:
        OSError: the write failed, for example because the disk is full; names the file.
    """
    head = _head(tensors)
    sha256, num_bytes, synced_bytes = hashlib.sha256(), 0, 0
    try:
        with path.open("wb", buffering=0) as file:
            for chunk in _chunks(head, pieces):
                sha256.update(chunk)  # releases the GIL
                # `write` without a buffer may take a part of a chunk, as at the limit of a disk.
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
    _check_size(num_bytes, head, tensors)
    return num_bytes, sha256.hexdigest()


def write_object(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    pieces: Callable[[], Iterable[torch.Tensor]],
    moved: Callable[[int], None],
) -> tuple[Checksum, list[str]]:
    """Write a file to the address of `path`; return its checksum, and the sha256 of each block.

    `pieces` returns the pieces of `write`; called again if the store fails, see `stream`.

    Raises:
        StoreError: the store failed each time.
    """
    head = _head(tensors)
    whole, blocks, num_bytes = hashlib.sha256(), list[Any](), 0

    def chunks() -> Generator[memoryview]:
        nonlocal whole, num_bytes
        whole, num_bytes = hashlib.sha256(), 0
        blocks.clear()
        for chunk in _chunks(head, pieces()):
            whole.update(chunk)
            rest = chunk
            while rest:
                if num_bytes % BLOCK_BYTES == 0:
                    blocks.append(hashlib.sha256())
                part = rest[: BLOCK_BYTES - num_bytes % BLOCK_BYTES]
                blocks[-1].update(part)
                num_bytes, rest = num_bytes + len(part), rest[len(part) :]
            yield chunk
            moved(num_bytes)

    stream(path, chunks)
    _check_size(num_bytes, head, tensors)
    return (num_bytes, whole.hexdigest()), [block.hexdigest() for block in blocks]


def _head(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the length and the header of a file, padded to a multiple of 8 bytes.

    With the tensors by falling item size each is then aligned.
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
    return len(text).to_bytes(8, "little") + text


def _check_size(num_bytes: int, head: bytes, tensors: Mapping[str, TensorInfo]) -> None:
    expected = len(head) + sum(info.num_bytes for info in tensors.values())
    assert num_bytes == expected, "the pieces are not what was announced"


def _chunks(head: bytes, pieces: Iterable[torch.Tensor]) -> Iterable[memoryview]:
    yield memoryview(head)
    for piece in pieces:  # no variable for its bytes: it would keep the piece alive with the next
        for begin in range(0, piece.nbytes, CHUNK_BYTES):
            yield bytes_of(piece)[begin : begin + CHUNK_BYTES]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view, not a copy, of the bytes of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def open_file(path: Path, descriptor: int | None = None) -> Any:
    """Open a file by `safetensors.safe_open`, which memory-maps it, to read its tensors.

    With the `descriptor` of a regular file, open that file, which may have been removed.

    Raises:
        CheckpointError: it is damaged or not a regular file, or a name has control characters.
    """
    try:
        if descriptor is None:
            open_regular(path, may_be_link=True).close()  # refuses a pipe, which would block
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    source = path if descriptor is None else Path(f"/dev/fd/{descriptor}")
    try:
        file: Any = safe_open(source, framework="pt")
        check_plain(file.keys())
        return file
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {brief(error, 200)}; it is damaged or incomplete; fetch it again"
        ) from error


class ObjectFile:
    """A safetensors file in an object store, of which only the blocks in use are read.

    They are compared with their sha256 in the manifest, and written to a file with holes on this
    host, which `safetensors` reads.
    """

    def __init__(self, path: Path, num_bytes: int, blocks: Sequence[str]) -> None:
        """Read the header.

        Raises:
            CheckpointError: it is damaged, or there are not as many blocks as the file has.
            StoreError: the store failed each time.
        """
        self._path, self._blocks, self._have = path, blocks, set[int]()
        self._sparse = tempfile.TemporaryFile()
        if len(blocks) != -(-num_bytes // BLOCK_BYTES):
            raise CheckpointError(
                f"cannot read {path}: its manifest has {len(blocks)} blocks of it"
            )
        self._sparse.truncate(num_bytes)
        self._fetch(0, 8)
        self._begin = 8 + int.from_bytes(os.pread(self._sparse.fileno(), 8, 0), "little")
        self._fetch(8, self._begin)
        self._file = open_file(path, self._sparse.fileno())  # checks the header
        self._header = json.loads(os.pread(self._sparse.fileno(), self._begin - 8, 8))

    def _fetch(self, begin: int, end: int) -> None:
        """Fetch the blocks of the bytes from `begin` to `end`."""
        size, numbers = os.fstat(self._sparse.fileno()).st_size, range(len(self._blocks))
        wanted = set(numbers[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)]).difference(self._have)

        def fetch(number: int) -> None:
            start = number * BLOCK_BYTES
            stop, sha256 = min(start + BLOCK_BYTES, size), self._blocks[number]
            os.pwrite(self._sparse.fileno(), get(self._path, start, stop, sha256), start)

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            list(pool.map(fetch, wanted))
        self._have |= wanted

    def get_slice(self, name: str, rows: slice = slice(None)) -> Any:
        """Fetch the rows of a tensor, or all; return the tensor, to be indexed."""
        stored, entry = self._file.get_slice(name), self._header[name]
        num_rows, (begin, end) = (entry["shape"] or [1])[0], entry["data_offsets"]
        row_bytes, (first, last, _) = (end - begin) // max(1, num_rows), rows.indices(num_rows)
        begin += self._begin
        self._fetch(begin + first * row_bytes, begin + last * row_bytes)
        return stored
