"""The Trainer: a user's job, described by a module, an objective, data and an optimizer.

    def job() -> phalanx.Trainer:
        return phalanx.Trainer(build, SquaredError(), dataset, epochs=3)

    phalanx train --script my.py:job --strategy pp2,dp2       or job().train("pp2,dp2")
    phalanx verify --script my.py:job pp2,dp2                 or job().verify("pp2,dp2")

The trainer calls the forward itself, so it supports every strategy, including pipelines. A user's
own loop (`phalanx.init`) supports dp, fsdp and tp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.config.fields import SEED, STEPS, Range
from phalanx.config.schema import MOST_ROWS, JobConfig, RunConfig
from phalanx.config.validate import AUTO
from phalanx.errors import ConfigError
from phalanx.launch.attach import report_in_one_message
from phalanx.launch.launched import launched, require_agent
from phalanx.launch.rank_env import read_rank_env
from phalanx.object_store import path_of
from phalanx.parallel.batch_norm import Statistics
from phalanx.script.arguments import check_job, check_python, finding_modules, not_ending
from phalanx.script.automatic import chosen
from phalanx.script.checks import check_data, check_objective, check_settings
from phalanx.script.session import train_module
from phalanx.storage import hint_of_missing
from phalanx.strategy import Strategy, refuse_servers
from phalanx.train.callback import Callback, Callbacks, Log
from phalanx.train.job.request import choose_device, log_of
from phalanx.train.job.resume import continuation
from phalanx.train.job.run_folder import net_files, removed_if_refused, resumed_folder
from phalanx.train.loop import how_to_resume
from phalanx.train.objective import Objective, check_build
from phalanx.train.report.summary import Summary
from phalanx.train.run import summary_of

if TYPE_CHECKING:
    from phalanx.verify.verdict import Verdict

Parameters = Iterable[nn.Parameter]


def _adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of a trainer's run, such as its folder; see `phalanx train --script --help`.

    Attributes:
        out: folder of records and checkpoints; to resume, also one of its checkpoints.
        resume: whether to resume from the checkpoint that `out` names, by default the latest.
        device: device to compute on; "auto" is resolved to "cpu" or "cuda".
    """

    out: Path
    resume: bool = False

    def __post_init__(self) -> None:
        if not isinstance(cast(Any, self.out), str | Path) or not str(self.out):
            raise ConfigError(f"phalanx.Options: out is {self.out!r}; expected a folder")
        object.__setattr__(self, "out", path_of(self.out))  # from text, too
        check_settings(self)
        require_agent(self.memory_every)
        log_of(self.log_to)
        object.__setattr__(self, "device", choose_device(self.device)[0])

    @property
    def folder(self) -> Path:
        """Folder of the run: `out`, or the run of the checkpoint `out` to resume from."""
        return resumed_folder(self.out) if self.resume else self.out


