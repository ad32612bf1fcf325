"""Records of a file: the rows of .jsonl, .json, .parquet and .arrow as dicts, each with its place.

FORMATS     .jsonl one object a line; .json a list of objects; .parquet; .arrow as `datasets`
            saves it, mapped into memory; .txt .md .py have text and no records
PACKED      each of them but .parquet and .arrow may end with .gz or .zst besides
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from typing_extensions import override

from phalanx.errors import DataError, nearest

TEXTS: Final = (".txt", ".md", ".py")
"""Suffixes of files that are one text each."""

TABLES: Final = (".parquet", ".arrow")
"""Suffixes of tables of rows and columns."""

FORMATS: Final = (*TEXTS, ".jsonl", ".json", *TABLES)
"""Suffixes of the files that can be read."""

PACKED: Final = (".gz", ".zst")
"""Suffixes that may follow those of text and JSON."""


@dataclass(frozen=True)
class Record:
    """A row of a file; `name` is the file's relative name with `:line` or `:row`, from 1.

    `place` is the file with its line or row, for messages.
    """

    name: str
    place: str
    fields: dict[str, Any]


def format_of(file: Path) -> str | None:
    """Return the suffix among FORMATS that says how to read a file, or None."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        return suffixes[-2] if suffixes[-2:-1] and suffixes[-2] in FORMATS[:-2] else None
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_records(file: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file in order, and hold one batch of rows in memory.

    A .json file is read whole.

    Args:
        file: a file of JSON, or a table.
        name: the file's name in the names of the records.
        columns: the only columns of a table to read, which must exist; None for all.

    Raises:
        DataError: the file cannot be read, is damaged, or has no records.
    """
    if format_of(file) == ".jsonl":
        yield from _lines(file, name)
    elif format_of(file) == ".json":
        with open_unpacked(file) as opened:
            records = _parsed(decode(opened.read(), file), f"{file}", "a list of records")
        if not isinstance(records, list):
            raise DataError(f"{file} is a {type(records).__name__}; expected a list of records")
        for number, fields in enumerate(records, start=1):
            yield _record(fields, f"{name}:{number}", f"{file}, record {number}")
    else:
        yield from _rows(file, name, columns)


def is_list(file: Path) -> bool:
    """Return whether a .json file begins as a list does."""
    with open_unpacked(file) as opened:
        return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"[", b"")


@contextmanager
def open_unpacked(file: Path) -> Generator[IO[bytes]]:
    """Open a file for reading; decompress one of PACKED.

    Raises:
        DataError: the file cannot be read, or its compressed content is damaged or cut short.
    """
    kind, damages = file.suffix.lower(), [EOFError, zlib.error, gzip.BadGzipFile]
    try:
        with file.open("rb") as raw:
            if kind == ".gz":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield io.BufferedReader(unpacked, 1 << 17)  # type: ignore[arg-type]
            elif kind == ".zst":
                zstandard = require("zstandard", "zstd", file)
                damages.append(zstandard.ZstdError)
                yield io.BufferedReader(_Zstd(raw, zstandard), 1 << 17)
            else:
                yield raw
    except tuple(damages) as error:
        raise DataError(f"{file} is not a {kind} file, or it is damaged: {error}") from error
    except OSError as error:
        raise unreadable(file, error) from error


class _Zstd(io.RawIOBase):
    """Decompresses frames; unlike zstandard's own reader, it raises where a frame is cut short."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file, self._library, self._frame, self._left = file, zstandard, None, b""
        self._text = memoryview(b"")

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        while not self._text:
            self._left = self._left or self._file.read(1 << 17)
            if not self._left:
                if self._frame is not None:
                    raise EOFError("the file ended before the end of its last frame")
                return 0
            frame: Any = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._text = memoryview(frame.decompress(self._left))
            self._frame, self._left = (None, frame.unused_data) if frame.eof else (frame, b"")
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def require(package: str, extra: str, file: object) -> Any:
    """Import a package that an input needs.

    Raises:
        DataError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"cannot read {file}: it needs {package.partition('.')[0]}; install it with "
            f"pip install 'phalanx-train[{extra}]'"
        ) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a path that the operating system does not let this user read."""
    return DataError(
        f"cannot read {path}: {error.strerror or error}; expected a path this user may read"
    )


def refuse_zero(raw: bytes, file: Path, start: int) -> None:
    """Raise DataError if bytes that should be text have a NUL; `start` is their offset."""
    zero = raw.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"{file} is not text: it has a NUL at byte {start + zero}; expected UTF-8 (convert "
            f"UTF-16 first, or leave the file out)"
        )


