"""What can be judged of a request before torch is loaded, so that a wrong one ends at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from phalanx.checkpoint import manifest
from phalanx.checkpoint.foreign import brief
from phalanx.checkpoint.manifest import Checkpoint
from phalanx.config import BatchPlan, TrainConfig, solve_batch
from phalanx.config.fields import check_value, settings
from phalanx.data.corpus import sources
from phalanx.errors import CheckpointError, ConfigError
from phalanx.launch.torchrun import is_under_torchrun, read_place
from phalanx.models.registry import shape_of as preset
from phalanx.models.registry import with_sizes
from phalanx.models.shape import ModelShape
from phalanx.planner.fit import Load, check_fit
from phalanx.planner.host import may_have_gpu
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import Axis, Strategy

DEFAULT_MODEL: Final = "demo"
"""Preset of a run that names no model and begins with no checkpoint."""


def judge(config: TrainConfig) -> None:
    """Refuse what is wrong with a request whatever torch, the devices and the data may say.

    Raises:
        PhalanxError: a folder, text or preset is missing, sizes contradict each other, or the model
            is too large for this host.
    """
    start, init = checkpoint_of(config.resume, "resume"), checkpoint_of(config.init, "init")
    shape = None
    if start is None and init is None:
        shape = with_sizes(preset(config.model or DEFAULT_MODEL), config.shape)
        check_positions(config, shape)
    if config.data is not None:
        sources(config.data)
    is_cpu = config.device == "cpu" or not may_have_gpu()
    num_ranks = read_place().num_ranks if is_under_torchrun() else config.nproc
    if config.strategy is not None:
        strategy = Strategy.parse(config.strategy)
    elif num_ranks is not None or is_cpu:
        strategy = Strategy(dp=Axis(num_ranks or 2, "bucketed"))
    else:
        return  # one process for each GPU
    if start is not None:
        return  # the batch is the run's
    batch = solve_batch(config.batch, strategy.data_ranks)
    if shape is not None and is_cpu:
        check_memory(config, name_of_sizes(config, shape), shape, strategy, batch, "cpu")


def name_of_sizes(config: TrainConfig, shape: ModelShape) -> str:
    """Return the name of a preset, or of its number of parameters if its sizes were replaced."""
    name = config.model or DEFAULT_MODEL
    if dataclasses.replace(shape, dropout=0.0) == dataclasses.replace(preset(name), dropout=0.0):
        return name
    number = num_parameters(shape).total
    for unit, suffix in ((10**9, "b"), (10**6, "m"), (10**3, "k")):
        if number >= unit:
            size = f"{number / unit:.3g}" if number < 1000 * unit else f"{number // unit}"
            return f"decoder-{size}{suffix}"
    return f"decoder-{number}"


def checkpoint_of(path: str | None, setting: str) -> Checkpoint | None:
    """Return the checkpoint that a setting names.

    Raises:
        CheckpointError: there is none, or it says what no run could have been told.
    """
    if path is None:
        return None
    if (Path(path) / "config.json").is_file():
        raise CheckpointError(
            f"{setting} is {path}, a Hugging Face folder; make a checkpoint of it by `phalanx "
            f"convert {path} DST`, and begin a run with --init DST"
        )
    found = manifest.find_and_read(Path(path))
    try:
        for entry in settings(TrainConfig):
            if entry.key in found.about.settings:
                check_value(entry, found.about.settings[entry.key])
    except ConfigError as error:
        file, words = found.folder / manifest.NAME, brief(error, 300)
        raise CheckpointError(f"cannot read the settings in {file}: {words}") from error
    return found


def check_positions(config: TrainConfig, shape: ModelShape) -> None:
    """Refuse samples that are longer than the model's positions.

    Raises:
        ConfigError: with both sizes.
    """
    if config.corpus.seq_len > shape.max_seq_len:
        raise ConfigError(
            f"corpus.seq_len is {config.corpus.seq_len}, but the model's positions end at "
            f"{shape.max_seq_len}; set corpus.seq_len to at most {shape.max_seq_len}, or "
            "shape.max_seq_len higher"
        )


def check_memory(
    config: TrainConfig,
    name: str,
    shape: ModelShape,
    strategy: Strategy,
    batch: BatchPlan,
    device: str,
) -> None:
    """Refuse a model that this host cannot hold; see `planner.fit`.

    Raises:
        ConfigError: the arithmetic, and what would fit.
    """
    load = Load(
        shape=shape,
        strategy=strategy,
        microbatch=batch.microbatch,
        accumulation=batch.accumulation,
        seq_len=config.corpus.seq_len,
        precision=config.precision,
        is_compiled=config.compile,
    )
    num_here = read_place().num_here if is_under_torchrun() else strategy.num_ranks
    check_fit(load, name, device, num_here)
