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
from phalanx.checkpoint.companions import tokenizer_of
from phalanx.checkpoint.convert import shape_in
from phalanx.checkpoint.manifest import Manifest
from phalanx.config import BatchPlan, ShapeConfig, TrainConfig, solve_batch
from phalanx.data.loader import total_steps
from phalanx.data.samples import Samples
from phalanx.data.tokens import Progress, TokenFiles, prepare
from phalanx.errors import ConfigError, DataError
from phalanx.launch.torchrun import is_under_torchrun
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ModelShape
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import Axis, Strategy, check_ranks, require_built
from phalanx.train.precision import Precision
from phalanx.train.precision import resolve as resolve_precision

DEFAULT_STEPS = 560
"""Optimizer steps of a run that names neither steps nor epochs: as many as suit the demo."""

TENSORS_PER_PARAMETER = 3
"""What a checkpoint keeps of each parameter: the weight and the two moments of AdamW."""


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
        init: folder of the checkpoint that the first weights come from, or None.
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
    strategy, device = choose_strategy(config)
    start, init = _checkpoint(config.resume), _checkpoint(config.init)
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
    out = _out_folder(config, strategy)
    _check_unused(out, start)
    _check_writable(out)
    tokens = prepare(
        config.data,
        config.corpus,
        model_vocab_size=shape.vocab_size,
        tokenizer=_tokenizer_of(config, start or init),
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
    num_checkpoints = count_checkpoints(
        num_steps, config.save_every, steps_done=0 if start is None else start[1].steps_done
    )
    if config.keep_checkpoints is not None:  # one more is there while the oldest still is
        num_checkpoints = min(num_checkpoints, config.keep_checkpoints + 1)
    _check_space(out, num_checkpoints, checkpoint_bytes(shape, precision))
    return Job(
        config=config,
        strategy=strategy,
        shape=shape,
        batch=batch,
        device=device,
        num_steps=num_steps,
        tokens=tokens,
        out=out,
        start=start,
        init=None if init is None else init[0],
    )


def _checkpoint(path: str | None) -> tuple[Path, Manifest] | None:
    """Return folder and manifest of the checkpoint that a setting names.

    Raises:
        CheckpointError: there is none.
    """
    if path is None:
        return None
    folder = manifest.find(Path(path))
    return folder, manifest.read(folder)


def _shape_of(
    config: TrainConfig, start: tuple[Path, Manifest] | None, init: tuple[Path, Manifest] | None
) -> ModelShape:
    """Return the model's shape: as the settings say, or that of the weights it begins with.

    Dropout is no property of weights, so it may differ from that of the checkpoint.

    Raises:
        ConfigError: the settings contradict each other, or the weights of `init`.
    """
    is_named = config.model != TrainConfig().model
    if init is None:
        if start is not None and not is_named and config.shape == ShapeConfig():
            return shape_in(start[1], start[0])
        return with_sizes(shape_of(config.model), config.shape)
    held = shape_in(init[1], init[0])
    wanted = with_sizes(shape_of(config.model) if is_named else held, config.shape)
    for name, value in dataclasses.asdict(held).items():
        asked = getattr(wanted, name)
        if asked != value and name != "dropout":
            words = f"model {config.model} with the given shape" if is_named else "the given shape"
            raise ConfigError(
                f"init is {config.init}, weights of a model whose {name} is {value}, but {words} "
                f"has {asked}; the run takes the checkpoint's shape, so leave model and shape out"
            )
    dropout = config.shape.dropout
    return held if dropout is None else dataclasses.replace(held, dropout=dropout)


def _tokenizer_of(config: TrainConfig, origin: tuple[Path, Manifest] | None) -> str | None:
    """Return the tokenizer.json to use: the one that is given, else the checkpoint's, if any.

    Settings for a tokenizer that is to be trained go before the checkpoint's.
    """
    if config.tokenizer is not None or origin is None or config.corpus.vocab_size is not None:
        return config.tokenizer
    found = tokenizer_of(origin[0])
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


def count_checkpoints(num_steps: int, save_every: int, *, steps_done: int = 0) -> int:
    """Return the checkpoints that a run writes from `steps_done` on; the last step makes one."""
    if steps_done >= num_steps:
        return 0
    if save_every == 0:
        return 1
    has_rest = num_steps % save_every > 0
    return num_steps // save_every - steps_done // save_every + has_rest


def checkpoint_bytes(shape: ModelShape, precision: Precision) -> int:
    """Return the size of one checkpoint, nearly; what is not a tensor is small."""
    return TENSORS_PER_PARAMETER * precision.master.itemsize * num_parameters(shape).total


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


def _out_folder(config: TrainConfig, strategy: Strategy) -> Path:
    """Return the folder the run writes to: as given, that of the run it resumes, or a new one."""
    if config.out is not None:
        return Path(config.out)
    if config.resume is not None:
        path = Path(config.resume)
        if not (path / manifest.NAME).exists():
            return path
        if (run := manifest.run_of(path)) is None:
            raise ConfigError(
                f"resume is {path}, a checkpoint outside the folder of its run; say with --out "
                "where to go on"
            )
        return run
    model = config.model if config.init is None else Path(config.init).resolve().name
    name = f"{model}-{strategy}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path("runs") / name.replace(":", "_").replace("/", "_").replace(",", "-")


def _check_unused(out: Path, start: tuple[Path, Manifest] | None) -> None:
    """Refuse to mix the checkpoints of two runs, of which --resume would take the wrong one."""
    existing = manifest.whole(out)
    if not existing:
        return
    last = max(existing)
    if start is None or manifest.run_of(start[0]) != out.resolve():
        raise ConfigError(
            f"{out} holds checkpoints of another run, the last after step {last}; give another "
            f"--out, or go on with that run by --resume {out}"
        )
    if last > start[1].steps_done:
        raise ConfigError(
            f"resume is from step {start[1].steps_done}, but {out} holds a checkpoint after step "
            f"{last}; give another --out, or resume from the last one, {existing[last]}"
        )


def _check_writable(out: Path) -> None:
    """Refuse a folder that could not be made or written to, and leave nothing behind."""
    try:
        nearest = next(path for path in (out, *out.resolve().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; give another --out") from error


def _check_space(out: Path, num_checkpoints: int, one_bytes: int) -> None:
    """Refuse to begin what could not be saved."""
    nearest = next(path for path in (out, *out.resolve().parents) if path.exists())
    free_bytes = shutil.disk_usage(nearest).free
    if free_bytes < num_checkpoints * one_bytes:
        raise ConfigError(
            f"the run's checkpoints ({num_checkpoints}, of {one_bytes / 2**30:.2f} GiB each) need "
            f"{num_checkpoints * one_bytes / 2**30:.2f} GiB, but {out} has "
            f"{free_bytes / 2**30:.2f} GiB left; give another --out, make room, save less often "
            "(--save-every) or keep fewer (--keep-checkpoints)"
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
