"""The corpus: text as a stream of documents in a fixed order.

A text file, a line of .jsonl and a row of .parquet are one document each. Document names are
relative to the corpus, so that the validation split is the same on every machine.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from phalanx.errors import DataError, nearest
from phalanx.storage import hint_of_missing

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
"""File suffixes that can be read."""

HEAD_BYTES = 1 << 20
"""Bytes of a text file that are checked for NUL before the rest is read."""

FIELD = "text"
"""Name of the .jsonl field and of the .parquet column with the text."""

_TOPICS = "topics"
"""Document name prefix of the help topics of pydoc_data."""

# Tests, vendored packages and tables of numbers, which differ from the library's own sources.
_LIBRARY_SKIPS = frozenset(
    "test tests idle_test site-packages dist-packages idlelib lib2to3 turtledemo "
    "ensurepip encodings pydoc_data __pycache__ __phello__".split()
)


@dataclass(frozen=True)
class Document:
    """A text of the corpus, never empty; its name is a relative path, with `:line` or `:row`."""

    name: str
    text: str


def documents(
    path: str | None, max_bytes: int | None = None, *, has_rows: bool = False
) -> Iterator[Document]:
    """Read the documents of a corpus, in a fixed order.

    Args:
        path: a file, a folder (searched recursively, in sorted order) or a glob; None is the
            standard library of the running Python: the topics of pydoc_data and the .py sources.
        max_bytes: stop after this many bytes of text (UTF-8), and cut the last document.
        has_rows: yield each row of .jsonl and .parquet whole, as JSON text, and cut none.

    Raises:
        DataError: the path is missing, cannot be read or contains no supported file or no text, or
            the content of a file does not match its suffix.
    """
    left = max_bytes
    is_empty = True
    every = (
        document
        for name, file in sources(path)
        for document in (_rows(name, file) if has_rows else _read(name, file, path is None))
    )
    for document in every:
        if not document.text.strip():
            continue
        if left is not None:
            raw = document.text.encode()
            if has_rows and len(raw) > left:
                break
            document = Document(document.name, raw[:left].decode(errors="ignore"))
            left -= len(raw)
        if document.text.strip():
            is_empty = False
            yield document
        if left is not None and left <= 0:
            break
    if is_empty:
        what = "the standard library" if path is None else f"corpus {path}"
        limit = f" in its first {max_bytes} bytes" if max_bytes is not None else ""
        raise DataError(f"{what} holds no text{limit}; expected at least one document")


def sources(path: str | None) -> list[tuple[str, Path]]:
    """Return (name, path) of each file of a corpus, in a fixed order, without reading the files.

    Raises:
        DataError: see `documents`.
    """
    if path is None:
        return _library_files()
    root, files = _find_files(path)
    # Leave out named pipes, because a read from one would block forever.
    chosen = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not chosen:
        kinds = {file: "" if file.is_file() else " (no regular file)" for file in files}
        found = sorted({(file.suffix or file.name) + kind for file, kind in kinds.items()})
        raise DataError(
            f"{path} holds no file that can be read: expected one of {' '.join(SUFFIXES)}, found "
            f"{' '.join(found[:8]) or 'nothing'}"
        )
    return [(file.relative_to(root).as_posix(), file) for file in chosen]


def left_out(path: str | None) -> str:
    """Return the numbers of files that a corpus has and `documents` cannot read, by their suffix.

    For example "2 .gz, 1 .json"; empty if there are none.
    """
    files = [] if path is None else _find_files(path)[1]
    suffixes = [file.suffix.lower() or file.name for file in files]
    counts = Counter(suffix for suffix in suffixes if suffix not in SUFFIXES)
    words = [f"{count} {suffix}" for suffix, count in counts.most_common(8)]
    more = sum(counts.values()) - sum(count for _, count in counts.most_common(8))
    return ", ".join([*words, *([f"{more} others"] if more else [])])


def first_row(path: str | None) -> dict[str, Any] | None:
    """Return the first row of the .jsonl and .parquet files of a corpus; None without such a file.

    Raises:
        DataError: see `documents`.
    """
    files = [] if path is None else sources(path)
    rows = (d for name, file in files if file.suffix.lower() in _ROWS for d in _rows(name, file))
    first = next(rows, None)
    return None if first is None else json.loads(first.text)


def _rows(name: str, file: Path) -> Iterator[Document]:
    """Yield the rows of a file as JSON texts."""
    match file.suffix.lower():
        case ".jsonl":
            yield from _read_jsonl(file, name, lambda line, where: json.dumps(_object(line, where)))
        case ".parquet":
            yield from _read_parquet(file, name, None)
        case _:
            raise DataError(f"{file} is text, but other files of the corpus have rows of chats")


_ROWS = (".jsonl", ".parquet")
"""Suffixes of files with rows."""


def _read(name: str, file: Path, is_ours: bool) -> Iterator[Document]:
    """Yield the documents of a file; `is_ours`: it is of the standard library."""
    if is_ours and name == _TOPICS:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from (Document(f"{_TOPICS}/{topic}", topics[topic]) for topic in sorted(topics))
    elif file.suffix.lower() == ".jsonl":
        yield from _read_jsonl(file, name, _text_in)
    elif file.suffix.lower() == ".parquet":
        yield from _read_parquet(file, name, FIELD)
    else:
        try:
            yield Document(name, _decode(_read_bytes(file), file))
        except DataError:
            if not is_ours:  # else a file in another encoding, which the user cannot fix
                raise


def _find_files(path: str) -> tuple[Path, list[Path]]:
    """Return the folder to which document names are relative, and the files, sorted.

    For a glob the folder is its fixed part, so that names do not depend on its location.
    """
    if not path.strip():
        raise DataError("the path of the corpus is empty; expected a file, folder or glob")
    start = Path(os.path.expanduser(path))
    try:
        if start.is_dir():
            return start, _walk(start)
        if start.exists():
            return start.parent, [start]
        if glob.has_magic(path):
            matches = [Path(match) for match in _glob(start)]
            if not matches:
                raise DataError(f"no file matches {path}; expected a glob such as 'texts/**/*.md'")
            fixed = start
            while glob.has_magic(str(fixed)):
                fixed = fixed.parent
            files = {
                file for match in matches for file in (_walk(match) if match.is_dir() else [match])
            }
            return fixed, sorted(files)
        raise DataError(f"{path} does not exist{hint_of_missing(start)}")
    except OSError as error:
        raise _unreadable(start, error) from error


def _glob(pattern: Path) -> Iterator[str]:
    """Yield the matches of a glob; `**` does not follow links to folders, which may be cyclic."""
    parts = pattern.parts
    if "**" not in parts:
        yield from glob.glob(str(pattern))
        return
    at = parts.index("**")
    for place in glob.glob(str(Path(*parts[:at]))):
        for folder, folders, _ in os.walk(place):
            folders[:] = [name for name in folders if not name.startswith(".")]  # none hidden
            below = parts[at + 1 :]
            yield from _glob(Path(glob.escape(folder), *below)) if below else [folder]


def _walk(folder: Path) -> list[Path]:
    """Return all files below a folder except hidden ones, sorted."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror or error}; expected a path this user may read"
    )


