"""Read a configuration: defaults, then a TOML file, then the command line; each value's source."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, cast

import tyro

from phalanx.config import TrainConfig, solve_batch
from phalanx.config_check import check_type, choices, members, read_text, settings, value_at
from phalanx.errors import ConfigError, nearest
from phalanx.strategy import Strategy

Schema = TypeVar("Schema")

METAVARS: Final[Mapping[type, str]] = {int: "INT", float: "FLOAT", str: "TEXT"}
"""What --help calls a value."""


@dataclass(frozen=True)
class Loaded(Generic[Schema]):
    """A configuration, where each value came from, and how the verb is to answer.

    Attributes:
        config: the value.
        sources: dotted key -> "default", the name of the file, "command line" or "derived".
        show_config: print the configuration instead of doing the work.
        json: make the last line of standard output one JSON document.
    """

    config: Schema
    sources: Mapping[str, str]
    show_config: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class _CommandLine(Generic[Schema]):
    """The command line of a verb: its configuration and what each verb has."""

    settings: Annotated[Schema, tyro.conf.arg(name="")]
    config: str | None = None
    """A TOML file of the settings below; the command line goes before it."""
    show_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print every value and where it came from, and do nothing else."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make the last line of standard output one JSON document."""


def load_config(
    argv: Sequence[str], schema: type[Schema] = TrainConfig, *, prog: str = "phalanx train"
) -> Loaded[Schema]:
    """Read the configuration that a command line asks for.

    The types of all values are checked, their ranges are not: config_check.check does that.

    Args:
        argv: the words after the verb.
        schema: dataclass of the settings; every field needs a default.
        prog: the verb, as --help names it.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, a file that cannot be read.
        SystemExit: with code 0, after --help.
    """
    keys = {key: hint for key, hint, _ in settings(schema)}
    sources = dict.fromkeys(keys, "default")
    base = schema()
    path = _config_path(argv)
    if path is not None:
        table = _read_toml(path)
        for key, value in _flatten(table, keys, path).items():
            base = with_value(base, key, value)
            sources[key] = path
    options = ("config", "show_config", "json")
    line = _read(
        argv, _CommandLine[schema], _CommandLine(settings=base), prog, schema, [*keys, *options]
    )
    named = _named(argv)
    for key in keys:
        if key in named or value_at(line.settings, key) != value_at(base, key):
            sources[key] = "command line"
    return Loaded(line.settings, sources, line.show_config, line.json)


def read_command_line(argv: Sequence[str], default: Schema, *, prog: str) -> Schema:
    """Let tyro read a command line over the values of `default`.

    Args:
        argv: the words after the verb.
        default: a dataclass; its class is the schema, its docstring the text of --help.
        prog: the verb, as --help names it.

    Raises:
        ConfigError: an unknown option or a value of the wrong type, in one line.
        SystemExit: with code 0, after --help.
    """
    schema = type(default)
    return _read(argv, schema, default, prog, schema, [key for key, _, _ in settings(schema)])


def with_value(config: Schema, key: str, value: Any) -> Schema:
    """Return the configuration with the value of one dotted key replaced."""
    name, _, rest = key.partition(".")
    if rest:
        value = with_value(getattr(config, name), rest, value)
    return cast(Schema, dataclasses.replace(cast(Any, config), **{name: value}))


def resolve(loaded: Loaded[TrainConfig], num_ranks: int) -> Loaded[TrainConfig]:
    """Fill in what the number of ranks settles: the strategy, nproc and the batch.

    Raises:
        BatchError: the batch does not fit the data ranks.
    """
    config = loaded.config
    strategy = Strategy.parse(config.strategy or f"dp{num_ranks}")
    plan = solve_batch(config.batch, strategy.data_ranks)
    derived = {
        "strategy": str(strategy),
        "nproc": num_ranks,
        "batch.global_size": plan.global_size,
        "batch.microbatch": plan.microbatch,
        "batch.accumulation": plan.accumulation,
    }
    sources = dict(loaded.sources)
    for key, value in derived.items():
        if value_at(config, key) is None:
            config = with_value(config, key, value)
            sources[key] = "derived"
    return dataclasses.replace(loaded, config=config, sources=sources)


def _config_path(argv: Sequence[str]) -> str | None:
    """Return the file that --config names."""
    for index, word in enumerate(argv):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config" and index + 1 < len(argv):
            return argv[index + 1]
    return None


