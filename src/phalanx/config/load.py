"""Load a configuration: defaults, then TOML files, then the command line; record each source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from phalanx.config.command_line import read_words
from phalanx.config.fields import Schema, Use, keys_for, settings, value_at, with_value
from phalanx.config.file import RUN_FILE, read_values
from phalanx.config.schema import TrainConfig
from phalanx.errors import ConfigError
from phalanx.object_store import fetch, is_address, path_of


@dataclass(frozen=True)
class Loaded(Generic[Schema]):
    """A configuration, the source of each value, and options for the output of the verb.

    Attributes:
        sources: dotted key -> "default", path of a file or checkpoint, "command line" or "derived".
        show_config: whether to print the configuration instead of running the verb.
        json: whether the last line of standard output is one JSON document.
    """

    config: Schema
    sources: Mapping[str, str]
    show_config: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of each verb with a configuration, in addition to its settings."""

    config: list[str] = field(default_factory=list[str])
    """TOML file with any of the settings below; command-line values override it. Of several files,
    later ones override earlier ones."""
    show_config: bool = False
    """Print every value and where it came from, and do nothing else."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


def load_config(
    argv: Sequence[str],
    schema: type[Schema] = TrainConfig,
    *,
    prog: str = "phalanx train",
    revise: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {},
) -> Loaded[Schema]:
    """Load the configuration from a command line and the files that it names.

    Checks the types of all values, but not their ranges; see `fields.check_values`. `revise` is
    called with the values of files and command line, and returns values in place of them.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, a file that cannot be read.
        SystemExit: with code 0, after --help or --completion.
    """
    words = read_words(argv, _Options, schema, prog=prog)
    options = _Options(**{key: words.pop(key) for key in vars(_Options()) if key in words})
    keys = {setting.key: setting.hint for setting in settings(schema)}
    layers = [(path, read_values(path, keys)) for path in options.config]
    layers.append(("command line", words))
    # Later layers override earlier ones:
    #
    #     defaults < the run's config.toml, of a resume < --config files in order < command line
    #     < `revise`
    said = {key: value for _, values in layers for key, value in values.items()}
    layers.append(("derived", dict(revise(said))))
    said |= layers[-1][1]
    if schema is TrainConfig and (run_file := _run_file(said.get("resume"))) is not None:
        has_tokenizer = (run_file.parent / "tokenizer.json").is_file()
        dropped = keys_for(
            TrainConfig,
            Use.NOT_RESUMED | Use.FIXED_BY_TOKENIZER if has_tokenizer else Use.NOT_RESUMED,
        )
        for key, others in (  # key -> settings that replace it
            ("steps", ("epochs",)),
            ("epochs", ("steps",)),
            ("batch.global_size", ("batch.microbatch", "batch.accumulation")),
        ):
            if all(said.get(other) is not None for other in others):
                dropped.append(key)
        kept = read_values(os.fspath(run_file), keys, is_foreign=True)
        if unkept := [key for key in keys_for(TrainConfig, Use.NOT_SAVED) if key in kept]:
            raise ConfigError(
                f"{run_file}: no run saves '{unkept[0]}' there, and a resumed run does not read it "
                f"from a file that somebody else may have written; remove the setting, or give "
                f"--{unkept[0].replace('_', '-')} on the command line"
            )
        kept = {key: value for key, value in kept.items() if key not in dropped}
        layers.insert(0, (str(run_file), kept))
    config, sources = schema(), dict.fromkeys(keys, "default")
    for source, values in layers:
        for key, value in values.items():
            config = with_value(config, key, value)
            sources[key] = source
    return Loaded(config, sources, options.show_config, options.json)


def _run_file(resume: str | None) -> Path | None:
    """Return the settings file of the run folder or checkpoint to resume, if the file exists."""
    if resume is None:
        return None
    path = path_of(resume)
    if os.path.lexists(fetch(path / RUN_FILE)):  # also a pipe or dangling link, to report it
        return path / RUN_FILE
    folder = Path(os.path.abspath(path))  # "." has no parents
    run_file = fetch(folder.parent.parent / RUN_FILE)
    is_there = folder.parent.name == "checkpoints" and os.path.lexists(run_file)
    return run_file if is_there else None


def missing_path_notes(loaded: Loaded[TrainConfig]) -> list[str]:
    """Return a line on each path from a settings file that does not exist in the working folder."""
    lines: list[str] = []
    for key in keys_for(TrainConfig, Use.PATH):
        value, source = value_at(loaded.config, key), loaded.sources[key]
        if value is None or "*" in value or is_address(value):  # a glob, a mixture or an address
            continue
        if os.path.exists(value) or not os.path.isfile(source):
            continue
        beside = os.path.join(os.path.dirname(source), value)
        exists = f"; {beside} exists" if os.path.exists(beside) else ""
        lines.append(
            f"{key} '{value}', from {source}, does not exist in the working folder{exists}"
        )
    return lines
