"""What a run takes from the checkpoint it begins with or goes on from, and what differs from it.

`start` is a checkpoint to go on from (--resume), `init` one whose weights a run begins with.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from phalanx.checkpoint import companions, hugging_face, manifest
from phalanx.checkpoint.convert import shape_in
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.config import BatchConfig, BatchPlan, TrainConfig
from phalanx.errors import BatchError, CheckpointError, ConfigError
from phalanx.models.registry import shape_of as preset
from phalanx.models.registry import with_sizes
from phalanx.models.shape import ModelShape

DEFAULT_MODEL: Final = "demo"
"""Preset of a run that names no model and begins with no checkpoint."""

_FREE: Final = ("model", "epochs", "batch.microbatch")
"""Settings in a manifest that change no number of the run, or show in those that do."""


def checkpoint_of(path: str | None, setting: str) -> Checkpoint | None:
    """Return the checkpoint that a setting names.

    Raises:
        CheckpointError: there is none.
    """
    if path is None:
        return None
    if hugging_face.is_hugging_face(Path(path)):
        raise CheckpointError(
            f"{setting} is {path}, a Hugging Face folder; make a checkpoint of it by `phalanx "
            f"convert {path} DST`, and begin a run with --init DST"
        )
    return manifest.find_and_read(Path(path))


def name_of(config: TrainConfig, start: Checkpoint | None, init: Checkpoint | None) -> str:
    """Return what the run's model is called; one that goes on keeps its name."""
    if config.model is not None:
        return config.model
    if start is not None and "model" in start.about.settings:
        return start.about.settings["model"]
    if (origin := start or init) is None:
        return DEFAULT_MODEL
    return (manifest.run_of(origin.folder) or origin.folder.resolve()).name


def shape_of(config: TrainConfig, start: Checkpoint | None, init: Checkpoint | None) -> ModelShape:
    """Return the model's shape: as the settings say, or that of the weights it begins with.

    Dropout is no property of weights, so it may differ from that of the checkpoint.

    Raises:
        ConfigError: the settings contradict each other, or the weights of `init`.
    """
    named = None if config.model is None else preset(config.model)
    if init is None:
        held = None if start is None else shape_in(start.about, start.folder)
        return with_sizes(named or held or preset(DEFAULT_MODEL), config.shape)
    held = shape_in(init.about, init.folder)
    wanted = with_sizes(named or held, config.shape)
    for name, value in dataclasses.asdict(held).items():
        asked = getattr(wanted, name)
        if asked != value and name != "dropout":
            words = f"model {config.model} with the given shape" if named else "the given shape"
            raise ConfigError(
                f"init is {config.init}, weights of a model whose {name} is {value}, but {words} "
                f"has {asked}; the run takes the checkpoint's shape, so leave model and shape out"
            )
    dropout = config.shape.dropout
    return held if dropout is None else dataclasses.replace(held, dropout=dropout)


def tokenizer_of(
    config: TrainConfig, start: Checkpoint | None, init: Checkpoint | None
) -> str | None:
    """Return the tokenizer.json to use: the one that is given, else the checkpoint's, if any.

    Settings for a tokenizer that is to be trained go before the checkpoint's.

    Raises:
        ConfigError: there is none for the weights of `init`, and none was asked for.
    """
    origin = start or init
    if config.tokenizer is not None or origin is None or config.corpus.vocab_size is not None:
        return config.tokenizer
    found = companions.tokenizer_of(origin.folder)
    if found is None and init is not None:
        raise ConfigError(
            f"init is {config.init}, which has no {companions.TOKENIZER}, so nothing says which "
            "tokens the rows of its embedding stand for; give it by --tokenizer, or train another "
            "one by --corpus.vocab-size"
        )
    return None if found is None else str(found)


def settings_of(config: TrainConfig, batch: BatchPlan, name: str, dropout: float) -> dict[str, Any]:
    """Return what a manifest keeps of the settings; shape and stream have places of their own.

    Args:
        config: the settings.
        batch: the batch law, solved.
        name: what the model is called.
        dropout: of the model.
    """
    return {
        "model": name,
        "epochs": config.epochs,
        "batch.global_size": batch.global_size,
        "batch.microbatch": batch.microbatch,
        "precision": config.precision,
        "corpus.document_mask": config.corpus.document_mask,
        "corpus.tail": config.corpus.tail,
        "shape.dropout": dropout,
        **{f"optimizer.{key}": value for key, value in vars(config.optimizer).items()},
    }


def as_before(config: TrainConfig, about: Manifest, num_data_ranks: int) -> TrainConfig:
    """Return the settings, with the run's own length and batch where they say nothing of those.

    The rate of learning follows from the length, so another one would be another run.

    Args:
        config: the settings to go on with.
        about: of the checkpoint to go on from.
        num_data_ranks: groups of ranks that see different samples.

    Raises:
        BatchError: the ranks do not divide the run's global batch.
    """
    if config.steps is None and config.epochs is None:
        epochs = about.settings.get("epochs")  # its last batch may be a smaller one
        steps = about.num_steps if epochs is None else None
        config = dataclasses.replace(config, steps=steps, epochs=epochs)
    size = about.settings.get("batch.global_size")
    given = [value for value in vars(config.batch).values() if value is not None]
    if size is not None and not given:
        config = dataclasses.replace(config, batch=_batch_of(about.settings, num_data_ranks))
    elif size is not None and len(given) == 1 and config.batch.global_size is None:
        batch = dataclasses.replace(config.batch, global_size=size)
        config = dataclasses.replace(config, batch=batch)
    return config


def _batch_of(settings: dict[str, Any], num_data_ranks: int) -> BatchConfig:
    """Return the run's global batch in microbatches of its own size, or the largest that fit."""
    size: int = settings["batch.global_size"]
    share, rest = divmod(size, num_data_ranks)
    if rest:
        legal = min(_divisors(size), key=lambda number: abs(number - num_data_ranks))
        above = (size // num_data_ranks + 1) * num_data_ranks
        raise BatchError(
            f"the run's global batch is {size} sequences, which {num_data_ranks} data ranks do not "
            f"divide; use a strategy of {legal} data ranks, or --batch.global-size {above}"
        )
    largest = max(n for n in _divisors(share) if n <= settings["batch.microbatch"])
    return BatchConfig(global_size=size, microbatch=largest)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def remarks(before: Manifest, now: Manifest) -> list[str]:
    """Return what a person should know of a run that goes on, in a line each.

    Args:
        before: of the checkpoint it goes on from.
        now: of the run, where it goes on.
    """
    lines: list[str] = []
    earlier = {**before.settings, "steps": before.num_steps}
    settings = {**now.settings, "steps": now.num_steps}
    differing = [
        f"{key} {earlier[key]} -> {value}"
        for key, value in json.loads(json.dumps(settings)).items()  # as a manifest has them
        if key not in _FREE and key in earlier and earlier[key] != value
    ]
    if differing:
        lines.append(f"goes on with other settings than before: {', '.join(differing)}")
    if before.steps_done >= now.num_steps:
        lines.append(
            f"nothing left to do: the checkpoint is after step {before.steps_done}, and the run "
            f"takes {now.num_steps} in all; --steps says how many"
        )
    return lines
