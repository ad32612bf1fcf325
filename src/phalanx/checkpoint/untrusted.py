"""Read untrusted JSON within size limits, and show untrusted text without control characters."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, cast, get_args, get_origin, get_type_hints

from phalanx.errors import CheckpointError
from phalanx.storage import open_regular

MAX_JSON_BYTES: Final = 1 << 28
"""Largest JSON file that is read, in bytes; parsing takes about ten times as much memory."""

MAX_JSON_MARKS: Final = 1 << 24
"""Most opening brackets and commas of a JSON file; each may become an object of about 60 bytes."""

MAX_JSON_DEPTH: Final = 16
"""Deepest nesting of a JSON file; much deeper content may fail even to be copied or printed."""

MAX_NAME_LENGTH: Final = 255
"""Longest file name that common file systems accept."""

_CONTROL: Final = re.compile(r"[^\t\n -~\xa0-\U0010ffff]")
"""Control characters, by which untrusted text could control the terminal that shows it."""


def read_json(path: Path, *, may_be_link: bool = False) -> dict[str, Any]:
    """Return the content of a JSON file that contains one object.

    Args:
        path: file to read.
        may_be_link: whether `path` may be a symbolic link, as in the Hugging Face hub's cache.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, is too large or too deeply nested, is not an
            object, or contains a duplicate name or control characters.
    """
    try:
        with open_regular(path, may_be_link=may_be_link) as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
                raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
            text = file.readall()
        # Counted before parsing, which would allocate an object for each of these marks.
        if sum(map(text.count, (b"[", b"{", b","))) > MAX_JSON_MARKS:
            raise ValueError(f"it has more than {MAX_JSON_MARKS:,} values")
        content: Any = json.loads(text.decode(), object_pairs_hook=_named)
        check_plain(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"cannot read {path}: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"cannot read {path}: it is not a JSON object")
    return cast("dict[str, Any]", content)


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("it has a duplicate name in an object")
    return named


def check_plain(content: Any) -> None:
    """Raise ValueError on nesting deeper than MAX_JSON_DEPTH, control characters or surrogates.

    Every value from a checkpoint that an error message may quote has passed this check.
    """
    # Level by level and without recursion, since the nesting is what may be hostile.
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                children += [*value, *value.values()]  # check the keys, too
            elif isinstance(value, list):
                children += value
            elif isinstance(value, str):
                value.encode()
                if _CONTROL.search(value):
                    raise ValueError(f"it has control characters in {brief(value)}")
        if not children:
            return
        level = children
    raise ValueError("it is nested too deeply")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that `read_json` accepts, an entry a line, without indentation, which is slow.

    `content` must have no control characters.

    Raises:
        CheckpointError: the file would be too large for `read_json`.
        OSError: the write failed, for example because the disk is full.
    """
    entries = (f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in content.items())
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    marks = sum(map(text.count, "[{,"))
    if len(text) > MAX_JSON_BYTES or marks > MAX_JSON_MARKS:
        raise CheckpointError(
            f"{path.name} would have {len(text):,} bytes and {marks:,} values, but at most "
            f"{MAX_JSON_BYTES:,} bytes and {MAX_JSON_MARKS:,} values can be read; save with fewer "
            "tensors, or on fewer ranks"
        )
    path.write_text(text, encoding="utf-8")


def escape_control(value: Any) -> Any:
    """Return a JSON value with every control character in its strings escaped."""
    match value:
        case str():
            return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], value)
        case dict():
            return {
                escape_control(k): escape_control(v)
                for k, v in cast("dict[str, Any]", value).items()
            }
        case list() | tuple():
            items = cast("list[Any]", value)
            is_of_numbers = {*map(type, items)} <= {int, float, bool}
            return items if is_of_numbers else [escape_control(inner) for inner in items]
        case _ if is_dataclass(value):
            return escape_control(vars(value))
        case _:
            return value


def decode(hint: Any, value: Any, what: str = "it") -> Any:
    """Return a JSON value converted to the type `hint`, after checking that it has that type.

    An object may represent a dataclass, and a list a tuple or NamedTuple. An int is a size, offset
    or count, so it must be at least 0 and less than 2**62.

    Raises:
        ValueError: a value is missing, unknown or of another type; the message names it.
    """
    kind: Any = get_origin(hint) or hint
    inner, is_literal = get_args(hint), get_origin(hint) is Literal
    if kind is Any or (is_literal and value in inner):
        return value
    if kind is UnionType:  # of None, at most one dataclass, and at most one other type
        if value is None and type(None) in inner:
            return None
        matching = [each for each in inner if is_dataclass(each) == isinstance(value, dict)]
        return decode((*matching, *inner)[0], value, what)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        values = cast("dict[str, Any]", value)
        hints = _hints_of(kind)
        for field in fields(kind):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if field.name not in values and not has_default:
                raise ValueError(f"{what} has no '{field.name}'")
        for name in values:
            if name not in hints:
                raise ValueError(f"{what} has the unknown entry {brief(name)}")
        inside = "" if what == "it" else f"{what}."
        return kind(**{n: decode(hints[n], each, f"{inside}{n}") for n, each in values.items()})
    if kind in (dict, Mapping) and isinstance(value, dict):
        entries = cast("dict[str, Any]", value).items()
        return {name: decode(inner[1], each, f"{what} {brief(name)}") for name, each in entries}
    if not is_literal and issubclass(kind, tuple) and isinstance(value, list):
        items = cast("list[Any]", value)
        hints = inner or tuple(_hints_of(kind).values())
        hints = hints[:1] * len(items) if hints[-1] is Ellipsis else hints
        if len(hints) == len(items):
            parts = [decode(each, item, what) for each, item in zip(hints, items, strict=True)]
            return tuple(parts) if kind is tuple else kind(*parts)
    if type(value) is int and kind in (int, float) and (kind is float or 0 <= value < 1 << 62):
        return value
    if type(value) is kind and kind is not int:
        return value
    raise ValueError(f"{what} is {brief(value)}, expected {_WORDS.get(kind, hint)}")


_hints_of = functools.cache(get_type_hints)

_WORDS: Final[dict[Any, str]] = {
    int: "a whole number of at least 0",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
}


def is_plain_name(name: str) -> bool:
    """Return whether `name` is a printable file name without a folder, on any system."""
    is_inside = name not in ("", ".", "..") and not set(name) & set("/\\:\0")
    return is_inside and name.isprintable() and len(name) <= MAX_NAME_LENGTH


def brief(value: object, limit: int = 80) -> str:
    """Return an untrusted value, or an error that quotes one, as text of at most `limit`."""
    text = escape_control(str(value)) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
