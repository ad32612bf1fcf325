"""Read a configuration: defaults, then TOML files, then the command line; each value's source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from phalanx.config.command_line import read_words
from phalanx.config.fields import Schema, Use, keys_for, settings, value_at, with_value
from phalanx.config.file import RUN_FILE, read_values
from phalanx.config.schema import TrainConfig
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Loaded(Generic[Schema]):
    """A configuration, where each value came from, and how the verb is to answer.

    Attributes:
        sources: dotted key -> "default", the name of the file, "command line" or "derived".
        show_config: print the configuration instead of doing the work.
        json: make the last line of standard output one JSON document.
    """

    config: Schema
    sources: Mapping[str, str]
    show_config: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What each verb with a configuration has beside it."""

    config: list[str] = field(default_factory=list[str])
    """TOML file with any of the settings below; command-line values override it. Of several files,
    later ones override earlier ones."""
    show_config: bool = False
    """Print every value and where it came from, and do nothing else."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def load_config(
    argv: Sequence[str], schema: type[Schema] = TrainConfig, *, prog: str = "phalanx train"
) -> Loaded[Schema]:
    """Read the configuration that a command line and the files that it names ask for.

    The types of all values are checked; their ranges are not, see `fields.check_values`.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, a file that cannot be read.
        SystemExit: with code 0, after --help.
    """
    words = read_words(argv, _Options, schema, prog=prog)
    options = _Options(**{key: words.pop(key) for key in vars(_Options()) if key in words})
    keys = {setting.key: setting.hint for setting in settings(schema)}
    layers = [(path, read_values(path, keys)) for path in options.config]
    layers.append(("command line", words))
    said = {key: value for _, values in layers for key, value in values.items()}
    if schema is TrainConfig and (run_file := _run_file(said.get("resume"))) is not None:
        layers.insert(0, (str(run_file), _to_resume(run_file, keys, said)))
    config, sources = schema(), dict.fromkeys(keys, "default")
    for source, values in layers:
        for key, value in values.items():
            config = with_value(config, key, value)
            sources[key] = source
    return Loaded(config, sources, options.show_config, options.json)


def _run_file(resume: str | None) -> Path | None:
    """Return the file of settings of the run to resume, if there is one."""
    if resume is None:
        return None
    if os.path.lexists(Path(resume) / RUN_FILE):  # a pipe, or a link to nowhere, is reported, too
        return Path(resume) / RUN_FILE
    folder = Path(os.path.abspath(resume))  # "." has no parents
    run_file = folder.parent.parent / RUN_FILE
    is_there = folder.parent.name == "checkpoints" and os.path.lexists(run_file)
    return run_file if is_there else None


def _to_resume(run_file: Path, keys: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are that a resume takes, and `said` anew otherwise."""
    has_tokenizer = (run_file.parent / "tokenizer.json").is_file()
    dropped = keys_for(TrainConfig, Use.FRESH | Use.OF_TOKENIZER if has_tokenizer else Use.FRESH)
    for key, others in (  # another setting may say the same in another way
        ("steps", ("epochs",)),
        ("epochs", ("steps",)),
        ("batch.global_size", ("batch.microbatch", "batch.accumulation")),
    ):
        if all(said.get(other) is not None for other in others):
            dropped.append(key)
    values = read_values(str(run_file), keys, is_foreign=True)
    if unkept := [key for key in keys_for(TrainConfig, Use.UNKEPT) if key in values]:
        raise ConfigError(
            f"{run_file}: no run keeps '{unkept[0]}' there, and a resumed run does not take "
            f"it from a file that somebody else may have written; take it out, or give "
            f"--{unkept[0].replace('_', '-')} on the command line"
        )
    return {key: value for key, value in values.items() if key not in dropped}


def unfound_paths(loaded: Loaded[TrainConfig]) -> list[str]:
    """Say of each relative path of a file of settings that is not here where it would be found."""
    lines: list[str] = []
    for key in keys_for(TrainConfig, Use.PATH):
        value, source = value_at(loaded.config, key), loaded.sources[key]
        if value is None or os.path.exists(value) or not os.path.isfile(source):
            continue
        beside = os.path.join(os.path.dirname(source), value)
        exists = f"; {beside} exists" if os.path.exists(beside) else ""
        lines.append(f"{key} '{value}', of {source}, is looked for in the working folder{exists}")
    return lines