@dataclass(frozen=True)
class Trainer:
    """A training job; all its values must be importable by name, or picklable.

    Attributes:
        build: function that returns the module with initial weights, after torch was seeded.
        objective: computes the sum of losses of a microbatch, and its number of samples or tokens.
        data: map-style or iterable dataset.
        optimizer: function that makes a torch optimizer from the parameters.
        scheduler: function that makes a schedule from the optimizer, stepped after each step; None
            for no schedule.
        validation: dataset whose mean loss is measured; None for no evaluation.
        collate: function that makes a batch from samples, as a DataLoader's collate_fn.
        batch_size: samples in the global batch of a step.
        accumulation: microbatches per step on each rank; pipelines need several to be efficient.
        epochs: passes over the data.
        steps: number of steps, used instead of `epochs` if given.
        max_norm: largest gradient norm; larger gradients are scaled to it. None or 0: no clipping.
        shuffle: whether each pass has a new random order of the samples.
        drop_last: whether to skip the last batch of a pass if it is incomplete.
        seed: seed of the initial weights, the order of samples and the dropout masks.
        batch_norm: rows over which BatchNorm computes statistics, see `Run.prepare`.
        roles: patterns of module names -> roles for tp, see docs/strategies.md.
        unit: name of the unit that the objective counts, for the records.
        callbacks: callbacks by name, called after steps and evaluations, see `phalanx.Callback`. A
            callback with `state_dict` is saved and resumed with the run.
        log: function called on the first rank with the kind and the values of each record, which
            are also written to the run's files. Use it to connect another logger.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    data: Dataset[Any]
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = _adamw
    scheduler: Callable[[Any], torch.optim.lr_scheduler.LRScheduler] | None = None
    validation: Dataset[Any] | None = None
    collate: Callable[[Any], Any] | None = None
    batch_size: Annotated[int, Range(1, 2**40, "[]")] = 32
    accumulation: Annotated[int, Range(1, MOST_ROWS, "[]")] = 1
    epochs: Annotated[int, Range(1, 10**9, "[]")] = 1
    steps: Annotated[int | None, STEPS] = None
    max_norm: Annotated[float | None, Range(0)] = None
    shuffle: bool = True
    drop_last: bool = False
    seed: Annotated[int, SEED] = 0
    batch_norm: Statistics | None = None
    roles: Mapping[str, str] | None = None
    unit: str = "samples"
    callbacks: Mapping[str, Callback] = field(default_factory=dict[str, Callback])
    log: Log | None = None

    def train(self, strategy: str | Strategy = "dp1", options: Options | None = None) -> Summary:
        """Train on as many processes of this host as the strategy needs.

        `auto` selects the fastest strategy that fits, with one rank for each GPU or core. Under
        torchrun this process joins the job instead of starting others. The result is the first
        rank's. A run that is refused before its first step removes its new folder.

        Raises:
            PhalanxError: the strategy cannot split the model, or the run failed.
            Interrupted: a signal ended the run, after the current step was saved if there was time.
        """
        report_in_one_message()
        return self.start(strategy, options)

    def start(
        self,
        strategy: str | Strategy,
        options: Options | None,
        command: str = "",
        choice: Sequence[str] = (),
    ) -> Summary:
        """Train as `train` does.

        `command` is the command line that resumes the run, without the folder; `choice` are lines
        on why the strategy was chosen.
        """
        options = options or Options(out=Path("runs") / "job")
        for value, kind in ((options, Options), (strategy, str | Strategy)):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"Trainer.train: {value!r} is a {type(value).__name__}; expected a strategy, "
                    "such as 'dp2', and phalanx.Options(...)"
                )
        trainer, job = self, launched()
        changes = continuation({"out": str(options.folder)})
        strategy = changes.get("strategy", strategy)
        if job is not None and job.first is not None and self.batch_norm is None:
            # A microbatch has at most as many rows on a rank as in the first generation.
            ranks = [Strategy.parse(text).data_ranks for text in (job.first, str(strategy))]
            accumulation = -(-self.accumulation * ranks[0] // ranks[1])
            trainer = dataclasses.replace(self, accumulation=accumulation)
        if "out" in changes:
            is_begun = changes.get("resume") is not None
            options = dataclasses.replace(options, out=options.folder, resume=is_begun)
        if strategy == AUTO:
            resume = str(options.out) if options.resume else None
            asked = JobConfig(strategy=AUTO, device=options.device, resume=resume)
            strategy, choice = chosen(self, "phalanx.Trainer", asked)
        parsed = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
        refuse_servers(parsed, "a Trainer")
        out = options.folder
        advice = functools.partial(how_to_resume, out, command)
        args = (parsed.num_ranks, trainer, parsed, options, command, (*choice,))
        is_new = read_rank_env().rank == 0 and not out.exists()
        with net_files(options, out), removed_if_refused(out, is_new=is_new):
            return summary_of(train_module, *args, config=options, advice=advice)

    def verify(
        self, strategy: str | Strategy, *, steps: int = 5, dtype: str = "float64"
    ) -> Verdict:
        """Compare the job's steps under a strategy with one process of plain PyTorch.

        In float64 the steps run as in `train`, are saved, and resume under another strategy. With a
        narrower `dtype` only the split is compared, with AdamW steps on both sides, see
        verify/compare.py.

        Raises:
            StrategyError: the strategy cannot split this module.
            ConfigError: `build` does not make a new module in each call.
        """
        from phalanx.script import proof
        from phalanx.verify.harness import verify

        check_build("phalanx.Trainer", self.build)
        parsed = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
        refuse_servers(parsed, "a Trainer")
        if dtype == "float64":
            return proof.prove(self, parsed, steps)
        case = proof.case_of(dataclasses.replace(self, steps=steps))
        return verify(
            case.build,
            case.batches,
            parsed,
            self.objective,
            accumulation=self.accumulation,
            dtype=dtype,
            roles=self.roles,
            batch_norm=self.batch_norm,
            dropout_seed=self.seed,
        )

    def __post_init__(self) -> None:
        check_settings(self)
        Callbacks(self.callbacks, self.log).check()
        if isinstance(self.build, nn.Module):
            check_build("phalanx.Trainer", self.build)
        check_objective(self.objective)
        check_data("data", self.data, is_trained=True)
        if self.validation is not None:
            check_data("validation", self.validation, is_trained=False)
        if isinstance(self.data, IterableDataset) and (self.shuffle or self.steps is None):
            raise ConfigError(
                f"{type(self.data).__name__} is an IterableDataset, which has its own order and no "
                "length; give shuffle=False and steps=N to phalanx.Trainer"
            )

    def loader(
        self, data: Dataset[Any], *, shuffle: bool = False, drop_last: bool = False
    ) -> DataLoader[Any]:
        """Return a DataLoader over the global batches of a dataset."""
        return DataLoader(
            data, self.batch_size, shuffle or None, collate_fn=self.collate, drop_last=drop_last
        )


def trainer_of(script: str) -> Trainer:
    """Return the trainer that the function of `script` makes, given as `my.py:job`.

    Raises:
        ConfigError: the file or function does not exist, or does not return a trainer.
        ScriptError: the script imports a package that is not installed.
    """
    import importlib
    import sys

    name, has_function, function = script.rpartition(":")
    path = Path(name)
    if has_function and not path.exists():
        raise ConfigError(f"script is '{script}', and {path} does not exist{hint_of_missing(path)}")
    if not has_function or not path.is_file() or path.suffix != ".py":
        raise ConfigError(
            f"script is '{script}'; expected FILE.py:FUNCTION, a function without arguments that "
            "returns a phalanx.Trainer"
        )
    if "." in path.stem:
        raise ConfigError(
            f"{path} cannot be imported: Python takes the dot in '{path.stem}' for a package; "
            f"give the file another name, such as {path.stem.replace('.', '_')}.py"
        )
    check_python(path)
    # Ranks import the module by this name, because its functions are pickled by reference.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with not_ending(script), finding_modules(script):
        module = importlib.import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ConfigError(
            f"{path} cannot be imported as '{path.stem}', because {module.__file__} has this "
            "module name already; give the file another name"
        )
    job = getattr(module, function, None)
    if not callable(job):
        raise ConfigError(
            f"{path} has no function '{function}'; expected a function that returns a "
            "phalanx.Trainer"
        )
    check_job(script, job)
    with not_ending(script), finding_modules(script):
        trainer = job()
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"{script} returns a {type(trainer).__name__}; expected a phalanx.Trainer"
        )
    return trainer
