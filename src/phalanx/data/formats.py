"""Records of a file: the rows of .jsonl, .json, .parquet and .arrow as dicts, each with its place.

.jsonl has an object a line, .json a list of objects; .arrow is what `datasets` saves, mapped into
memory. All but the tables may be compressed, such as .jsonl.gz. TEXTS are whole files of text.
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

from phalanx.errors import DataError, nearest

TEXTS: Final = (".txt", ".md", ".py")
TABLES: Final = (".parquet", ".arrow")
FORMATS: Final = (*TEXTS, ".jsonl", ".json", *TABLES)
PACKED: Final = (".gz", ".zst")


@dataclass(frozen=True)
class Record:
    """A row: `name` is the file's name and `:row`, from 1; `place` has file and row in words."""

    name: str
    place: str
    fields: dict[str, Any]


def format_of(file: Path) -> str | None:
    """Return the suffix among FORMATS that says how to read a file, or None."""
    *_, before, last = "", "", *(suffix.lower() for suffix in file.suffixes)
    kind = before if last in PACKED else last
    return kind if kind in FORMATS and not (last in PACKED and kind in TABLES) else None


def read_records(file: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file in order; only a .json file is read whole.

    Args:
        file: a file of JSON, or a table.
        name: the file's name in the names of the records.
        columns: fields that each record must have; of a table the only ones that are read.

    Raises:
        DataError: the file cannot be read or is damaged, or a record is none or lacks a field.
    """
    kind = format_of(file)
    read = {".jsonl": _lines, ".json": _list}.get(kind or "")
    unit = {".jsonl": "line", ".json": "record"}.get(kind or "", "row")
    for number, fields in _rows(file, columns) if read is None else read(file):
        place = f"{file}, {unit} {number}"
        if not isinstance(fields, dict):
            raise DataError(f"{place} is a {type(fields).__name__}; expected an object with fields")
        check_columns(columns or (), list(fields), place)
        yield Record(f"{name}:{number}", place, fields)


@contextmanager
def open_unpacked(file: Path) -> Generator[IO[bytes]]:
    """Open a file for reading; decompress one of PACKED.

    Raises:
        DataError: the file cannot be read, or its compressed content is damaged or cut short.
    """
    kind = file.suffix.lower()
    try:
        with file.open("rb") as raw:
            if kind == ".zst":
                arrow = require("pyarrow", "parquet", file)
                unpacked = arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd")
                yield io.BufferedReader(unpacked)  # type: ignore[arg-type]
            else:
                yield gzip.GzipFile(fileobj=raw) if kind == ".gz" else raw  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file, error) from error
        raise DataError(f"{file} is not a {kind} file, or it is damaged: {error}") from error


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
    """Decode UTF-8; `start` is the offset of `raw` in the file, for the error message."""
    refuse_zero(raw, file, start)
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {start + error.start} is 0x{raw[error.start]:02x} "
            f"({error.reason}); convert the file to UTF-8, or leave it out"
        ) from error


def check_columns(wanted: Sequence[str], columns: Sequence[str], place: str) -> None:
    """Raise DataError if a table or a record lacks a column."""
    for column in wanted:
        if column not in columns:
            raise DataError(
                f"{place} has no field '{column}'{nearest(column, columns)}; its fields are "
                f"{', '.join(map(repr, columns)) or 'none'}"
            )


def _list(file: Path) -> Iterator[tuple[int, Any]]:
    with open_unpacked(file) as opened:
        records = _parsed(decode(opened.read(), file), f"{file}", "a list of records")
    if not isinstance(records, list):
        raise DataError(f"{file} is a {type(records).__name__}; expected a list of records")
    yield from enumerate(records, start=1)


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    offset = 0
    with open_unpacked(file) as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                text = decode(raw, file, offset)
                yield number, _parsed(text, f"{file}, line {number}", "one object a line")
            offset += len(raw)


def _parsed(text: str, place: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # too long a number; too deeply nested
        what = f"{error}"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        raise DataError(f"{place} is not valid JSON: {what}; expected {expected}") from error


def _rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    row = 0
    with batches(file, columns) as tables:
        for table in tables:
            try:
                yield from enumerate(table.to_pylist(), start=row + 1)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, rows {row + 1} to {row + table.num_rows}: a string is not UTF-8: "
                    f"{error.reason}; convert it to UTF-8"
                ) from error
            row += table.num_rows


@contextmanager
def batches(file: Path, columns: Sequence[str] | None = None) -> Generator[Iterator[Any]]:
    """Open a table; yield its record batches of pyarrow, with `columns` alone if they are given.

    Raises:
        DataError: the file cannot be read, is damaged, or has no such column.
    """
    arrow, kind = require("pyarrow", "parquet", file), file.suffix.lower()
    try:
        if kind == ".parquet":
            with require("pyarrow.parquet", "parquet", file).ParquetFile(file) as table:
                check_columns(columns or (), table.schema_arrow.names, f"{file}")
                yield table.iter_batches(batch_size=1024, columns=columns)
            return
        with arrow.memory_map(str(file)) as mapped:
            is_stream = mapped.read(6) != b"ARROW1"  # else with an index at the end, as Feather has
            mapped.seek(0)
            reader = (arrow.ipc.open_stream if is_stream else arrow.ipc.open_file)(mapped)
            check_columns(columns or (), reader.schema.names, f"{file}")
            every = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            yield (batch.select(columns or reader.schema.names) for batch in every)
    except (OSError, arrow.ArrowException) as error:  # pyarrow raises OSError for bad content
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file, error) from error
        raise DataError(f"{file} is not a {kind[1:]} file, or it is damaged: {error}") from error
