"""From a configuration to a job: everything that is decided before the first process starts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.manifest import Checkpoint, Manifest, not_whole_after
from phalanx.config import BatchPlan, TrainConfig, solve_batch
from phalanx.config.law import check_warmup
from phalanx.data.loader import total_steps
from phalanx.data.samples import Samples
from phalanx.data.survey import Progress
from phalanx.data.tokens import TokenFiles, prepare
from phalanx.errors import ConfigError, DataError
from phalanx.launch.torchrun import is_under_torchrun, read_place
from phalanx.measure.environment import check_memory_for
from phalanx.models.shape import ModelShape
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import Axis, Strategy, check_ranks, require_built
from phalanx.train.job.request import DEFAULT_MODEL, check_memory, check_positions, checkpoint_of
from phalanx.train.job.resume import (
    as_before,
    check_stream,
    name_of,
    remarks,
    resolved,
    settings_of,
    shape_of,
    stream_of,
    tokenizer_of,
)
from phalanx.train.job.run_folder import (
    check_space,
    check_unused,
    check_writable,
    checkpoint_bytes,
    count_checkpoints,
    out_folder,
)
from phalanx.train.precision import Precision
from phalanx.train.precision import resolve as resolve_precision

DEFAULT_STEPS = 560
"""Optimizer steps of a run that names neither steps nor epochs: as many as suit the demo."""

MANY_EPOCHS = 4
"""Passes over a text up to which repeating it is nearly as good as new text (Muennighoff et al.
2023, arXiv 2305.16264)."""


@dataclass(frozen=True)
class Job:
    """A run, resolved; the same value on every rank.

    Attributes:
        config: the configuration it comes from, resolved: completed by the checkpoint it goes on
            from, with values for what was unset and absolute paths.
        strategy: how the work is split.
        name: what the model is called, see `resume.name_of`.
        shape: the model.
        batch: the batch law, solved.
        device: "cpu" or "cuda".
        num_steps: optimizer steps of the whole run, those of an earlier part included.
        tokens: the prepared data.
        out: folder that the run writes to.
        start: the checkpoint to go on from, or None.
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
    start: Checkpoint | None
    init: Path | None = None


def choose_strategy(config: TrainConfig) -> tuple[Strategy, str]:
    """Return the strategy, dp over all processes if none is named, and the device.

    Processes are as many as torchrun started or --nproc says; else what the strategy needs; else
    one a GPU, or 2 on a CPU.

    Raises:
        StrategyError: it cannot be read, is not built, or does not fit the processes.
        ConfigError: there is no such device, or too few of it, or too little memory, or torchrun
            started another number of processes than --nproc says.
    """
    device, num_devices = _choose_device(config.device)
    num_ranks = config.nproc
    if is_under_torchrun():
        num_ranks = read_place().num_ranks
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
    if device == "cpu" and not is_under_torchrun():
        check_memory_for(strategy.num_ranks)
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
    start, init = checkpoint_of(config.resume, "resume"), checkpoint_of(config.init, "init")
    if start is not None:
        start.about.check_optimizer()
    strategy, device = choose_strategy(config)
    if start is not None:
        config = as_before(config, start.about, strategy.data_ranks)
    shape = shape_of(config, start, init)
    name = name_of(config, shape, start, init)
    check_positions(config, shape)
    batch = solve_batch(config.batch, strategy.data_ranks)
    precision = _precision_of(config, device)
    check_memory(config, name, shape, strategy, batch, device)
    _check_split(config, strategy, shape, batch)
    out = out_folder(config, strategy, name)
    check_unused(out, start)
    check_writable(out)
    tokens = prepare(
        config.data,
        config.corpus,
        model_vocab_size=shape.vocab_size,
        tokenizer=tokenizer_of(config, start, init),
        is_follower=is_under_torchrun() and read_place().local_rank > 0,
        progress=progress,
    )
    if start is not None:
        check_stream(start, resolved(config, batch), tokens)
        start.about.check(shape, stream_of(config, tokens))
    num_samples = len(Samples(tokens.train, config.corpus.seq_len))
    if tokens.train.num_tokens <= config.corpus.seq_len:
        raise DataError(
            f"the data leaves {tokens.train.num_tokens} tokens to train on, too few for one sample "
            f"of corpus.seq_len {config.corpus.seq_len}; give more text, or set corpus.seq_len to "
            f"at most {tokens.train.num_tokens - 1}"
        )
    num_steps = count_steps(config, batch, num_samples, None if start is None else start.about)
    check_warmup(config, num_steps)
    steps_done = 0 if start is None else start.about.steps_done
    num_checkpoints = count_checkpoints(num_steps, config.save_every, steps_done=steps_done)
    check_space(out, num_checkpoints, config, checkpoint_bytes(shape, precision))
    settled: dict[str, Any] = {
        "strategy": str(strategy),
        "nproc": strategy.num_ranks,
        "device": device,
        "precision": precision.name if device == "cpu" else config.precision,
        "steps": num_steps if config.epochs is None else None,
        "model": config.model or (DEFAULT_MODEL if start is None and init is None else None),
    }
    if start is not None:  # so that its file can still begin such a run from the start
        is_own = config.tokenizer is None and config.corpus.vocab_size is None
        for key in ("init", *(("tokenizer", "corpus.vocab_size") if is_own else ())):
            settled[key] = start.about.settings.get(key)
    return Job(
        config=resolved(config, batch, **settled),
        strategy=strategy,
        name=name,
        shape=shape,
        batch=batch,
        device=device,
        num_steps=num_steps,
        tokens=tokens,
        out=out,
        start=start,
        init=None if init is None else init.folder,
    )


