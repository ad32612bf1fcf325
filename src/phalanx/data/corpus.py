"""The corpus: text as a stream of documents in a fixed order.

A text file and a record (`phalanx.data.formats`) are one document each. Document names are relative
to the corpus, so that the validation split is the same on every machine.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from phalanx.data.formats import (
    FORMATS,
    PACKED,
    TEXTS,
    decode,
    format_of,
    open_unpacked,
    read_records,
    refuse_zero,
    unreadable,
)
from phalanx.errors import DataError
from phalanx.storage import hint_of_missing

METADATA = ("state.json", "dataset_dict.json", "dataset_info.json")
"""Files that `datasets` writes beside its tables."""

MOST_PERIOD = 10**6
"""Most samples after which the pattern of a mixture repeats."""

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


def mixture_of(data: str | None) -> list[tuple[int, str | None]]:
    """Return (weight, path) of each source in a `data` setting; (1, data) if it is no mixture.

    A mixture is WEIGHT*PATH,WEIGHT*PATH and so on, such as "0.7*web/,0.3*code/"; the weights
    that are returned are whole numbers of samples in each period, here 7 and 3 of 10.

    Raises:
        DataError: a source has no weight, a weight is 0, or the period is over MOST_PERIOD.
    """
    pieces = [piece.strip() for piece in (data or "").split(",")]
    parts = [re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*\*\s*(.+)", piece) for piece in pieces]
    if len(pieces) == 1 or parts[0] is None or os.path.exists(str(data)):
        return [(1, data)]
    parsed: list[Fraction] = []
    for piece, part in zip(pieces, parts, strict=True):
        if part is None or not (weight := Fraction(part[1])):
            raise DataError(
                f"{piece or 'a source'} of the mixture {data} has no weight; expected a number "
                "above 0 for each source, such as 0.7*web/,0.3*code/"
            )
        parsed.append(weight)
    scale = math.lcm(*(weight.denominator for weight in parsed))
    weights = [int(weight * scale) for weight in parsed]
    weights = [weight // math.gcd(*weights) for weight in weights]
    if sum(weights) > MOST_PERIOD:
        raise DataError(
            f"the weights of the mixture {data} are exact only over {sum(weights):,} samples; "
            f"expected at most {MOST_PERIOD:,}: give a sum of 1, and at most six digits"
        )
    return [(weight, part[2]) for weight, part in zip(weights, parts, strict=True) if part]


def absolute(data: str) -> str:
    """Return a `data` setting with absolute paths; addresses stay.

    A path is not normalized, because `..` after a symbolic link is not the link's parent folder.
    """
    pieces = [data] if len(mixture_of(data)) == 1 else data.split(",")
    whole: list[str] = []
    for piece in pieces:
        weight, star, path = piece.partition("*") if len(pieces) > 1 else ("", "", piece)
        if "://" not in path:
            path = os.path.join(os.getcwd(), os.path.expanduser(path.strip()))
        whole.append(weight + star + path)
    return ",".join(whole)


def documents(
    path: str | None, max_bytes: int | None = None, *, has_rows: bool = False
) -> Iterator[Document]:
    """Read the documents of a corpus, in a fixed order.

    Args:
        path: a file, a folder (searched recursively, in sorted order) or a glob; None is the
            standard library of the running Python: the topics of pydoc_data and the .py sources.
        max_bytes: stop after this many bytes of text (UTF-8), and cut the last document.
        has_rows: yield each record whole, as JSON text, and cut none.

    Raises:
        DataError: the path is missing, cannot be read or contains no supported file or no text, or
            the content of a file does not match its suffix.
    """
    left = max_bytes
    is_empty = True
    every = (
        document
        for name, file in sources(path)
        for document in _read(name, file, is_ours=path is None, has_rows=has_rows)
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
    """Return (name, path) of each file of a corpus, in a fixed order.

    Of the files, only the first bytes of each .json and the lists of files of folders that
    `datasets` has saved are read.

    Raises:
        DataError: see `documents`.
    """
    if path is None:
        return _library_files()
    root, files = find_files(path)
    chosen, others = choose(files)
    if not chosen:
        what = {f"{file.suffix or file.name} ({reason})" for file, reason in others}
        raise DataError(
            f"{path} holds no file that can be read: expected one of {' '.join(FORMATS)}, also "
            f"{' '.join(PACKED)}; found {', '.join(sorted(what)[:8]) or 'nothing'}"
        )
    return [(file.relative_to(root).as_posix(), file) for file in chosen]


def left_out(path: str | None) -> str:
    """Return the files of a corpus that `documents` does not read, see `words_on`."""
    if path is None:
        return ""
    root, files = find_files(path)
    return words_on(root, choose(files)[1])


def words_on(root: Path, others: Sequence[tuple[Path, str]]) -> str:
    """Return files that are not read in words: number, reason, and the first names below `root`.

    For example "2 files of unknown format (a.rst, b.gz)"; empty if there are none.
    """
    names: dict[str, list[str]] = {}
    for file, reason in others:
        names.setdefault(reason, []).append(file.relative_to(root).as_posix())
    return "; ".join(
        f"{len(some)} {'file' if len(some) == 1 else 'files'} {reason} "
        f"({', '.join(some[:_NAMED])}{', ...' * (len(some) > _NAMED)})"
        for reason, some in names.items()
    )


def choose(files: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the files to read, and the others with the reason.

    `Dataset.save_to_disk` lists its tables in state.json. `DatasetDict.save_to_disk` lists folders
    in dataset_dict.json, a split each, of which "train" is read; so it is with files of records
    whose names have a split.
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
    has_splits = any(_split_of(file) == "train" for file in files)
    for file in files:
        kind, listed = format_of(file), tables.get(file.parent)
        if file.name in METADATA and (listed is not None or file.name == "dataset_info.json"):
            continue
        if not file.is_file():  # a read from a named pipe would block forever
            others.append((file, "that are not regular"))
        elif kind is None:
            others.append((file, "of unknown format"))
        elif listed is not None and file.name not in listed:
            others.append((file, "outside the dataset saved there, or of another split"))
        elif has_splits and _split_of(file) not in (None, "train"):
            others.append((file, "of another split than train"))
        elif kind == ".json" and len(files) > 1 and _head(file)[:1] != b"[":
            others.append((file, "without a list of records"))
        else:
            chosen.append(file)
    return chosen, others


def _split_of(file: Path) -> str | None:
    """Return the split in the name of a file of records, such as test-00000-of-00002.parquet."""
    split = re.search(r"(?:^|[-_.])(train|test|val|valid|validation|dev|eval)[-_.]", file.name)
    return None if split is None or format_of(file) in (None, *TEXTS) else split[1]


def _head(file: Path) -> bytes:
    with open_unpacked(file) as opened:
        return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()


def _listed(file: Path, key: str) -> list[Any]:
    """Return a list in a file of metadata; empty if the file has none."""
    try:
        return list(json.loads(file.read_bytes())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def first_row(path: str | None) -> dict[str, Any] | None:
    """Return the first record of a corpus; None without one, and for a mixture.

    Raises:
        DataError: see `documents`.
    """
    if path is None or len(mixture_of(path)) > 1:
        return None
    files = choose(find_files(path)[1])[0]
    tables = (file for file in files if format_of(file) not in TEXTS)
    return next((record.fields for file in tables for record in read_records(file, "")), None)


def _read(name: str, file: Path, *, is_ours: bool, has_rows: bool) -> Iterator[Document]:
    """Yield the documents of a file; `is_ours`: it is of the standard library."""
    if is_ours and name == _TOPICS:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from (Document(f"{_TOPICS}/{topic}", topics[topic]) for topic in sorted(topics))
    elif has_rows and format_of(file) in TEXTS:
        raise DataError(f"{file} is text, but other files of the corpus have rows of chats")
    elif has_rows:
        for record in read_records(file, name):
            yield Document(record.name, json.dumps(record.fields, default=str))
    elif format_of(file) not in TEXTS:
        for record in read_records(file, name, [FIELD]):
            yield Document(record.name, _checked(record.fields[FIELD], record.place))
    else:
        try:
            yield Document(name, decode(_read_bytes(file), file))
        except DataError:
            if not is_ours:  # else a file in another encoding, which the user cannot fix
                raise


def find_files(path: str) -> tuple[Path, list[Path]]:
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
