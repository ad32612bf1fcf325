"""Read a configuration: defaults, then a TOML file, then the command line; each value's source."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, cast

import tyro

# Private, and the only way to change the help of a field; tests/cli/test_help.py pins it.
from tyro.constructors._struct_spec_dataclass import dataclass_rule

from phalanx.config import TrainConfig, solve_batch
from phalanx.config_check import choices, members, read_text, settings, value_at
from phalanx.config_file import RUN_FILE, closest, read_values
from phalanx.errors import ConfigError
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
    """TOML file with any of the settings below; command-line values override it. Of several files,
    later ones override earlier ones."""
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
    files = [(path, read_values(path, keys)) for path in _values_of("config", argv)]
    run_file = _run_file(argv, files) if schema is TrainConfig else None
    if run_file is not None:
        files = [(str(run_file), _to_go_on(run_file, keys)), *files]
    sources = dict.fromkeys(keys, "default")
    base = schema()
    for path, values in files:
        for key, value in values.items():
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
    loaded = Loaded(line.settings, sources, line.show_config, line.json)
    return loaded if run_file is None else _give_way(loaded, str(run_file))


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


_OF_ONE_RUN: Final = ("init", "batch.microbatch")
"""Settings that a run which goes on does not take from its file: it has its own weights, and the
microbatch of its checkpoint as far as that suits the number of ranks."""

_OF_ITS_TOKENIZER: Final = ("tokenizer", "corpus.vocab_size")
"""Settings that are not taken either where the tokenizer they led to stands beside the file."""


def _values_of(option: str, argv: Sequence[str]) -> list[str]:
    """Return each value that the command line gives an option, in order."""
    values: list[str] = []
    for index, word in enumerate(argv):
        if word.startswith(f"--{option}="):
            values.append(word.partition("=")[2])
        elif word == f"--{option}":
            values += argv[index + 1 : index + 2]
    return values


def _run_file(argv: Sequence[str], files: Sequence[tuple[str, dict[str, Any]]]) -> Path | None:
    """Return the file of settings of the run that is to go on, if there is one."""
    named = [values["resume"] for _, values in files if "resume" in values]
    named += _values_of("resume", argv)
    if not named or named[-1].lower() == "none":
        return None
    folder = Path(named[-1])
    if (folder / RUN_FILE).is_file():
        return folder / RUN_FILE
    place = Path(os.path.abspath(folder))  # "." has no parents
    run_file = place.parent.parent / RUN_FILE
    return run_file if place.parent.name == "checkpoints" and run_file.is_file() else None


def _to_go_on(run_file: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are taken where it goes on."""
    dropped = _OF_ONE_RUN
    if (run_file.parent / "tokenizer.json").is_file():
        dropped += _OF_ITS_TOKENIZER
    values = read_values(str(run_file), keys)
    return {key: value for key, value in values.items() if key not in dropped}


def _give_way(loaded: Loaded[Schema], run_file: str) -> Loaded[Schema]:
    """Unset what a run was told where another setting, given now, says the same in another way."""
    config, sources = loaded.config, dict(loaded.sources)

    def is_given(*keys: str) -> bool:
        return all(sources[k] != run_file and value_at(config, k) is not None for k in keys)

    for key, others in (
        ("steps", ("epochs",)),
        ("epochs", ("steps",)),
        ("batch.global_size", ("batch.microbatch", "batch.accumulation")),
    ):
        if sources[key] == run_file and is_given(*others):
            config, sources[key] = with_value(config, key, None), "default"
    return dataclasses.replace(loaded, config=config, sources=sources)


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
    registry.struct_rule(_plain_section)
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
    close = closest(_key_of(word), [*keys, "help"])
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


def _plain_section(
    info: tyro.constructors.StructTypeInfo,
) -> tyro.constructors.StructConstructorSpec | None:
    """Read a dataclass as tyro does; its help has whole paragraphs and no default of nothing.

    What an unset value means stands in its help, and a flag is off.
    """
    found = dataclass_rule(info)
    if found is None:
        return None
    fields: list[tyro.constructors.StructFieldSpec] = []
    for field in found.fields:
        text = field.helptext() if callable(field.helptext) else field.helptext
        kind: Any = field.type
        if field.default is None or field.default is False:
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
        fields.append(
            dataclasses.replace(field, type=kind, helptext=None if text is None else _joined(text))
        )
    return dataclasses.replace(found, fields=tuple(fields))


def _joined(text: str) -> str:
    """Return the paragraphs of a docstring, each in one line."""
    return "\n".join(" ".join(part.split()) for part in text.split("\n\n"))


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
