"""Read and write a configuration as a TOML file; reading checks the names and types of all keys.

Relative paths in a file are relative to the working folder, as they are on the command line. A file
that a run writes has absolute paths.
"""

from __future__ import annotations

import difflib
import io
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from phalanx.config.fields import check_type, check_utf8
from phalanx.config.save_policy import renewed
from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.storage import open_regular

MAX_BYTES: Final = 1 << 20
"""Largest settings file, in bytes; limits the read of a pipe or device, which may be endless."""

RUN_FILE: Final = "config.toml"
"""Name of the settings file in a run folder."""


def read_values(path: str, keys: Mapping[str, Any], *, is_foreign: bool = False) -> dict[str, Any]:
    """Return the values of a TOML file by dotted key; `keys` has the type of each legal key.

    If `is_foreign`, another user may have written the file, and links and pipes are refused.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or a value of a wrong type.
    """
    sections = {key.split(".")[0] for key in keys if "." in key}
    values: dict[str, Any] = {}
    for name, value in _read_toml(path, is_foreign).items():
        if name not in sections:
            values[name] = value
        elif isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            values |= {f"{name}.{inner}": table[inner] for inner in table}
        else:
            raise ConfigError(f"{path}: {name} is {value!r}; expected a section, [{name}]")
    try:
        values = renewed(values) if "save" in keys else values
        for key, value in values.items():
            if key not in keys:
                raise ConfigError(_unknown(key, keys, isinstance(value, dict)))
            check_type(key, keys[key], value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def to_toml(values: Mapping[str, Any]) -> str:
    """Return the TOML text of values by dotted key; leave out None, which TOML cannot express.

    Raises:
        ConfigError: a text is not UTF-8, which TOML requires.
    """
    sections: dict[str, list[str]] = {"": []}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{name} = {_toml(key, value)}")
    return "\n".join(
        "".join(f"{line}\n" for line in ([f"[{section}]"] if section else []) + lines)
        for section, lines in sections.items()
    )


def _toml(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)  # TOML also accepts inf and nan
    check_utf8(key, value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_toml(path: str, is_foreign: bool) -> dict[str, Any]:
    """Read a TOML file; raise ConfigError with the reason, and the line of a syntax error."""
    file = Path(path)
    try:
        # A pipe only if the shell opened it, as `--config <(command)`: to open a named pipe can
        # block forever.
        is_open = str(file.parent) in ("/dev/fd", "/proc/self/fd") or str(file) == "/dev/stdin"
        if is_open and not is_foreign:
            raw = io.FileIO(file)
        else:
            raw = open_regular(file, may_be_link=not is_foreign)
        with io.BufferedReader(raw) as opened:
            text = opened.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(
                f"{path}: has more than {MAX_BYTES >> 20} MiB; expected a TOML file of settings"
            )
        return tomllib.loads(text.decode())
    except FileNotFoundError:
        beside = [other.name for other in file.parent.glob("*.toml")]
        raise ConfigError(f"{path}: there is no such file{nearest(file.name, beside)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text; expected a TOML file") from None
    except ConfigError:
        raise
    except CheckpointError as error:
        expected = "" if is_foreign else "; expected a TOML file of settings"
        raise ConfigError(f"{error}{expected}") from None
    except (ValueError, RecursionError) as error:  # also too many digits or nested brackets
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _unknown(key: str, keys: Mapping[str, Any], is_section: bool) -> str:
    """Return why a key of a file is unknown, with the key that was probably meant."""
    if is_section:
        sections = sorted({other.partition(".")[0] for other in keys if "." in other})
        known = ", ".join(f"[{section}]" for section in sections)
        return f"section [{key}] is unknown{nearest(key, sections)}; the sections are {known}"
    section, _, name = key.rpartition(".")
    homes = [other.rpartition(".")[0] for other in keys if other.rpartition(".")[2] == name]
    if homes:
        return (
            f"'{name}' does not belong to {_section_words(section)}; it belongs to "
            + " or ".join(map(_section_words, homes))
        )
    close = closest(key, keys)
    return f"'{key}' is unknown" + (f" (did you mean '{close}'?)" if close else "")


def _section_words(section: str) -> str:
    """Return the name of a section of a file for messages."""
    return f"section [{section}]" if section else "the top of the file, above all sections"


def closest(key: str, keys: Iterable[str]) -> str | None:
    """Return the key that was probably meant, or None.

    The search order is: the same name in any section, a very similar name, the initials of the
    words (`lr` for `learning_rate`), a somewhat similar name; the key's own section comes first.
    """
    section, _, name = key.rpartition(".")
    names = {other: other.rpartition(".")[2] for other in keys}
    beside = {other: n for other, n in names.items() if other.rpartition(".")[0] == section}
    initials = "".join(word[:1] for word in name.split("_"))
    searches = (
        *((name, names, 1.0), (name, beside, 0.8), (name, names, 0.8)),
        *((initials, names, 1.0), (name, beside, 0.5), (name, names, 0.5)),
    )
    for wanted, pool, cutoff in searches:
        close = difflib.get_close_matches(wanted, pool.values(), n=1, cutoff=cutoff)
        if close:
            return next(other for other, n in pool.items() if n == close[0])
    return None
