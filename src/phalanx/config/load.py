"""Read a configuration: defaults, then TOML files, then the command line; each value's source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from phalanx.config.command_line import read_words
from phalanx.config.fields import Schema, Use, keys_for, settings, value_at, with_value
from phalanx.config.file import RUN_FILE, read_values
from phalanx.config.schema import TrainConfig


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
    said = read_words(argv, _Options, schema, prog=prog)
    options = _Options(**{key: said.pop(key) for key in vars(_Options()) if key in said})
    keys = {setting.key: setting.hint for setting in settings(schema)}
    layers = [(path, read_values(path, keys)) for path in options.config]
    layers.append(("command line", said))
    run_file = None
    if schema is TrainConfig and (run_file := _run_file(layers)) is not None:
        layers.insert(0, (str(run_file), _to_go_on(run_file, keys)))
    config, sources = schema(), dict.fromkeys(keys, "default")
    for source, values in layers:
        for key, value in values.items():
            config = with_value(config, key, value)
            sources[key] = source
    loaded = Loaded(config, sources, options.show_config, options.json)
    return loaded if run_file is None else _give_way(loaded, str(run_file))


def _run_file(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Path | None:
    """Return the file of settings of the run that is to go on, if there is one."""
    named = [values["resume"] for _, values in layers if "resume" in values]
    if not named or named[-1] is None:
        return None
    folder = Path(named[-1])
    if (folder / RUN_FILE).is_file():
        return folder / RUN_FILE
    folder = Path(os.path.abspath(folder))  # "." has no parents
    run_file = folder.parent.parent / RUN_FILE
    return run_file if folder.parent.name == "checkpoints" and run_file.is_file() else None


def _to_go_on(run_file: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are taken where it goes on."""
    has_tokenizer = (run_file.parent / "tokenizer.json").is_file()
    left = Use.FRESH | Use.OF_TOKENIZER if has_tokenizer else Use.FRESH
    dropped = keys_for(TrainConfig, left)
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
