"""From a configuration to a job: everything that is decided before the first process starts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint import hugging_face, manifest
from phalanx.checkpoint.companions import TOKENIZER, tokenizer_of
from phalanx.checkpoint.convert import shape_in
from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchPlan, TrainConfig, solve_batch
from phalanx.data.loader import total_steps
from phalanx.data.samples import Samples
from phalanx.data.tokens import Progress, TokenFiles, prepare
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.launch.torchrun import is_under_torchrun
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.strategy import Axis, Strategy, check_ranks, require_built
from phalanx.train.precision import Precision
from phalanx.train.precision import resolve as resolve_precision
from phalanx.train.resume import as_before, remarks, settings_of
from phalanx.train.run_folder import (
    check_space,
    check_unused,
    check_writable,
    checkpoint_bytes,
    count_checkpoints,
    out_folder,
)

DEFAULT_MODEL = "demo"
"""Preset of a run that names no model and begins with no checkpoint."""

DEFAULT_STEPS = 560
"""Optimizer steps of a run that names neither steps nor epochs: as many as suit the demo."""


@dataclass(frozen=True)
class Job:
    """A run, resolved; the same value on every rank.

    Attributes:
        config: the configuration it comes from, completed by the checkpoint it goes on from.
        strategy: how the work is split.
        name: what the model is called: its preset, or the run or folder its weights are from.
        shape: the model.
        batch: the batch law, solved.
        device: "cpu" or "cuda".
        num_steps: optimizer steps of the whole run, those of an earlier part included.
        tokens: the prepared data.
        out: folder that the run writes to.
        start: folder and manifest of the checkpoint to go on from, or None.
        init: folder of the checkpoint that the first weights come from, or None.
    """

    config: TrainConfig
    strategy: Strategy
    name: str
    shape: ModelShape
    batch: BatchPlan
    device: str
    num_steps: int
    tokens: TokenFiles
    out: Path
    start: tuple[Path, Manifest] | None
    init: Path | None = None


def choose_strategy(config: TrainConfig) -> tuple[Strategy, str]:
    """Return the strategy, dp over all processes if none is named, and the device.

    Processes are as many as torchrun started or --nproc says; else what the strategy needs; else
    one a GPU, or 2 on a CPU.

    Raises:
        StrategyError: it cannot be read, is not built, or does not fit the processes.
        ConfigError: there is no such device, or too few of it, or torchrun started another
            number of processes than --nproc says.
    """
    device, num_devices = _choose_device(config.device)
    num_ranks = config.nproc
    if is_under_torchrun():
        num_ranks = int(os.environ["WORLD_SIZE"])
        if config.nproc not in (None, num_ranks):
            raise ConfigError(
                f"nproc is {config.nproc}, but torchrun has started {num_ranks} processes; leave "
                f"nproc out, or set it to {num_ranks}"
            )
    if config.strategy is None:
        strategy = Strategy(dp=Axis(num_ranks or num_devices or 2, "bucketed"))
    else:
        strategy = Strategy.parse(config.strategy)
        require_built(strategy)
        if num_ranks is not None:
            check_ranks(strategy, num_ranks)
    if device == "cuda" and not is_under_torchrun() and strategy.num_ranks > num_devices:
        raise ConfigError(
            f"strategy {strategy} needs {strategy.num_ranks} GPUs, but this host has "
            f"{num_devices}; use --strategy dp{num_devices}, or --device cpu"
        )
    return strategy, device


def _choose_device(name: str) -> tuple[str, int]:
    """Return the device for the setting `name`, and how many GPUs this host has."""
    if name == "cpu":
        return "cpu", 0
    import torch

    if torch.cuda.is_available():
        return "cuda", torch.cuda.device_count()
    if name == "cuda":
        raise ConfigError("device is cuda, but this host has no CUDA device; use --device cpu")
    return "cpu", 0


def resolve(config: TrainConfig, progress: Progress | None = None) -> Job:
    """Decide everything, and prepare the data.

    Raises:
        PhalanxError: anything that would fail later, in one message.
    """
    start, init = _checkpoint(config.resume, "resume"), _checkpoint(config.init, "init")
    if start is not None:
        start[1].check_optimizer()
    strategy, device = choose_strategy(config)
    if start is not None:
        config = as_before(config, start[1], strategy.data_ranks)
    name = _name_of(config, start, init)
    shape = _shape_of(config, start, init)
    if config.corpus.seq_len > shape.max_seq_len:
        raise ConfigError(
            f"corpus.seq_len is {config.corpus.seq_len}, but the model's positions end at "
            f"{shape.max_seq_len}; set corpus.seq_len to at most {shape.max_seq_len}, or "
            "shape.max_seq_len higher"
        )
    strategy.recompute.segment_size(shape.num_layers)  # raises where there are too few blocks
    batch = solve_batch(config.batch, strategy.data_ranks)
    precision = _precision_of(config, device)
    out = out_folder(config, strategy, name)
    check_unused(out, start)
    check_writable(out)
    tokens = prepare(
        config.data,
        config.corpus,
        model_vocab_size=shape.vocab_size,
        tokenizer=_tokenizer_of(config, start, init),
        progress=progress,
    )
    if start is not None:
        start[1].check(shape, _stream_of(config, tokens))
    num_samples = len(Samples(tokens.train, config.corpus.seq_len))
    if num_samples < 1:
        raise DataError(
            f"the data leaves {tokens.train.num_tokens} tokens to train on, too few for one "
            "sample; give more text, or a smaller corpus.validation"
        )
    num_steps = count_steps(config, batch, num_samples, None if start is None else start[1])
    _check_warmup(config, num_steps)
    steps_done = 0 if start is None else start[1].steps_done
    num_checkpoints = count_checkpoints(num_steps, config.save_every, steps_done=steps_done)
    check_space(out, num_checkpoints, config.keep_checkpoints, checkpoint_bytes(shape, precision))
    return Job(
        config=config,
        strategy=strategy,
        name=name,
        shape=shape,
        batch=batch,
        device=device,
        num_steps=num_steps,
        tokens=tokens,
        out=out,
        start=start,
        init=None if init is None else init[0],
    )


def _checkpoint(path: str | None, setting: str) -> tuple[Path, Manifest] | None:
    """Return folder and manifest of the checkpoint that a setting names.

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
    folder = manifest.find(Path(path))
    return folder, manifest.read(folder)