def _read_toml(path: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: it is missing, not text, or not TOML; with the line.
    """
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [other.name for other in file.parent.glob("*.toml")]
        raise ConfigError(
            f"--config {path}: there is no such file{nearest(file.name, beside)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: is not text; expected a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: is not TOML: {error}") from None


def _flatten(
    table: Mapping[str, Any], keys: Mapping[str, Any], path: str, prefix: str = ""
) -> dict[str, Any]:
    """Return {dotted key: value} of a file's tables, each key known and each value of its type."""
    flat: dict[str, Any] = {}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for name, value in table.items():
        key = f"{prefix}{name}"
        is_section = not prefix and name in sections
        if isinstance(value, dict) and is_section:
            flat |= _flatten(cast("dict[str, Any]", value), keys, path, f"{name}.")
        elif is_section:
            raise ConfigError(f"{path}: {name} is {value!r}; expected a section, [{name}]")
        elif key not in keys:
            raise ConfigError(f"{path}: {_unknown(key, keys, isinstance(value, dict))}")
        else:
            try:
                check_type(key, keys[key], value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            flat[key] = value
    return flat


def _unknown(key: str, keys: Mapping[str, Any], is_section: bool) -> str:
    """Return why a key of a file is unknown, and which one was probably meant."""
    if is_section:
        sections = sorted({other.partition(".")[0] for other in keys if "." in other})
        known = ", ".join(f"[{section}]" for section in sections)
        return f"section [{key}] is unknown{nearest(key, sections)}; the sections are {known}"
    section, _, name = key.rpartition(".")
    homes = [other.rpartition(".")[0] for other in keys if other.rpartition(".")[2] == name]
    if homes:
        return f"'{name}' does not belong to {_place(section)}; it belongs to " + " or ".join(
            map(_place, homes)
        )
    close = _closest(key, keys)
    return f"'{key}' is unknown" + (f" (did you mean '{close}'?)" if close else "")


def _place(section: str) -> str:
    """Return how a section of a file is called in a message."""
    return f"section [{section}]" if section else "the top of the file, above all sections"


def _closest(key: str, keys: Iterable[str]) -> str | None:
    """Return the key that was probably meant: of the same name, beside it, or anywhere."""
    section, _, name = key.rpartition(".")
    names = {other: other.rpartition(".")[2] for other in keys}
    beside = {other: n for other, n in names.items() if other.rpartition(".")[0] == section}
    for pool, cutoff in ((names, 1.0), (beside, 0.5), (names, 0.5)):
        close = difflib.get_close_matches(name, pool.values(), n=1, cutoff=cutoff)
        if close:
            return next(other for other, n in pool.items() if n == close[0])
    return None


def _key_of(word: str) -> str:
    """Return the dotted key of a flag: '--optimizer.min-lr-ratio=0' is optimizer.min_lr_ratio."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _named(argv: Sequence[str]) -> set[str]:
    """Return the keys that the command line names; `--corpus.no-shuffle` names corpus.shuffle."""
    keys = {_key_of(word) for word in argv if word.startswith("--")}
    return keys | {re.sub(r"(^|\.)no_", r"\1", key) for key in keys}


def _read(
    argv: Sequence[str], form: Any, default: Schema, prog: str, about: type, keys: Sequence[str]
) -> Schema:
    """Let tyro read a value of the type `form`; `about` has the text and `keys` the options."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_plain_value)
    reported = io.StringIO()
    try:
        with contextlib.redirect_stderr(reported):
            line, unread = tyro.cli(
                form,
                prog=prog,
                description=about.__doc__,
                args=argv,
                default=default,
                return_unknown_args=True,
                registry=registry,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_paragraph(reported.getvalue())) from None
    if unread:
        raise ConfigError(_unread(unread[0], keys))
    return line


def _unread(word: str, keys: Sequence[str]) -> str:
    """Return why a word of the command line cannot be read, and what was probably meant."""
    if not word.startswith("-"):
        return (
            f"'{word}' on the command line belongs to no option; an option is written --name value"
        )
    close = _closest(_key_of(word), [*keys, "help"])
    near = f" (did you mean '--{close.replace('_', '-')}'?)" if close else ""
    return f"option '{word}' is unknown{near}; --help lists all"


def _plain_value(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Read a number or text, or none where it is allowed, with our own words for what is wrong."""
    hint: Any = info.type
    words = choices(hint) or (["true", "false"] if bool in members(hint) else [])
    metavar = "{" + ",".join(words) + "}" if words else None
    metavar = metavar or next((n for type_, n in METAVARS.items() if type_ in members(hint)), None)
    if hint is bool or metavar is None:
        return None  # a flag or a section: tyro's own way is right

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read_text(hint, words[0]),
        is_instance=lambda _: True,
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _first_paragraph(boxed: str) -> str:
    """Return the first paragraph of a framed message of tyro, as one line.

    The frame is of lines where standard output is UTF-8, else of blanks and dashes; its first line
    is a title, and a rule ends the first paragraph.
    """
    lines: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", boxed).splitlines()[1:]:
        text = line.strip("│ ")
        if text.strip("─-╰╯ "):
            lines.append(text)
        elif lines:
            break
    return re.sub(r"^Error parsing (\S+):", r"\1 is", " ".join(lines))
