"""Take settings from the checkpoint of --resume or --init, and check the settings against it.

`start` is the checkpoint to resume from (--resume). `origin` is `start`, or the checkpoint that
initializes the weights (--init); a run has at most one of the two.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from phalanx.account.parameters import num_parameters
from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Checkpoint, Manifest
from phalanx.config import BatchConfig, TrainConfig
from phalanx.config.fields import Schema, Use, keys_for, settings, value_at, with_value
from phalanx.config.file import RUN_FILE, read_values
from phalanx.config.validate import AUTO
from phalanx.data.cache import fingerprint
from phalanx.errors import BatchError, CheckpointError, ConfigError
from phalanx.hugging_face import companions
from phalanx.hugging_face.config import CONFIG
from phalanx.launch.launched import is_restarted, launched
from phalanx.models.registry import PRESETS, with_sizes
from phalanx.models.registry import shape_of as preset
from phalanx.models.shape import Lora, ModelShape
from phalanx.object_store import fetch, path_of
from phalanx.storage import hint_of_missing
from phalanx.strategy import Strategy

if TYPE_CHECKING:
    from phalanx.data.token_file import TokenFile
    from phalanx.data.tokens import TokenFiles

DEFAULT_MODEL: Final = "demo"
"""Preset of a run without a model setting and without a checkpoint."""


def continuation(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that replace settings of a command which may continue a run, by key.

                       strategy    folder     batch         resumes from
        resume = auto  command's   `out`      command's     `out`, if it has a checkpoint
        generation 0   command's   command's  command's     what the command names
        later ones     launcher's  the run's  generation 0  the run, if it has a checkpoint

    Args:
        said: settings of the command and its files, by dotted key.

    Raises:
        ConfigError: `resume` is auto without `out`.
    """
    job, changes = launched(), dict[str, Any]()
    run, is_auto = said.get("out"), said.get("resume") == AUTO
    if is_auto and run is None:
        raise ConfigError(
            "resume is auto, which looks for a run in --out, but out is unset; give --out FOLDER"
        )
    if job is not None and job.run is not None:
        # A script may have several runs, of which the launcher knows one.
        if run is None and said.get("resume") is not None:
            run = str(manifest.run_folder(path_of(said["resume"])))
        run = run or job.run
    elif not is_auto:
        run = None
    if job is not None and job.strategy is not None:
        changes |= {"strategy": job.strategy, "nproc": None}
        if run is not None and (file := fetch(path_of(run) / RUN_FILE)).exists():
            # The rows of the global batch stay, and a microbatch has at most as many as before.
            keys = {setting.key: setting.hint for setting in settings(TrainConfig)}
            before = read_values(os.fspath(file), keys, is_foreign=True)
            rows, most = before["batch.global_size"], before["batch.microbatch"]
            microbatch = _divisor(rows // Strategy.parse(job.strategy).data_ranks, most)
            changes |= {"batch.global_size": rows, "batch.microbatch": microbatch}
            changes |= {"batch.accumulation": None}
    if is_restarted():
        from phalanx.checkpoint.in_memory import recover  # imports torch

        recover()
    if run is not None and manifest.saved_states(path_of(run)):
        changes |= {"resume": run, "out": None, "init": None}
    elif run is not None:
        changes |= {"out": run} | ({"resume": None} if is_auto else {})
    return changes


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def continued(config: Schema) -> Schema:
    """Return the settings with those that `continuation` replaces.

    Raises:
        ConfigError: the second run of a script would take the folder of the first.
    """
    keys = [setting.key for setting in settings(type(config))]
    said = {key: value_at(config, key) for key in keys}
    job = launched()
    if job is not None and job.restarts and said["out"] is said["resume"] is None:
        if _UNNAMED:
            raise ConfigError(
                "this is the script's second run without a folder, which a restart could not "
                "distinguish from the first; give out"
            )
        _UNNAMED.append(config)
    for key, value in continuation(said).items():
        if key in keys:  # a job of one's own has no init
            config = with_value(config, key, value)
    return config


_UNNAMED: Final = list[Any]()
"""Settings of this process's run without a folder, if there is one."""


def published_folder(config: TrainConfig, start: Checkpoint | None) -> Path | None:
    """Return the Hugging Face folder that `model` names; None if it names a preset or is unset.

    A resumed run has the weights and does not read the folder, which may be gone: None.

    Raises:
        ConfigError: `model` is neither a preset nor a Hugging Face folder, or `init` is set too, or
            the run to resume has a model of another name.
    """
    if config.model is None or config.model in PRESETS:
        return None
    folder = Path(os.getcwd(), os.path.expanduser(config.model))
    if start is not None:
        if (before := start.about.settings.get("model")) != folder.name:
            raise ConfigError(
                f"model is {config.model}, but the model of the run to resume is {before}; leave "
                "model out"
            )
        return None
    if not (folder / CONFIG).is_file():
        if manifest.saved_states(folder) or (folder / manifest.NAME).exists():
            raise ConfigError(
                f"model is {config.model}, a run or checkpoint of Phalanx; start a run with its "
                f"weights by --init {config.model}"
            )
        if folder.is_dir():
            raise ConfigError(
                f"model is {config.model}, a folder without {CONFIG}; expected a preset, or a "
                "Hugging Face folder as save_pretrained writes it"
            )
        if folder.name == config.model:  # no path, so the name of a preset
            preset(config.model)  # raises, with the nearest name
        raise ConfigError(
            f"model is {config.model}, which does not exist{hint_of_missing(folder)}; expected a "
            "Hugging Face folder, or a preset"
        )
    if config.init is not None:
        raise ConfigError(
            f"model is {config.model}, a Hugging Face folder, and init is {config.init}, but both "
            "set the initial weights; give one of them"
        )
    return folder


def name_of(
    config: TrainConfig, shape: ModelShape, origin: Checkpoint | None, published: Path | None
) -> str:
    """Return the name of the run's model.

    With a checkpoint, this is the name in its manifest, else the name of its run folder, else of
    its own folder. With a Hugging Face folder, this is the folder's name. Without either, this is
    the preset's name, or, if sizes were changed, a name with the number of parameters.
    """
    if origin is not None:
        named = origin.about.settings.get("model")
        return named or (manifest.run_of(origin.folder) or origin.folder.resolve()).name
    if published is not None:
        return published.name
    name = config.model or DEFAULT_MODEL
    if dataclasses.replace(shape, dropout=0.0) == dataclasses.replace(preset(name), dropout=0.0):
        return name
    number = num_parameters(shape).total
    for unit, suffix in ((10**9, "b"), (10**6, "m"), (10**3, "k")):
        if number >= unit:
            size = f"{number / unit:.3g}" if number < 1000 * unit else f"{number // unit}"
            return f"decoder-{size}{suffix}"
    return f"decoder-{number}"


def shape_of(config: TrainConfig, origin: Checkpoint | None, published: Path | None) -> ModelShape:
    """Return the model's shape: from the settings, completed by the shape of the weights.

    Dropout, and what acts on experts in training alone, may differ from theirs.

    Raises:
        ConfigError: the settings contradict each other, or the weights of `init` or `model`.
        CheckpointError: the weights of `model` are damaged, see `open_hugging_face`.
    """
    named = preset(config.model) if config.model in PRESETS else None
    if origin is None and published is None:
        if config.lora is not None:
            raise ConfigError(
                f"lora is {config.lora}, but no weights are there to adapt; give them by --model "
                "FOLDER or --init"
            )
        return with_sizes(named or preset(DEFAULT_MODEL), config.shape)
    if published is not None:
        from phalanx.hugging_face.convert import open_hugging_face  # imports torch

        source, held = f"model is {config.model}", open_hugging_face(published).shape
    else:
        from phalanx.checkpoint.weights import shape_in  # imports torch

        assert origin is not None, "one of the two has weights"
        source, held = f"init is {config.init}", shape_in(origin.about, origin.folder)
    wanted = with_sizes(named or held, config.shape)
    lora = None
    if config.lora is not None:
        lora = Lora.parse(config.lora, held.mlp, held.experts is not None)
    if config.resume is not None:
        if lora != held.lora:
            raise ConfigError(
                f"lora is {config.lora}, but the run was made with other adapters; leave it out"
            )
        return dataclasses.replace(wanted, lora=lora)
    held = dataclasses.replace(held, lora=None)  # merged into the weights if it has adapters
    wanted = dataclasses.replace(wanted, lora=None)
    if held.experts is not None and wanted.experts is not None:
        if held.experts.as_evaluated == wanted.experts.as_evaluated:
            held = dataclasses.replace(held, experts=wanted.experts)
    for name in (each.name for each in dataclasses.fields(held)):
        value, asked = getattr(held, name), getattr(wanted, name)
        if asked != value and name != "dropout":
            words = f"model {config.model} with the given shape" if named else "the given shape"
            raise ConfigError(
                f"{source}, weights of a model whose {name} is {value}, but {words} has {asked}; "
                f"the run takes the shape of the weights, so leave "
                f"{'model and shape' if published is None else 'shape'} out"
            )
    dropout = config.shape.dropout
    dropout = held.dropout if dropout is None else dropout
    return dataclasses.replace(held, dropout=dropout, lora=lora)


def tokenizer_of(config: TrainConfig, folder: Path | None) -> str | None:
    """Return the tokenizer.json to use: `config.tokenizer`, else the one in `folder`.

    With `corpus.vocab_size` set, a new tokenizer is trained, and the one in `folder` is not used.

    Raises:
        ConfigError: the folder of `init` or `model` has no tokenizer, and the settings give none.
    """
    if config.tokenizer is not None or folder is None or config.corpus.vocab_size is not None:
        return config.tokenizer
    found = companions.tokenizer_of(folder)
    if found is None and config.resume is None:
        source = f"model is {config.model}" if config.init is None else f"init is {config.init}"
        raise ConfigError(
            f"{source}, which has no {companions.TOKENIZER}, so the tokens of "
            "the rows of its embedding are unknown; give the tokenizer by --tokenizer, or train a "
            "new one by --corpus.vocab-size"
        )
    return None if found is None else str(found)


def stored_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that are stored in the run folder and manifests, by dotted key."""
    return {
        setting.key: value_at(config, setting.key)
        for setting in settings(TrainConfig)
        if Use.NOT_SAVED not in setting.use
    }


def as_before(config: TrainConfig, about: Manifest, num_data_ranks: int) -> TrainConfig:
    """Return the settings, with unset run length and batch sizes taken from the manifest.

    The length is taken because the learning rate of each step depends on it.

    Raises:
        BatchError: the global batch is not divisible by the number of data ranks.
    """
    if config.steps is None and config.epochs is None:
        epochs = about.settings.get("epochs")  # keep the epochs: the last batch may be smaller
        steps = about.num_steps if epochs is None else None
        config = dataclasses.replace(config, steps=steps, epochs=epochs)
    if None in map(about.settings.get, ("batch.global_size", "batch.microbatch")):
        return config
    batch = config.batch
    given = [name for name, value in vars(batch).items() if value is not None]
    if given in (["microbatch"], ["accumulation"]):
        batch = dataclasses.replace(batch, global_size=about.settings["batch.global_size"])
    elif given in ([], ["global_size"]):
        # The run's microbatch, or the largest smaller one that fits evenly.
        size = batch.global_size
        whose = "the run's global batch" if size is None else "batch.global_size"
        rows: int = about.settings["batch.global_size"] if size is None else size
        share, rest = divmod(rows, num_data_ranks)
        if rest:
            near = [n for n in range(1, 2 * num_data_ranks) if rows % n == 0]
            legal = min(near, key=lambda number: abs(number - num_data_ranks))
            above = (rows // num_data_ranks + 1) * num_data_ranks
            raise BatchError(
                f"{whose} is {rows} sequences, not divisible by {num_data_ranks} data ranks; use a "
                f"strategy with {legal} data ranks, or --batch.global-size {above}"
            )
        microbatch = _divisor(share, about.settings["batch.microbatch"])
        batch = BatchConfig(global_size=rows, microbatch=microbatch)
    return dataclasses.replace(config, batch=batch)


def stream_of(config: TrainConfig, tokens: TokenFiles) -> dict[str, Any]:
    """Return the values that determine the order of the samples; equal on a resume."""
    return {
        "text": tokens.text_digest,
        "text bytes": tokens.num_bytes,
        "tokenizer": tokens.tokenizer_digest,
        **({"mixture": list(tokens.weights)} if tokens.weights else {}),
        **({} if tokens.chat is None else {"chat template": chat_digest(tokens.chat, config)}),
        **{key: value_at(config, key) for key in keys_for(TrainConfig, Use.DATA_ORDER)},
    }


def chat_digest(chat: Mapping[str, Any], config: TrainConfig) -> str:
    """Return a hash of how conversations become rows: format, answers trained on, row length."""
    names, corpus = sorted(chat["names"].items()), config.corpus
    return fingerprint(chat["layout"], chat["template"], names, corpus.turns, corpus.seq_len)


def has_new_length(config: TrainConfig, about: Manifest) -> bool:
    """Return whether the sample length differs from the checkpoint's."""
    return about.stream.get("corpus.seq_len", config.corpus.seq_len) != config.corpus.seq_len


def first_epoch(config: TrainConfig, about: Manifest | None, file: TokenFile) -> int:
    """Return the number of the epoch at which the sample stream begins.

    A new sample length starts a new epoch, which skips the rest of the interrupted one.
    """
    if about is None or not has_new_length(config, about):
        return 0 if about is None else about.first_epoch
    from phalanx.data.samples import count_samples  # imports torch

    num_samples = count_samples(file, about.stream["corpus.seq_len"])
    return about.first_epoch + -(-about.consumed // num_samples)


def check_stream(start: Checkpoint, config: TrainConfig, tokens: TokenFiles) -> None:
    """Check that a resumed run has the checkpoint's order of samples.

    Raises:
        CheckpointError: it has another; the message names the setting and its earlier value.
    """
    before, ours = start.about.stream, stream_of(config, tokens)
    differing = [
        name
        for name, value in ours.items()
        if before.get(name) != value and (name != "corpus.seq_len" or tokens.weights)
    ]
    run = manifest.run_of(start.folder) or start.folder
    gone = ""
    if before.get("corpus.shuffle_len") is not None:
        gone = f"was made with corpus.shuffle_len {before['corpus.shuffle_len']}"
    elif manifest.EARLIER_LENGTHS in before:
        gone = "changed the length of its samples within an epoch"
    if gone:
        raise CheckpointError(
            f"this run {gone}, an order of samples that this version does not support; start a "
            f"new run with the weights of this run: --init {run}"
        )
    if not differing:
        return
    name, was, corpus = differing[0], start.about.settings, config.corpus
    num_bytes = before.get("text bytes", 0)  # any type, in an edited manifest
    sizes = f"({num_bytes:,} bytes" if isinstance(num_bytes, int) else f"({num_bytes} bytes"
    if name == "text" and was.get("corpus.max_bytes") != corpus.max_bytes:
        said = (
            f"corpus.max_bytes is {corpus.max_bytes}, but this run was made with "
            f"{was.get('corpus.max_bytes')}; leave it out"
        )
    elif name == "text" and was.get("data") != config.data:
        said = (
            f"{_data_words(config.data)} ({tokens.num_bytes:,} bytes) is not the text that this "
            f"run was made with, {_data_words(was.get('data'))} {sizes}); leave --data out"
        )
    elif name == "text":
        said = (
            f"this run was made with {_data_words(config.data)}, which has changed since {sizes}, "
            f"now {tokens.num_bytes:,}); give the earlier text by --data"
        )
    elif name == "tokenizer":
        made = corpus.vocab_size and f"a new one of {corpus.vocab_size} tokens"
        said = (
            f"the tokenizer ({config.tokenizer or made or tokens.tokenizer}) is not the one that "
            "this run was made with; leave --tokenizer and --corpus.vocab-size out to use "
            f"{run / companions.TOKENIZER}"
        )
    elif name == "chat template":
        said = (
            "the chat template, corpus.turns or corpus.seq_len is not the one that this run was "
            "made with, so its conversations are other rows; leave them out"
        )
    else:
        said = (
            f"{name} is {ours[name]}, but this run was made with {before.get(name)}; leave it out"
        )
    raise CheckpointError(f"{said}, or start a new run with the weights of this run: --init {run}")


def _data_words(path: str | None) -> str:
    return "the standard library of its Python" if path is None else f"--data {path}"
