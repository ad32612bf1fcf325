"""Resolve a configuration to a job: steps, data and folder, before the first process starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from phalanx.account.parameters import num_parameters
from phalanx.checkpoint.manifest import Manifest, incomplete_after
from phalanx.config import TrainConfig
from phalanx.config.fields import Use, keys_for, value_at
from phalanx.config.save_policy import renewed
from phalanx.config.validate import check_warmup
from phalanx.data.addresses import local_path
from phalanx.data.cache import cache_folder
from phalanx.data.chat_rows import LAYOUTS, PREFERENCE, layout_of
from phalanx.data.corpus import first_row
from phalanx.data.loader import total_steps
from phalanx.data.order import Order
from phalanx.data.samples import Samples, count_samples
from phalanx.data.survey import Progress, no_progress
from phalanx.data.tokens import TokenFiles, prepare
from phalanx.errors import ConfigError, DataError
from phalanx.hugging_face.companions import (
    DEFAULT,
    chat_templates_of,
    ids_of,
    special_tokens_of,
)
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.parallel.pipeline.cut import strategy_facts
from phalanx.storage import hint_of_missing, read_text
from phalanx.train.job.request import Request, settle
from phalanx.train.job.resume import (
    check_stream,
    first_epoch,
    stored_settings,
    stream_of,
    tokenizer_of,
)
from phalanx.train.job.run_folder import (
    check_space,
    check_unused,
    check_writable,
    checkpoint_bytes,
    continues_served,
    out_folder,
)
from phalanx.train.precision import check_split
from phalanx.train.precision import resolve as resolve_precision

DEFAULT_STEPS = 560
"""Optimizer steps if the settings give neither steps nor epochs; chosen for the demo."""

_SILENT: Final = (
    *keys_for(
        TrainConfig,
        Use.LOCAL | Use.PATH | Use.NOT_RESUMED | Use.FIXED_BY_TOKENIZER,
    ),
    *("model", "epochs"),
)
"""Settings that do not affect results, or only through others; a resume reports no change."""

MANY_EPOCHS = 4
"""Epochs up to which repeated text trains nearly as well as new text.

