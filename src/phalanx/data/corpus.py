"""The corpus: text as a stream of documents in a fixed order.

A text file and a record (`phalanx.data.records`) are one document each. Document names are relative
to the corpus, so that the validation split is the same on every machine.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.records import (
    FORMATS,
    PACKED,
    TEXTS,
    check_columns,
    decode,
    format_of,
    is_list,
    open_unpacked,
    read_records,
    refuse_zero,
    unreadable,
)
from phalanx.errors import DataError
from phalanx.storage import hint_of_missing

_METADATA = ("state.json", "dataset_dict.json", "dataset_info.json")
"""Files that `datasets` writes beside its tables."""

_NAMED = 3
"""Most files left out that are named, for each reason."""

HEAD_BYTES = 1 << 20
"""Bytes of a text file that are checked for NUL before the rest is read."""

FIELD = "text"
"""Name of a record's field with the text."""

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


def documents(path: str | None, max_bytes: int | None = None) -> Iterator[Document]:
    """Read the documents of a corpus, in a fixed order.

    Args:
        path: a file, a folder (searched recursively, in sorted order) or a glob; None is the
            standard library of the running Python: the topics of pydoc_data and the .py sources.
        max_bytes: stop after this many bytes of text (UTF-8), and cut the last document.

    Raises:
        DataError: the path is missing, cannot be read or contains no supported file or no text, or
            the content of a file does not match its suffix.
    """
    left = max_bytes
    is_empty = True
    every = (d for name, file in sources(path) for d in _read(name, file, is_ours=path is None))
    for document in every:
        if not document.text.strip():
            continue
        if left is not None:
            raw = document.text.encode()
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
    """Return (name, path) of each file of a corpus, in a fixed order.

    Of the files, only the first bytes of each .json and the lists of files of folders that
    `datasets` has saved are read.

    Raises:
        DataError: see `documents`.
    """
    if path is None:
        return _library_files()
    root, files = _find_files(path)
    chosen, others = _choose(files)
    if not chosen:
        what = {f"{file.suffix or file.name} ({reason})" for file, reason in others}
        raise DataError(
            f"{path} holds no file that can be read: expected one of {' '.join(FORMATS)}, also "
            f"{' '.join(PACKED)}; found {', '.join(sorted(what)[:8]) or 'nothing'}"
        )
    return [(file.relative_to(root).as_posix(), file) for file in chosen]


def left_out(path: str | None) -> str:
    """Return the files of a corpus that `documents` does not read: number, reason, first names.

    For example "2 files of unknown format (a.rst, b.gz)"; empty if there are none.
    """
    if path is None:
        return ""
    root, files = _find_files(path)
    names: dict[str, list[str]] = {}
    for file, reason in _choose(files)[1]:
        names.setdefault(reason, []).append(file.relative_to(root).as_posix())
    return "; ".join(
        f"{len(some)} {'file' if len(some) == 1 else 'files'} {reason} "
        f"({', '.join(some[:_NAMED])}{', ...' * (len(some) > _NAMED)})"
        for reason, some in names.items()
    )


def _choose(files: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the files to read, and the others with the reason.

    `Dataset.save_to_disk` lists its tables in state.json. `DatasetDict.save_to_disk` lists folders
    in dataset_dict.json, a split each, of which "train" is read.
    """
    chosen: list[Path] = []
    others: list[tuple[Path, str]] = []
    tables: dict[Path, list[str]] = {}
    for file in sorted(files, key=lambda file: file.name != "state.json"):  # before its parent's
        if file.name == "state.json" and (listed := _listed(file, "_data_files")):
            tables[file.parent] = [each["filename"] for each in listed]
        if file.name == "dataset_dict.json" and (splits := _listed(file, "splits")):
            read = "train" if "train" in splits else splits[0]
            tables[file.parent] = []
            tables |= {file.parent / split: [] for split in splits if split != read}
    for file in files:
        kind, listed = format_of(file), tables.get(file.parent)
        if file.name in _METADATA and (listed is not None or file.name == "dataset_info.json"):
            continue
        if not file.is_file():  # a read from a named pipe would block forever
            others.append((file, "that are not regular"))
        elif kind is None:
            others.append((file, "of unknown format"))
        elif listed is not None and file.name not in listed:
            others.append((file, "outside the dataset saved there, or of another split"))
        elif kind == ".json" and len(files) > 1 and not is_list(file):
            others.append((file, "without a list of records"))
        else:
            chosen.append(file)
    return chosen, others


def _listed(file: Path, key: str) -> list[Any]:
    """Return a list in a file of metadata; empty if the file has none."""
    try:
        return list(json.loads(file.read_bytes())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _read(name: str, file: Path, *, is_ours: bool) -> Iterator[Document]:
    """Yield the documents of a file; `is_ours`: it is of the standard library."""
    if is_ours and name == _TOPICS:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from (Document(f"{_TOPICS}/{topic}", topics[topic]) for topic in sorted(topics))
    elif format_of(file) not in TEXTS:
        for record in read_records(file, name, [FIELD]):
            check_columns([FIELD], list(record.fields), record.place)
            yield Document(record.name, _checked(record.fields[FIELD], record.place))
    else:
        try:
            yield Document(name, decode(_read_bytes(file), file))
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
        hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) and not start.suffix
        raise DataError(
            f"{path} does not exist{hint_of_missing(start)}"
            + f"; for the dataset of that name on a hub, give the folder that "
            f"load_dataset('{path}').save_to_disk wrote" * bool(hub)
        )
    except OSError as error:
        raise unreadable(start, error) from error


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
        raise unreadable(Path(error.filename or folder), error) from error

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _read_bytes(file: Path) -> bytes:
    with open_unpacked(file) as opened:
        head = opened.read(HEAD_BYTES)
        refuse_zero(head, file, 0)  # before the rest of a possibly large file is read
        return head + opened.read()


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