def _check_split(
    config: TrainConfig, strategy: Strategy, shape: ModelShape, batch: BatchPlan
) -> None:
    """Refuse a model or microbatches that the strategy does not split evenly.

    Raises:
        StrategyError: sizes are not divisible, or there are too few blocks for a segment.
        ConfigError: rows of a microbatch would be padded, or blocks split by tp compiled.
    """
    from phalanx.parallel.plan import plan_decoder

    num_parts = plan_decoder(strategy, shape).row_shards
    if batch.microbatch % num_parts:
        legal = math.ceil(batch.microbatch / num_parts) * num_parts
        raise ConfigError(
            f"batch.microbatch is {batch.microbatch}, but {Strategy(tp=strategy.tp)} splits its "
            f"rows in {num_parts} and would pad them at each step; set it to {legal}"
        )
    if config.compile and strategy.tp.degree > 1:
        raise ConfigError(
            f"compile is set, but the products of tp{strategy.tp.degree} are not made to be "
            "compiled; leave compile out, or use dp or fsdp"
        )


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
    is_open = config.precision == "auto" and device == "cuda"
    return resolve_precision("float32" if is_open else config.precision, device)


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
        stream=stream_of(job.config, job.tokens),
        settings=settings_of(job.config, job.name, job.shape.dropout),
        scaler=scaler,
    )


def words_of(job: Job) -> list[str]:
    """Return what is about to run: the model, the split and the data, in a line each."""
    tokens, weights = job.tokens, ""
    if (origin := job.init or (job.start and job.start.folder)) is not None:
        weights = f" from {origin}"
    held = tokens.validation.num_tokens
    return [
        f"{job.name} ({num_parameters(job.shape).total:,} parameters){weights}; {job.strategy} on "
        f"{job.device}; {job.batch}; {job.num_steps} steps",
        f"data: {job.config.data or 'the standard library of this Python'}: {tokens.num_bytes:,} "
        f"bytes in {_count(tokens.num_documents, 'document')}, {tokens.train.num_tokens:,} tokens "
        f"to train on and {held:,} to validate; {_count(job.num_steps, 'step')} "
        f"{'is' if job.num_steps == 1 else 'are'} {num_epochs(job):.2g} epochs",
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def num_epochs(job: Job) -> float:
    """Return the passes over the data of the whole run; of a part that is done, as it was."""
    done, consumed = 0, 0
    if job.start is not None:
        done, consumed = job.start.about.steps_done, job.start.about.consumed
    rows = consumed + max(0, job.num_steps - done) * job.batch.global_size
    return rows / len(Samples(job.tokens.train, job.config.corpus.seq_len))


def remarks_on(job: Job) -> list[str]:
    """Return what a person should know before the job runs, in a line each."""
    lines: list[str] = []
    if job.start is not None:
        before = job.start.about
        lines = remarks(before, manifest_of(job, before.steps_done, before.consumed))
        if (went_back := not_whole_after(job.start.folder)) is not None:
            lines.insert(0, went_back)
    passes = num_epochs(job)
    if job.config.epochs is None and passes > MANY_EPOCHS:
        one_epoch = (
            len(Samples(job.tokens.train, job.config.corpus.seq_len)) / job.batch.global_size
        )
        lines.append(
            f"{job.num_steps} steps go {passes:.2g} times over this text; beyond {MANY_EPOCHS} or "
            f"so a model learns it by heart rather than from it; --epochs {MANY_EPOCHS} are "
            f"{math.ceil(MANY_EPOCHS * one_epoch)} steps"
        )
    return lines
