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
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.untrusted import brief, check_plain
from phalanx.errors import CheckpointError
from phalanx.object_store import address_of, get, stream
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
    blocks: list[str] | None = None,
) -> Checksum:
    """Write a file and sync it to disk; return the checksum of the data passed to the writes.

    Write it straight to the store if its path has an address.

    Args:
        path: file to write.
        tensors: header entries, in the order of the data.
        pieces: CPU tensors of any shapes whose bytes, concatenated, are the data of `tensors`;
            iterated again for each try at an address.
        moved: called after each chunk with the bytes written so far.
        blocks: filled with the sha256 of each BLOCK_BYTES; None leaves them out.

    Raises:
        OSError: the write failed, for example because the disk is full; names the file.
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
    # The header is padded so that the data begins at a multiple of 8 bytes, and with the tensors by
    # falling item size each is aligned.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256, num_bytes, digests = hashlib.sha256(), 0, list[Any]()

    def chunks() -> Generator[memoryview]:
        nonlocal sha256, num_bytes
        sha256, num_bytes = hashlib.sha256(), 0
        digests.clear()
        for chunk in _chunks(len(text).to_bytes(8, "little") + text, pieces):
            sha256.update(chunk)  # releases the GIL
            at, rest = num_bytes, chunk if blocks is not None else chunk[:0]
            while rest:
                digests.extend([] if at % BLOCK_BYTES else [hashlib.sha256()])
                part = rest[: BLOCK_BYTES - at % BLOCK_BYTES]
                digests[-1].update(part)
                at, rest = at + len(part), rest[len(part) :]
            yield chunk
            num_bytes += len(chunk)
            if moved is not None:
                moved(num_bytes)

    try:
        (_to_disk if address_of(path) is None else stream)(path, chunks)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    assert num_bytes == 8 + len(text) + end, "the pieces are not what was announced"
    if blocks is not None:
        blocks.extend(digest.hexdigest() for digest in digests)
    return num_bytes, sha256.hexdigest()


def _to_disk(path: Path, chunks: Callable[[], Iterable[memoryview]]) -> None:
    unsynced_bytes = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks():
            # `write` without a buffer may take a part of a chunk, as at the limit of a disk.
            rest = chunk
            while rest:
                rest = rest[file.write(rest) :]
            unsynced_bytes += len(chunk)
            if unsynced_bytes >= SYNC_BYTES:
                os.fsync(file.fileno())
                unsynced_bytes = 0
        os.fsync(file.fileno())


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
    host, which `safetensors` reads. Of a checkpoint that was copied from a disk, whose manifest has
    no blocks, the whole file is read and compared.
    """

    def __init__(self, path: Path, expected: Checksum, blocks: Sequence[str]) -> None:
        """Read the header.

        Raises:
            CheckpointError: it is damaged, or `blocks` has another length.
            StoreError: the store failed each time.
        """
        num_bytes, sha256 = expected
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        self._path, self._blocks = path, blocks or num_blocks * [""]
        self._sparse, self._present = tempfile.TemporaryFile(), set[int]()
        self._sparse.truncate(num_bytes)
        self.close = weakref.finalize(self, self._sparse.close)
        self._fetch(0, 8 if blocks else num_bytes)
        is_whole = blocks or hashlib.file_digest(self._sparse, "sha256").hexdigest() == sha256
        if len(self._blocks) != num_blocks or not is_whole:
            raise CheckpointError(f"{path} is damaged: it or its blocks differ from the manifest")
        file, self._begin = self._sparse.fileno(), 8
        self._begin += int.from_bytes(os.pread(file, 8, 0), "little")
        self._fetch(8, self._begin)
        self._file = open_file(path, file)  # checks the header
        self._header = json.loads(os.pread(file, self._begin - 8, 8))

    def _fetch(self, begin: int, end: int) -> None:
        """Fetch the blocks of the bytes from `begin` to `end`."""
        file, numbers = self._sparse.fileno(), range(len(self._blocks))
        needed = {*numbers[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)]} - self._present

        def fetch(number: int) -> None:
            start = number * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, os.fstat(file).st_size)
            os.pwrite(file, get(self._path, start, stop, self._blocks[number]), start)

        try:
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                list(pool.map(fetch, needed))
        except FileNotFoundError as error:  # as when the run has removed the checkpoint
            raise CheckpointError(f"{self._path} is missing") from error
        self._present |= needed

    def get_slice(self, name: str, rows: slice = slice(None)) -> Any:
        """Fetch the rows of a tensor; return the slice of `safetensors`, to index these rows."""
        stored, entry = self._file.get_slice(name), self._header[name]
        (begin, end), num_rows = entry["data_offsets"], max(1, *entry["shape"][:1], 1)
        first, last, _ = rows.indices(num_rows)
        row_bytes, begin = (end - begin) // num_rows, self._begin + begin
        self._fetch(begin + first * row_bytes, begin + last * row_bytes)
        return stored
