"""Resolve the part of a run that does not need its data, so that a wrong request fails at once.

On a host that certainly has no GPU, torch is imported only for `auto` or to read a checkpoint.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.account.fit import check_fit, check_memory_for
from phalanx.account.host import may_have_gpu
from phalanx.account.planned import decoder_step
from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Checkpoint
from phalanx.checkpoint.untrusted import brief
from phalanx.config import BatchPlan, TrainConfig, solve_batch
from phalanx.config.fields import (
    Use,
    check_value,
    keys_for,
    settings,
    value_at,
    with_value,
)
from phalanx.config.schema import JobConfig
from phalanx.config.validate import AUTO, check
from phalanx.data.addresses import check_data
from phalanx.data.corpus import absolute
from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.launch.launched import require_agent
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.models.shape import ModelShape
from phalanx.object_store import fetch, is_address, path_of
from phalanx.strategy import Axis, Strategy, check_ranks, require_built
from phalanx.train.job import resume

if TYPE_CHECKING:
    from phalanx.train.callback import Log


@dataclass(frozen=True)
class Request:
    """The part of a run that is resolved before its data is read.

    Attributes:
        config: the settings, completed from the checkpoint to resume from.
        strategy: parallel strategy.
        device: "cpu" or "cuda".
        shape: shape of the model.
        name: name of the model, see `resume.name_of`.
        batch: global batch, microbatch and accumulation.
        start: checkpoint to resume from, or None.
        init: checkpoint that initializes the weights of a new run, or None.
        published: Hugging Face folder that `model` names, whose weights a new run begins with.
        choice: lines that describe the planner's choice; empty without `auto`.
    """

    config: TrainConfig
    strategy: Strategy
    device: str
    shape: ModelShape
    name: str
    batch: BatchPlan
    start: Checkpoint | None
    init: Checkpoint | None
    published: Path | None
    choice: tuple[str, ...]

    @property
    def done(self) -> tuple[int, int]:
        """Steps taken before the resume, and samples of the current length that were consumed."""
        if self.start is None:
            return 0, 0
        about = self.start.about
        return about.steps_done, 0 if self.has_new_length else about.consumed

    @property
    def has_new_length(self) -> bool:
        """Whether the run resumes with another sample length."""
        return self.start is not None and resume.has_new_length(self.config, self.start.about)

    @property
    def origin(self) -> Checkpoint | None:
        """The checkpoint from which this process loads its weights, or None."""
        return self.start or self.init

    @property
    def weights_folder(self) -> Path | None:
        """The folder from which this process loads its weights, or None."""
        return self.published if self.origin is None else self.origin.folder

    def check_memory(self, *, has_activations: bool) -> None:
        """Check that the run fits this host's memory; counting activations imports torch.

        Raises:
            ConfigError: it does not; the message has the calculation, and settings that fit.
        """
        load = decoder_step(
            *(self.shape, self.strategy, self.config.corpus.seq_len),
            *(self.batch.microbatch, self.batch.accumulation, self.config.precision),
            is_muon=self.config.optimizer.kind == "muon",
        )
        is_alone = not is_under_torchrun()
        num_here = self.strategy.num_ranks if is_alone else read_rank_env().num_here
        device = "cuda" if self.device == "cuda" else "cpu"
        check_fit(load, self.name, num_here, device=device, has_activations=has_activations)

    def settings(self, **more: Any) -> TrainConfig:
        """Return the resolved settings, with absolute paths, and with the values of `more`."""
        is_named = self.config.model is not None or self.origin is not None
        settled = {
            "strategy": str(self.strategy),
            "nproc": self.strategy.num_ranks,
            "device": self.device,
            "model": self.config.model if is_named else resume.DEFAULT_MODEL,
            "batch.global_size": self.batch.global_size,
            "batch.microbatch": self.batch.microbatch,
            "batch.accumulation": self.batch.accumulation,
        }
        if self.published is not None:
            settled["model"] = str(self.published)
        config = self.config
        for key, value in {**settled, **more}.items():
            config = with_value(config, key, value)
        for key in keys_for(TrainConfig, Use.PATH):
            if (path := value_at(config, key)) is not None and not is_address(path):
                # Not normalized: `..` after a symbolic link is not the link's parent folder.
                whole = os.path.join(os.getcwd(), os.path.expanduser(path))
                config = with_value(config, key, absolute(path) if key == "data" else whole)
        return config


def settle(config: TrainConfig) -> Request:
    """Resolve the settings that do not need the data, and check them.

    Raises:
        PhalanxError: a setting is wrong; a folder, text or preset is missing; sizes contradict each
            other; or this host has too few devices or too little memory.
    """
    check(config)
    require_agent(config.memory_every)
    log_of(config.log_to)
    start, init = checkpoint_of(config.resume, "resume"), checkpoint_of(config.init, "init")
    if start is not None:
        start.about.check_optimizer()
    check_data(config.data)
    strategy, device = choose_strategy(config)
    if config.strategy == AUTO and config.batch.microbatch is None:
        config = with_value(config, "batch.microbatch", AUTO)
    if start is not None:
        config = resume.as_before(config, start.about, strategy.data_ranks)
    published = resume.published_folder(config, start)
    shape = resume.shape_of(config, start or init, published)
    if start is not None:
        start.about.check_shape(shape)
    if strategy.is_served and shape.experts and shape.experts.needs_loads:
        raise ConfigError(
            f"strategy is {strategy}, but the experts have auxiliary losses or a bias_rate, which "
            "need the loads of the whole batch in each step, and workers of servers push alone; "
            f"the nearest is dp{strategy.num_ranks}"
        )
    name = resume.name_of(config, shape, start or init, published)
    if config.corpus.seq_len > (longest := shape.max_seq_len):
        is_fixed = (start or init or published) is not None and shape.position == "learned"
        raise ConfigError(
            f"corpus.seq_len is {config.corpus.seq_len}, but the model's positions end at "
            f"{longest}; set corpus.seq_len to at most {longest}"
            + (", the size of its learned table" if is_fixed else ", or raise shape.max_seq_len")
        )
    choice: list[str] = []
    if AUTO in (config.strategy, config.batch.microbatch):
        from phalanx.train.job.auto import with_choice  # imports torch

        config, strategy, choice = with_choice(config, strategy, shape, device)
    batch = solve_batch(config.batch, strategy.data_ranks, strategy.pp.degree)
    origins = (start, init, published)
    request = Request(config, strategy, device, shape, name, batch, *origins, (*choice,))
    request.check_memory(has_activations=False)
    return request


def choose_strategy(config: JobConfig) -> tuple[Strategy, str]:
    """Return the strategy of a checked configuration, dp if none is named, and the device.

    For `auto`, return dp over all ranks, which the planner replaces later. The number of ranks is
    torchrun's or --nproc; else the strategy's; else one for each GPU; else, on a CPU, 2, or for
    `auto` one for each core.

    Raises:
        StrategyError: the strategy does not fit the number of processes.
        ConfigError: the device is missing, there are too few GPUs or too little memory, or torchrun
            started a number of processes other than --nproc.
    """
    if config.strategy != AUTO:
        return choose(config.strategy, config.nproc, config.device)
    from phalanx.launch.local import num_cores

    strategy, device = choose(None, config.nproc, config.device)
    if device == "cpu" and config.nproc is None and not is_under_torchrun():
        strategy = Strategy(dp=Axis(num_cores(), "bucketed"))
    return strategy, device


def choose(text: str | None, nproc: int | None, device: str) -> tuple[Strategy, str]:
    """Return the strategy and device for these three settings, see `choose_strategy`."""
    from phalanx.launch.local import check_gpus

    device, num_devices = choose_device(device)
    num_ranks = nproc
    if is_under_torchrun():
        num_ranks = read_rank_env().num_ranks
        if nproc not in (None, num_ranks):
            raise ConfigError(
                f"nproc is {nproc}, but torchrun has started {num_ranks} processes; leave "
                f"nproc out, or set it to {num_ranks}"
            )
    if text is None:
        strategy = Strategy(dp=Axis(num_ranks or num_devices or 2, "bucketed"))
    else:
        strategy = Strategy.parse(text)
        require_built(strategy)
        if num_ranks is not None:
            check_ranks(strategy, num_ranks)
    if not is_under_torchrun():
        check_gpus(strategy.num_ranks, device, str(strategy))
        if device == "cpu":
            check_memory_for(strategy.num_ranks)
    return strategy, device


def choose_device(name: str) -> tuple[str, int]:
    """Return the device for the setting `name`, and the number of GPUs to use on this host."""
    if name != "cpu" and may_have_gpu():
        import torch

        if torch.cuda.is_available():
            return "cuda", torch.cuda.device_count()
    if name == "cuda":
        raise ConfigError("device is cuda, but this host has no CUDA device; use --device cpu")
    return "cpu", 0


def checkpoint_of(path: str | None, setting: str) -> Checkpoint | None:
    """Return the checkpoint at the path of a setting, or None without a path.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest has settings that are not valid.
    """
    if path is None:
        return None
    folder = path_of(path)
    if fetch(folder / "config.json").is_file():
        raise CheckpointError(
            f"{setting} is {path}, a Hugging Face folder; start a run with its weights by "
            f"--model {path}"
        )
    if setting == "resume":
        from phalanx.checkpoint.files import find_whole  # imports torch

        found = find_whole(folder, compares=not is_under_torchrun())
    else:
        found = manifest.find_and_read(folder)
    try:
        for entry in settings(TrainConfig):
            for values in (found.about.settings, found.about.stream):
                if entry.key in values:
                    check_value(entry, values[entry.key])
    except ConfigError as error:
        file, words = found.folder / manifest.NAME, brief(error, 300)
        raise CheckpointError(f"cannot read the settings in {file}: {words}") from error
    return found


def log_of(text: str | None) -> Log | None:
    """Return the function that the setting `log_to` names; None if it is unset.

    Raises:
        ConfigError: as `function_named`.
    """
    return None if text is None else function_named(text, "log_to")


def function_named(text: str, setting: str) -> Any:
    """Return the function that `text`, MODULE:FUNCTION or FILE.py:FUNCTION, names for a setting.

    Raises:
        ConfigError: the text has another form, or its module or function does not exist.
    """
    module_text, has_function, function = text.rpartition(":")
    path = Path(module_text)
    is_file = path.suffix == ".py"
    name, folder = (path.stem, path.resolve().parent) if is_file else (module_text, Path.cwd())
    if not has_function or not name or not function:
        raise ConfigError(f"{setting} is {text!r}; expected MODULE:FUNCTION, such as my_file:make")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting} is {text!r}, but the import of {name} from {folder} raised "
            f"{type(error).__name__}: {error}"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        hint = nearest(function, vars(module))
        raise ConfigError(f"{setting} is {text!r}, but {name} has no function {function!r}{hint}")
    return found
