"""From a configuration to a job: everything that is decided before the first process starts."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchPlan, TrainConfig, solve_batch
from phalanx.data.loader import total_steps
from phalanx.data.samples import Samples
from phalanx.data.tokens import Progress, TokenFiles, prepare
from phalanx.errors import ConfigError, DataError
from phalanx.launch.torchrun import is_under_torchrun
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import Axis, Strategy, check_ranks, require_built

DEMO_STEPS = 400
"""Optimizer steps of a run that names neither steps nor epochs."""

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""float32 weights and the two moments of AdamW."""


@dataclass(frozen=True)
class Job:
    """A run, resolved; the same value on every rank.

    Attributes:
        config: the configuration it comes from.
        strategy: how the work is split.
        shape: the model.
        batch: the batch law, solved.
        device: "cpu" or "cuda".
        num_steps: optimizer steps of the whole run, those of an earlier part included.
        tokens: the prepared data.
        out: folder that the run writes to.
        start: folder and manifest of the checkpoint to go on from, or None.
    """

    config: TrainConfig
    strategy: Strategy
    shape: ModelShape
    batch: BatchPlan
    device: str
    num_steps: int
    tokens: TokenFiles
    out: Path
    start: tuple[Path, Manifest] | None


def choose_strategy(config: TrainConfig) -> tuple[Strategy, str]:
    """Return the strategy, dp over all processes if none is named, and the device.

    Processes are as many as torchrun started or --nproc says; else what the strategy needs; else
    one a GPU, or 2 on a CPU.

    Raises:
        StrategyError: it cannot be read, is not built, or does not fit the processes.
        ConfigError: there is no such device, or too few of it.
    """
    device, num_devices = _choose_device(config.device)
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_under_torchrun() else config.nproc
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
    strategy, device = choose_strategy(config)
    shape = with_sizes(shape_of(config.model), config.shape)
    if config.corpus.seq_len > shape.max_seq_len:
        raise ConfigError(
            f"corpus.seq_len is {config.corpus.seq_len}, but the model's positions end at "
            f"{shape.max_seq_len}; set corpus.seq_len to at most {shape.max_seq_len}, or "
            "shape.max_seq_len higher"
        )
    batch = solve_batch(config.batch, strategy.data_ranks)
    start = None
    if config.resume is not None:
        folder = manifest.find(Path(config.resume))
        start = (folder, manifest.read(folder))
    out = _out_folder(config, strategy)
    _check_space(out, shape)
    tokens = prepare(
        config.data,
        config.corpus,
        model_vocab_size=shape.vocab_size,
        tokenizer=config.tokenizer,
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
    return Job(
        config=config,
        strategy=strategy,
        shape=shape,
        batch=batch,
        device=device,
        num_steps=count_steps(config, batch, num_samples, None if start is None else start[1]),
        tokens=tokens,
        out=out,
        start=start,
    )


def count_steps(
    config: TrainConfig, batch: BatchPlan, num_samples: int, start: Manifest | None
) -> int:
    """Return the optimizer steps of the run, those before `start` included.

    Raises:
        DataError: the data does not fill one batch, and what does not is dropped.
    """
    if config.epochs is None:
        return config.steps if config.steps is not None else DEMO_STEPS
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


def _out_folder(config: TrainConfig, strategy: Strategy) -> Path:
    if config.out is not None:
        return Path(config.out)
    if config.resume is not None:
        path = Path(config.resume)
        return path.parent.parent if (path / manifest.NAME).exists() else path
    name = f"{config.model}-{strategy}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path("runs") / name.replace(":", "_").replace("/", "_").replace(",", "-")


def _check_space(out: Path, shape: ModelShape) -> None:
    """Refuse to begin what could not be saved."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; give another --out") from error
    needed_bytes = CHECKPOINT_BYTES_PER_PARAMETER * num_parameters(shape).total
    free_bytes = shutil.disk_usage(out).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"a checkpoint needs {needed_bytes / 2**30:.2f} GiB, but {out} has "
            f"{free_bytes / 2**30:.2f} GiB left; give another --out or make room"
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
