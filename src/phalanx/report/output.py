"""Values as JSON, and files that a verb writes where the user says.

JSON cannot represent a number that is not finite: such a value is null, and the field
`<name>_text` next to it is "nan", "inf" or "-inf".
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, cast

from phalanx.errors import ConfigError

OTHER_FOLDER: Final = "; give another folder with --out"
"""Advice of `writing`, where --out chooses the folder."""


def values_of(value: Any) -> Any:
    """Return a value as plain JSON types: `as_dict()`, or a dataclass's fields and properties.

    Numbers that are not finite become None, see the top of this file.
    """
    if hasattr(value, "as_dict"):
        return values_of(value.as_dict())
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, _ in inspect.getmembers(type(value), inspect.isdatadescriptor)]
        return values_of({name: getattr(value, name) for name in names if name[0] != "_"})
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for name, inner in cast("Mapping[object, Any]", value).items():
            plain[str(name)] = values_of(inner)
            if isinstance(inner, float) and not math.isfinite(inner):
                plain[f"{name}_text"] = str(inner)
        return plain
    if isinstance(value, (list, tuple)):
        return [values_of(inner) for inner in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: object) -> str:
    """Return `values_of(value)` as one line of valid JSON."""
    return json.dumps(values_of(value), ensure_ascii=False, allow_nan=False)


def print_json(document: object) -> None:
    """Print the document as one line of valid JSON, the last line of a verb's output."""
    sys.stdout.write(f"{json_text(document)}\n")
    sys.stdout.flush()


@contextmanager
def writing(path: Path | str, advice: str = "") -> Generator[None]:
    """Convert an OSError of the block, which writes `path`, into a ConfigError with `advice`."""
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise ConfigError(f"cannot write {name}: {error.strerror or error}{advice}") from None


def check_writable(path: Path, suffix: str = "") -> None:
    """Check, before any work, that `path` can be the name of a file that ends in `suffix`.

    Raises:
        ConfigError: it has another suffix, is a folder, or its folder does not exist.
    """
    if suffix and path.suffix != suffix:
        legal = path.with_suffix(suffix) if path.name else f"picture{suffix}"
        kind = suffix[1:].upper()
        raise ConfigError(f"{path} is not the name of an {kind} file; the nearest is {legal}")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