def decode(raw: bytes, file: Path, start: int = 0) -> str:
    """Decode UTF-8; `start` is the offset of `raw` in the file, for the error message.

    Raises:
        DataError: the bytes are not UTF-8, or have a NUL.
    """
    refuse_zero(raw, file, start)
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {start + error.start} is 0x{raw[error.start]:02x} "
            f"({error.reason}); convert the file to UTF-8, or leave it out"
        ) from error


def _lines(file: Path, name: str) -> Iterator[Record]:
    offset = 0
    with open_unpacked(file) as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                place = f"{file}, line {number}"
                fields = _parsed(decode(raw, file, offset), place, "one object a line")
                yield _record(fields, f"{name}:{number}", place)
            offset += len(raw)


def _parsed(text: str, place: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # too long a number; too deeply nested
        what = f"{error}"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        raise DataError(f"{place} is not valid JSON: {what}; expected {expected}") from error


def _record(fields: Any, name: str, place: str) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{place} is a {type(fields).__name__}; expected an object with fields")
    return Record(name, place, fields)


def _rows(file: Path, name: str, columns: Sequence[str] | None) -> Iterator[Record]:
    """Yield the rows of a table."""
    row = 0
    with batches(file, columns) as tables:
        for table in tables:
            try:
                values: list[dict[str, Any]] = table.to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, rows {row + 1} to {row + table.num_rows}: a string is not UTF-8: "
                    f"{error.reason}; convert it to UTF-8"
                ) from error
            for fields in values:
                row += 1
                yield Record(f"{name}:{row}", f"{file}, row {row}", fields)


@contextmanager
def batches(file: Path, columns: Sequence[str] | None = None) -> Generator[Iterator[Any]]:
    """Open a table; its record batches of pyarrow have at most 1,024 rows, and only `columns`.

    Raises:
        DataError: the file cannot be read, is damaged, or has no such column.
    """
    kind = file.suffix.lower()
    arrow = require("pyarrow", "parquet", file)
    try:
        if kind == ".parquet":
            with require("pyarrow.parquet", "parquet", file).ParquetFile(file) as table:
                check_columns(columns or (), table.schema_arrow.names, f"{file}")
                yield table.iter_batches(batch_size=1024, columns=columns)
        else:
            with arrow.memory_map(str(file)) as mapped:
                try:
                    reader = arrow.ipc.open_stream(mapped)
                except arrow.ArrowInvalid:  # the format of a file with an index, as of Feather
                    mapped.seek(0)
                    reader = arrow.ipc.open_file(mapped)
                check_columns(columns or (), reader.schema.names, f"{file}")
                yield _cut(reader, columns)
    except (OSError, arrow.ArrowException) as error:  # pyarrow raises OSError for bad content
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file, error) from error
        raise DataError(f"{file} is not a {kind[1:]} file, or it is damaged: {error}") from error


def _cut(reader: Any, columns: Sequence[str] | None) -> Iterator[Any]:
    is_stream = not hasattr(reader, "num_record_batches")
    every = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    for batch in every:
        chosen = batch if columns is None else batch.select(list(columns))
        yield from (chosen.slice(at, 1024) for at in range(0, chosen.num_rows, 1024))


def check_columns(wanted: Sequence[str], columns: Sequence[str], place: str) -> None:
    """Raise DataError if a table or a record lacks a column."""
    for column in wanted:
        if column not in columns:
            raise DataError(
                f"{place} has no field '{column}'{nearest(column, columns)}; its fields are "
                f"{', '.join(map(repr, columns)) or 'none'}"
            )