def _read_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
            _refuse_zero(head, file, 0)  # before the rest of a possibly large file is read
            return head + opened.read()
    except OSError as error:
        raise _unreadable(file, error) from error


def _refuse_zero(raw: bytes, file: Path, start: int) -> None:
    zero = raw.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"{file} is not text: it has a NUL at byte {start + zero}; expected UTF-8 (convert "
            f"UTF-16 first, or leave the file out)"
        )


def _decode(raw: bytes, file: Path, start: int = 0) -> str:
    """Decode UTF-8; `start` is the offset of `raw` in the file, for the error message."""
    _refuse_zero(raw, file, start)
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {start + error.start} is 0x{raw[error.start]:02x} "
            f"({error.reason}); convert the file to UTF-8, or leave it out"
        ) from error


def _read_jsonl(file: Path, name: str, text_of: Callable[[str, str], str]) -> Iterator[Document]:
    offset = 0
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if raw.strip():
                    text = _decode(raw, file, offset)
                    yield Document(f"{name}:{number}", text_of(text, f"{file}, line {number}"))
                offset += len(raw)
    except OSError as error:
        raise _unreadable(file, error) from error


def _object(line: str, where: str) -> dict[str, Any]:
    """Return the object in a line of .jsonl; `where` names the line in messages."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # too long a number; too deeply nested
        what = f"{error}"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        raise DataError(f"{where} is not valid JSON: {what}; expected one object a line") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is a {type(record).__name__}; expected an object with the field '{FIELD}'"
        )
    return cast("dict[str, Any]", record)


def _text_in(line: str, where: str) -> str:
    """Return the text of a line of .jsonl."""
    record = _object(line, where)
    if FIELD not in record:
        raise DataError(
            f"{where} has no field '{FIELD}'{nearest(FIELD, record)}; its fields are "
            f"{', '.join(map(repr, record)) or 'none'}"
        )
    return _checked(record[FIELD], where)


def _checked(value: object, where: str) -> str:
    """Return `value` if it is a string that UTF-8 can encode, and "" if it is null.

    Raises:
        DataError: it is another value.
    """
    if value is None:
        return ""  # as a row without text, which is no document
    if not isinstance(value, str):
        raise DataError(f"{where}: '{FIELD}' is a {type(value).__name__}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: '{FIELD}' has half of a surrogate pair at character {error.start}, which "
            f"UTF-8 cannot hold; expected whole characters"
        ) from error
    return value


def _read_parquet(file: Path, name: str, field: str | None) -> Iterator[Document]:
    """Yield the texts of a column, or the rows as JSON texts if `field` is None."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(
            f"cannot read {file}: .parquet needs pyarrow; install it with "
            f"pip install 'phalanx-train[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(file) as table:
            columns: list[str] = table.schema_arrow.names
            if field is not None and field not in columns:
                raise DataError(
                    f"{file} has no column '{FIELD}'{nearest(FIELD, columns)}; its columns are "
                    f"{', '.join(map(repr, columns)) or 'none'}"
                )
            row = 0
            for rows in table.iter_batches(batch_size=1024, columns=field and [field]):
                try:
                    values: list[object] = (rows if field is None else rows.column(0)).to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{file}, rows {row + 1} to {row + rows.num_rows}: '{FIELD}' is not UTF-8: "
                        f"{error.reason}; convert it to UTF-8"
                    ) from error
                for value in values:
                    row += 1
                    if field is None:
                        yield Document(f"{name}:{row}", json.dumps(value, default=str))
                    else:
                        yield Document(f"{name}:{row}", _checked(value, f"{file}, row {row}"))
    except (OSError, arrow.ArrowException) as error:  # pyarrow raises OSError for bad content
        if isinstance(error, OSError) and error.errno is not None:
            raise _unreadable(file, error) from error
        raise DataError(f"{file} is not a parquet file, or it is damaged: {error}") from error


def _library_files() -> list[tuple[str, Path]]:
    """Return (name, path) of the help topics, if installed, and of the standard library sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LIBRARY_SKIPS]
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    found = [(file.relative_to(root).as_posix(), file) for file in sorted(files)]
    # Some systems ship Python without its documentation.
    topics = importlib.util.find_spec("pydoc_data.topics")
    if topics is not None and topics.origin is not None:
        found.insert(0, (_TOPICS, Path(topics.origin)))
    if not found:
        raise DataError(f"this Python has no standard library at {root}; give a corpus with --data")
    return found