Muennighoff et al. 2023, arXiv 2305.16264."""


@dataclass(frozen=True)
class Job(Request):
    """A resolved run, equal on every rank; unset settings have values, and paths are absolute.

    Attributes:
        num_steps: optimizer steps of the whole run, including those before a resume.
        tokens: the prepared data.
        samples: training samples.
        order: order of the training samples.
        out: folder that the run writes to.
        is_new: whether `out` was created for this run, see `run_folder.claim`.
    """

    num_steps: int
    tokens: TokenFiles
    samples: Samples
    order: Order
    out: Path
    is_new: bool = False

    @property
    def has_pairs(self) -> bool:
        """Whether the samples are pairs of preferences, to train on by DPO."""
        return self.tokens.chat is not None and self.tokens.chat["layout"] == PREFERENCE


def resolve(config: TrainConfig, progress: Progress | None = None) -> Job:
    """Resolve a configuration to a job, and prepare its data.

    Raises:
        PhalanxError: the run would fail later; the message has the reason.
    """
    return complete(settle(config), progress)


def complete(request: Request, progress: Progress | None = None) -> Job:
    """Resolve a settled request to a job, and prepare its data; see `resolve`."""
    config, start, batch = request.config, request.start, request.batch
    # "auto" on CUDA must query the GPU, on which the parent process must not create a context. The
    # master weights are float32 for either choice, so float32 stands in for "auto".
    is_open = config.precision == "auto" and request.device == "cuda"
    precision = resolve_precision("float32" if is_open else config.precision, request.device)
    _check_split(request)
    out = out_folder(config, request.strategy, request.name)
    if not continues_served(out, config.server.coordinator):
        check_unused(out, start)
    check_writable(out)
    tokens = _tokens_of(request, progress)
    if start is not None:
        check_stream(start, request.settings(), tokens)
    if tokens.train.num_tokens <= config.corpus.seq_len:
        raise DataError(
            f"the data leaves {tokens.train.num_tokens} tokens to train on, too few for one sample "
            f"of corpus.seq_len {config.corpus.seq_len}; give more text, or set corpus.seq_len to "
            f"at most {tokens.train.num_tokens - 1}"
        )
    samples = Samples(
        tokens.train, config.corpus.seq_len, document_mask=config.corpus.document_mask
    )
    about = None if start is None else start.about
    first = first_epoch(config, about, tokens.train)
    order = Order(len(samples), config.seed, config.corpus.shuffle, first)
    sizes = [count_samples(file, config.corpus.seq_len) for file in tokens.train.parts]
    if tokens.weights and 0 in sizes:
        raise DataError(
            f"{tokens.names[sizes.index(0)]} leaves no sample to train on; leave it out"
        )
    order = order.mixed(sizes, tokens.weights)
    done, consumed = request.done
    num_steps = DEFAULT_STEPS if config.steps is None else config.steps  # done ones included
    if config.epochs is not None:
        size = batch.global_size
        left = total_steps(order, size, config.epochs, config.corpus.tail, consumed=consumed)
        num_steps = done + left
        if num_steps == 0:
            raise DataError(
                f"{config.epochs:g} epochs of {order.num_samples} samples do not fill one global "
                f"batch of {size}, and corpus.tail is drop; use --corpus.tail keep, or a global "
                f"batch of at most {order.num_samples}"
            )
    check_warmup(config.optimizer, num_steps)
    num_due = config.save_policy.num_due(done, num_steps, num_steps)
    check_space(out, num_due, config.save_policy, checkpoint_bytes(request.shape, precision))
    settled: dict[str, Any] = {
        "precision": precision.name if request.device == "cpu" else config.precision,
        "steps": num_steps if config.epochs is None else None,
        "save": str(config.save_policy),
    }
    if start is not None:  # so that the run's settings file can still start the run from scratch
        is_own = config.tokenizer is None and config.corpus.vocab_size is None
        own = ("tokenizer", "corpus.vocab_size", "chat_template") if is_own else ()
        for key in ("init", *own):
            settled[key] = start.about.settings.get(key)
    known: dict[str, Any] = {**vars(request), "config": request.settings(**settled)}
    return Job(**known, num_steps=num_steps, tokens=tokens, samples=samples, order=order, out=out)


def _tokens_of(request: Request, progress: Progress | None) -> TokenFiles:
    """Prepare the data of a request: text, or chats.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the model of chats has no chat template or tokenizer.
    """
    config = request.config
    tokenizer = tokenizer_of(config, request.weights_folder)
    how: dict[str, Any] = {
        "model_vocab_size": request.shape.vocab_size,
        "tokenizer": tokenizer,
        "is_follower": is_under_torchrun() and read_rank_env().local_rank > 0,
        "progress": progress,
    }
    cache = cache_folder(config.corpus.cache)
    data = local_path(config.data, cache, progress or no_progress, is_follower=how["is_follower"])
    row = first_row(data)
    layout = None if row is None else layout_of(row)
    if layout is None:
        if config.chat_template is not None:
            raise ConfigError(
                f"chat_template is {config.chat_template}, but the data are text, not chats; "
                f"rows of chats have the fields {' or '.join(map(' and '.join, LAYOUTS.values()))}"
            )
        return prepare(data, config.corpus, **how)
    if layout == PREFERENCE:
        _check_pairs(request)
    # jinja2 and more, which a run on text does not need.
    from phalanx.data.chats import ChatFormat, prepare_chats

    assert data is not None, "the standard library has no rows"
    chats = f"the data {config.data} are chats of the layout {layout}, but"
    if tokenizer is None:
        raise ConfigError(
            f"{chats} model {request.name} has no tokenizer; give a Hugging Face folder by --model "
            "FOLDER, or --tokenizer"
        )
    # The files beside tokenizer.json: of a Hugging Face folder, a checkpoint or a run.
    beside = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    if config.chat_template is not None:
        file = Path(os.path.expanduser(config.chat_template))
        if not file.is_file():
            raise ConfigError(
                f"chat_template is {file}, which is not a file{hint_of_missing(file)}"
            )
        template = read_text(file)
    elif (template := (templates := chat_templates_of(beside)).get(DEFAULT)) is None:
        others = f" but of the names {', '.join(templates)}" if templates else ""
        raise ConfigError(
            f"{chats} {beside} has no chat template{others}; give one by --chat-template FILE"
        )
    names, added = special_tokens_of(beside)
    ends = ids_of(beside)["eos_token_id"]
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    form = ChatFormat(template, names, added, end_ids)
    return prepare_chats(data, config.corpus, layout, form, **how)


def _check_pairs(request: Request) -> None:
    """Raise ConfigError if the run cannot train on preferences."""
    strategy, asked = request.strategy, f"strategy is {request.strategy}"
    experts = request.shape.experts
    if experts is not None and experts.capacity is not None:
        raise ConfigError(
            f"experts: capacity is {experts.capacity}, but the data {request.config.data} are "
            "preferences, and their reference drops no token; the nearest is none"
        )
    if strategy.splits_rows:
        why = "their loss sums the tokens of an answer, which it has on several ranks"
    elif strategy.is_served:
        why = "the reference is the model at the start, and a worker of servers may join later"
    elif not request.config.corpus.document_mask:
        asked, why = "corpus.document_mask is off", "a row has several answers; leave it on"
    else:
        return
    if request.config.corpus.document_mask:
        why += f"; the nearest is dp{strategy.num_ranks}"
    raise ConfigError(f"{asked}, but the data {request.config.data} are preferences: {why}")


def _check_split(request: Request) -> None:
    """Check that the strategy can shard the model and the batch evenly.

    Raises:
        StrategyError: sizes are not divisible, or there are too few blocks for a segment.
        ConfigError: microbatch or sequence would be padded; compilation, loss scaling or gradient
            compression does not work with the strategy; or this host has too little memory.
    """
    from phalanx.parallel.plan import plan_decoder

    config, strategy, batch = request.config, request.strategy, request.batch
    plan = plan_decoder(strategy, request.shape)
    for name, size, shards in (
        ("batch.microbatch", batch.microbatch, plan.row_shards),
        ("corpus.seq_len", config.corpus.seq_len, plan.position_shards),
    ):
        if size % shards:
            raise ConfigError(
                f"{name} is {size}, but {strategy} splits it in {shards} and would pad it at each "
                f"step; set it to {math.ceil(size / shards) * shards}"
            )
    check_split(config, plan)
    if not config.compile:
        request.check_memory(has_activations=True)


def manifest_of(job: Job, steps_done: int, consumed: int, *, is_passing: bool = False) -> Manifest:
    """Return the manifest of a checkpoint of this job, without states."""
    settings = {
        key: value
        for key, value in stored_settings(job.config).items()
        if not key.startswith("shape.") and key != "model"
    }
    return Manifest(
        steps_done=steps_done,
        num_steps=job.num_steps,
        consumed=consumed,
        num_ranks=job.strategy.num_ranks,
        strategy=str(job.strategy),
        shape=dataclasses.asdict(job.shape),
        stream=stream_of(job.config, job.tokens),
        first_epoch=job.order.first_epoch,
        settings={"model": job.name, **settings, "shape.dropout": job.shape.dropout},
        is_passing=is_passing,
    )


def facts_of(job: Job) -> dict[str, Any]:
    """Return the values that must be equal on every rank, because each rank resolves the job.

    Some settings are compared by their resolved values; settings local to a host are excluded.
    """
    steps_done, consumed = job.done
    return {
        **stream_of(job.config, job.tokens),
        "device": job.device,
        **strategy_facts(job.strategy),
        **{f"shape.{name}": value for name, value in dataclasses.asdict(job.shape).items()},
        "precision": resolve_precision(job.config.precision, job.device).name,
        "batch": str(job.batch),
        "training tokens": job.tokens.train.num_tokens,
        "steps": job.num_steps,
        "steps done": steps_done,
        "samples consumed": consumed,
        "first epoch": job.order.first_epoch,
        **{key: value_at(job.config, key) for key in keys_for(TrainConfig, Use.EQUAL)},
    }


def words_of(job: Job) -> list[str]:
    """Return lines that describe the run: the planner's choice, model and strategy, then data."""
    tokens, weights, count = job.tokens, "", num_parameters(job.shape)
    adapters = f", of which {count.trained:,} in adapters" if job.shape.lora else ""
    if job.weights_folder is not None:
        weights = f" from {job.weights_folder}"
    skipped = f" (left out: {tokens.left_out})" if tokens.left_out else ""
    held, epochs = tokens.validation.num_tokens, f"{num_epochs(job):.2g}"
    reads = ", ".join(f"{name} is read {times:.2g} times" for name, times in _reads(job))
    kind, trained, more = "document", f"{tokens.train.num_tokens:,} tokens to train on", ""
    if (chat := tokens.chat) is not None:
        length = job.config.corpus.seq_len
        kind = "pair" if job.has_pairs else "conversation"
        held = max(0, (held - 1) // length)
        trained = (
            f"of the layout {chat['layout']}, {chat['num_tokens']:,} tokens, "
            f"{chat['num_trained']:,} of them in answers; rows of {length}: "
            f"{len(job.samples):,} to train on"
        )
        longest = f"corpus.seq_len (the longest has {chat['longest']:,} tokens)"
        for number, what in (
            (chat["num_cut"], f"cut at {longest}"),
            (chat["num_left_out"], "left out, without a token of an answer"),
            (chat["num_endless"], "answers that no special token ends: the model learns no end"),
        ):
            more += f"; {number:,} {what}" if number else ""
    return [
        *job.choice,
        f"{job.name} ({count.total:,} parameters{adapters}){weights}; {job.strategy} on "
        f"{job.device}; {job.batch}; {job.num_steps} steps",
        f"data: {job.config.data or 'the standard library of this Python'}: {tokens.num_bytes:,} "
        f"bytes in {_count(tokens.num_documents, kind)}{skipped}, {trained} and {held:,} to "
        f"validate{more}; "
        f"{_count(job.num_steps, 'step')} "
        f"{'is' if job.num_steps == 1 else 'are'} {epochs} epoch{'' if epochs == '1' else 's'}"
        f"{f' ({reads})' if reads else ''}",
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def num_epochs(job: Job) -> float:
    """Return the epochs of the whole run; steps done count the samples that they consumed."""
    return job.order.first_epoch + _num_rows(job) / job.order.num_samples


def _num_rows(job: Job) -> int:
    done, consumed = job.done
    return consumed + max(0, job.num_steps - done) * job.batch.global_size


def _reads(job: Job) -> list[tuple[str, float]]:
    """Return the name of each source of a mixture, and how many times the run reads it."""
    order, per_weight = job.order, _num_rows(job) / max(1, sum(job.order.weights))
    return [
        (name, order.first_epoch + per_weight * weight / source.num_samples)
        for name, source, weight in zip(job.tokens.names, order.sources, order.weights, strict=True)
    ]


def remarks_on(job: Job) -> list[str]:
    """Return notices to show before the job runs, a line each."""
    lines: list[str] = []
    if job.start is not None:
        lines += job.start.words()
        if (went_back := incomplete_after(job.start.folder)) is not None:
            lines.append(went_back)
        before, now = job.start.about, manifest_of(job, *job.done)
        earlier = {**renewed(before.settings), "steps": before.num_steps}
        settings = json.loads(json.dumps({**now.settings, "steps": now.num_steps}))
        differing = [
            f"{key} {_text(earlier[key])} -> {_text(value)}"
            for key, value in settings.items()  # as in a manifest
            if key not in _SILENT
            and key in earlier
            and earlier[key] != value
            # "auto" is resolved only after the ranks start.
            and not (key == "precision" and "auto" in (value, earlier[key]))
        ]
        if differing:
            lines.append(f"resumes with changed settings: {', '.join(differing)}")
        if before.steps_done >= now.num_steps:
            lines.append(
                f"nothing left to do: the checkpoint is after step {before.steps_done}, and the "
                f"run has {now.num_steps} steps in all; raise this number with --steps"
            )
        if job.has_new_length:
            lines.append(
                f"after step {job.done[0]}, samples have {job.config.corpus.seq_len} tokens and "
                f"epoch {job.order.first_epoch + 1} starts"
            )
    for name, times in _reads(job):
        if times > MANY_EPOCHS:
            lines.append(
                f"{name} is read {times:.2g} times; beyond about {MANY_EPOCHS} a model memorizes "
                "the text instead of learning from it; lower its weight"
            )
    passes = num_epochs(job)
    if job.config.epochs is None and not job.order.sources and passes > MANY_EPOCHS:
        done, consumed = job.done
        left = total_steps(job.order, job.batch.global_size, MANY_EPOCHS, consumed=consumed)
        lines.append(
            f"{job.num_steps} steps are {passes:.2g} epochs of this text; beyond about "
            f"{MANY_EPOCHS} epochs a model memorizes the text instead of learning from it; "
            f"--epochs {MANY_EPOCHS} are {done + left} steps"
        )
    return lines


def _text(value: object) -> str:
    return "none" if value is None else str(value)
