"""A token file: a header of 32 bytes, then the ids in 2 or 4 bytes each, little-endian.

```
| b"PHXTOKEN" | version u32 | width u32 | number of tokens u64 | end-of-text id u64 | ids ... |
```

The ids of version 1 are `E d1 E d2 ... E`: the end-of-text token E precedes each document and
follows the last, so that the first token of each document is predicted from E.

In version 2, of chats, an id has two marks in its highest bits: `TRAINED`, this token is a label,
and `OPENS`, it opens a conversation. There are no separators.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError

_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"PHXTOKEN"
_VERSION, _MARKED_VERSION = 1, 2
_MARKED = (_MARKED_VERSION, 4)

TRAINED, OPENS = 1 << 31, 1 << 30
"""Marks in a marked file."""


@dataclass(frozen=True)
class TokenFile:
    """The header of a token file, small enough to send to other processes.

    `num_tokens` includes separators, which have the id `end_id`; an id takes `width_bytes`, 1 to 8.
    The ids start at `offset_bytes`. With `parts`, it stands for these files, one after another.
    With `is_marked`, ids have the marks `TRAINED` and `OPENS`.
    """

    path: Path
    num_tokens: int
    end_id: int
    width_bytes: int
    offset_bytes: int = _HEADER.size
    parts: tuple[TokenFile, ...] = ()
    is_marked: bool = False

    @property
    def leaves(self) -> list[TokenFile]:
        """The files that this one stands for: itself without `parts`."""
        return [leaf for part in self.parts for leaf in part.leaves] if self.parts else [self]

    def map(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Map the ids of a file without parts into memory; pages are read on first access."""
        if self.num_tokens == 0:
            return np.zeros(0, dtype=np.uint16)  # a map cannot be empty
        return np.memmap(
            self.path,
            dtype=f"<u{self.width_bytes}",
            mode="r",
            offset=self.offset_bytes,
            shape=(self.num_tokens,),
        )


def joined(files: Sequence[TokenFile]) -> TokenFile:
    """Return a file that stands for several, which have the same separator."""
    if len(files) == 1:
        return files[0]
    num_tokens = sum(file.num_tokens for file in files)
    return replace(files[0], num_tokens=num_tokens, parts=tuple(files))


def open_token_file(path: Path) -> TokenFile:
    """Read the header of a token file.

    Raises:
        DataError: the file cannot be read, is not a token file, or is truncated.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADER.size)
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read tokens {path}: {error.strerror or error}") from error
    if len(raw) == _HEADER.size:
        magic, version, width_bytes, num_tokens, end_id = _HEADER.unpack(raw)
        is_whole = num_bytes == _HEADER.size + num_tokens * width_bytes
        is_known = magic == _MAGIC and (version == _VERSION or (version, width_bytes) == _MARKED)
        if is_known and width_bytes in (2, 4) and is_whole:
            is_marked = version == _MARKED_VERSION
            return TokenFile(path, num_tokens, end_id, width_bytes, is_marked=is_marked)
    raise DataError(
        f"{path} is not a complete token file of version {_VERSION}; remove it and prepare the "
        "data again"
    )


def width_of(num_ids: int) -> int:
    """Return the bytes per id in a token file of a tokenizer with `num_ids` ids."""
    return 2 if num_ids <= 1 << 16 else 4


class TokenWriter:
    """Writer of a token file; a context manager that ends a file of text with a separator."""

    def __init__(self, path: Path, *, num_ids: int, end_id: int, is_marked: bool = False) -> None:
        self._width_bytes = 4 if is_marked else width_of(num_ids)
        self._version = _MARKED_VERSION if is_marked else _VERSION
        self._end_id = end_id
        self._num_tokens = 0
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER.size))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._num_tokens and self._version == _VERSION:
                    self.begin_document()
                self._file.seek(0)
                sizes = (self._width_bytes, self._num_tokens, self._end_id)
                self._file.write(_HEADER.pack(_MAGIC, self._version, *sizes))
        finally:
            self._file.close()

    def begin_document(self) -> None:
        """Write the separator that precedes a document."""
        self.write([self._end_id])

    def write(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append ids to the current document."""
        self._file.write(np.array(ids, dtype=f"<u{self._width_bytes}").data)
        self._num_tokens += len(ids)