def _name_of(
    config: TrainConfig, start: tuple[Path, Manifest] | None, init: tuple[Path, Manifest] | None
) -> str:
    """Return what the run's model is called; one that goes on keeps its name."""
    if config.model is not None:
        return config.model
    if start is not None and "model" in start[1].settings:
        return start[1].settings["model"]
    if (origin := start or init) is None:
        return DEFAULT_MODEL
    return (manifest.run_of(origin[0]) or origin[0].resolve()).name


def _shape_of(
    config: TrainConfig, start: tuple[Path, Manifest] | None, init: tuple[Path, Manifest] | None
) -> ModelShape:
    """Return the model's shape: as the settings say, or that of the weights it begins with.

    Dropout is no property of weights, so it may differ from that of the checkpoint.

    Raises:
        ConfigError: the settings contradict each other, or the weights of `init`.
    """
    named = None if config.model is None else shape_of(config.model)
    if init is None:
        held = None if start is None else shape_in(start[1], start[0])
        return with_sizes(named or held or shape_of(DEFAULT_MODEL), config.shape)
    held = shape_in(init[1], init[0])
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


def _tokenizer_of(
    config: TrainConfig, start: tuple[Path, Manifest] | None, init: tuple[Path, Manifest] | None
) -> str | None:
    """Return the tokenizer.json to use: the one that is given, else the checkpoint's, if any.

    Settings for a tokenizer that is to be trained go before the checkpoint's.

    Raises:
        ConfigError: there is none for the weights of `init`, and none was asked for.
    """
    origin = start or init
    if config.tokenizer is not None or origin is None or config.corpus.vocab_size is not None:
        return config.tokenizer
    found = tokenizer_of(origin[0])
    if found is None and init is not None:
        raise ConfigError(
            f"init is {config.init}, which has no {TOKENIZER}, so nothing says which tokens the "
            "rows of its embedding stand for; give it by --tokenizer, or train another one by "
            "--corpus.vocab-size"
        )
    return None if found is None else str(found)


def count_steps(
    config: TrainConfig, batch: BatchPlan, num_samples: int, start: Manifest | None
) -> int:
    """Return the optimizer steps of the run, those before `start` included.

    Raises:
        DataError: the data does not fill one batch, and what does not is dropped.
    """
    if config.epochs is None:
        return config.steps if config.steps is not None else DEFAULT_STEPS
    done, consumed = (start.steps_done, start.consumed) if start is not None else (0, 0)
    tail = config.corpus.tail
    left = total_steps(num_samples, batch.global_size, config.epochs, tail, consumed=consumed)
    if done + left == 0:
        raise DataError(
            f"{config.epochs:g} epochs of {num_samples} samples do not fill one global batch of "
            f"{batch.global_size}, and corpus.tail is drop; use --corpus.tail keep, or a global "
            f"batch of at most {num_samples}"
        )
    return done + left


def _precision_of(config: TrainConfig, device: str) -> Precision:
    """Return the data types as far as they matter before the ranks start.

    "auto" asks the GPU what it can do, and the process that starts the ranks must not occupy one;
    whichever it chooses, master weights are those of float32.
    """
    name = "float32" if config.precision == "auto" else config.precision
    return resolve_precision(name, device)


def _check_warmup(config: TrainConfig, num_steps: int) -> None:
    warmup_steps = config.optimizer.warmup_steps
    if warmup_steps is not None and warmup_steps >= num_steps > 0:
        raise ConfigError(
            f"optimizer.warmup_steps is {warmup_steps}, but the run has {num_steps} steps and the "
            f"warm-up must end before the last; the nearest is {num_steps - 1}"
        )


def manifest_of(
    job: Job, steps_done: int, consumed: int, *, scaler: dict[str, Any] | None = None
) -> Manifest:
    """Return what a checkpoint of this job says of itself."""
    return Manifest(
        steps_done=steps_done,
        num_steps=job.num_steps,
        consumed=consumed,
        num_ranks=job.strategy.num_ranks,
        strategy=str(job.strategy),
        shape=dataclasses.asdict(job.shape),
        stream=_stream_of(job.config, job.tokens),
        settings=settings_of(job.config, job.batch, job.name, job.shape.dropout),
        scaler=scaler,
    )


def _stream_of(config: TrainConfig, tokens: TokenFiles) -> dict[str, Any]:
    """Return what fixes the order of the samples, so that a place in it means the same."""
    return {
        "text and tokenizer": tokens.folder.name,
        "seed": config.seed,
        "corpus.seq_len": config.corpus.seq_len,
        "corpus.shuffle": config.corpus.shuffle,
    }


def remarks_on(job: Job) -> list[str]:
    """Return what a person should know of a job that goes on with a run, in a line each."""
    if job.start is None:
        return []
    settings = settings_of(job.config, job.batch, job.name, job.shape.dropout)
    return remarks(job.start[1], settings, job.num_steps)
