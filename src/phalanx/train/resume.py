"""How a run goes on: what it takes from its checkpoint's manifest, and what differs from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchConfig, BatchPlan, TrainConfig
from phalanx.errors import BatchError

_FREE: Final = ("model", "epochs", "batch.microbatch")
"""Settings in a manifest that change no number of the run, or show in those that do."""


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
    if config.batch == BatchConfig() and "batch.global_size" in about.settings:
        config = dataclasses.replace(config, batch=_batch_of(about.settings, num_data_ranks))
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


def remarks(about: Manifest, settings: dict[str, Any], num_steps: int) -> list[str]:
    """Return what a person should know of a run that goes on, in a line each.

    Args:
        about: of the checkpoint it goes on from.
        settings: those it goes on with, as `settings_of` gives them.
        num_steps: optimizer steps of the whole run.
    """
    lines: list[str] = []
    before = {**about.settings, "steps": about.num_steps}
    now = json.loads(json.dumps({**settings, "steps": num_steps}))  # as a manifest has them
    differing = [
        f"{key} {before[key]} -> {value}"
        for key, value in now.items()
        if key not in _FREE and key in before and before[key] != value
    ]
    if differing:
        lines.append(f"goes on with other settings than before: {', '.join(differing)}")
    if about.steps_done >= num_steps:
        lines.append(
            f"nothing left to do: the checkpoint is after step {about.steps_done}, and the run "
            f"takes {num_steps} in all; --steps says how many"
        )
    return lines
