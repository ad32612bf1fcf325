"""A job of one's own for the trainer: a module, what its loss is, data and an optimizer.

    def job() -> phalanx.Trainer:
        return phalanx.Trainer(build, SquaredError(), dataset, epochs=3)

    phalanx train --script my.py:job --strategy pp2,dp2       or job().train("pp2,dp2")
    phalanx verify --script my.py:job pp2,dp2                 or job().verify("pp2,dp2")

The trainer calls the forward itself, so it runs every strategy, pipelines too; a loop of one's own
(`phalanx.init`) runs dp, fsdp and tp.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.config.fields import SEED, STEPS, Range
from phalanx.config.schema import MOST_ROWS, JobConfig, RunConfig
from phalanx.config.validate import AUTO
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.attach import report_in_one_message
from phalanx.launch.rank_env import read_rank_env
from phalanx.measure.logs import has_steps
from phalanx.parallel.batch_norm import Statistics
from phalanx.script.arguments import check_job, check_python, finding_modules, not_ending
from phalanx.script.automatic import chosen
from phalanx.script.checks import check_data, check_objective, check_settings
from phalanx.script.session import resume_text, train_module
from phalanx.storage import hint_of_missing
from phalanx.strategy import Strategy, refuse_servers
from phalanx.train.callback import Callback, Log
from phalanx.train.job.request import choose_device
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
    """How a trainer is run, apart from what it trains; see `phalanx train --script --help`.

    Attributes:
        out: folder of records and checkpoints.
        resume: whether to resume from the latest checkpoint there.
        device: what it is computed on, settled: "cpu" or "cuda".
    """

    out: Path
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.out, str):  # as many write it
            object.__setattr__(self, "out", Path(self.out))
        check_settings(self)
        object.__setattr__(self, "device", choose_device(self.device)[0])


@dataclass(frozen=True)
class Trainer:
    """A job: what to train, and how; all of it importable by name, or picklable.

    Attributes:
        build: returns the module with its first weights; torch's generator has been seeded.
        objective: how a microbatch becomes a sum of losses, and how many samples or tokens it has.
        data: a map-style or iterable dataset.
        optimizer: makes an optimizer from the parameters, of any kind of torch.
        scheduler: makes a schedule from the optimizer, stepped after each step; None: none.
        validation: a dataset whose mean loss is measured; None: none.
        collate: makes a batch of samples, as a DataLoader's.
        batch_size: samples of the global batch of a step.
        accumulation: microbatches into which each rank cuts its rows of them; pipelines need some.
        epochs: passes over the data.
        steps: steps, in place of `epochs`.
        max_norm: the gradient is scaled to this norm where it is larger; None or 0: never.
        shuffle: whether each pass visits the samples in an order of its own.
        drop_last: whether a pass leaves out its last batch if that is smaller than the others.
        seed: of first weights, order and masks of dropout.
        batch_norm: over what BatchNorm takes its statistics, see `Run.prepare`.
        roles: patterns of module names to roles for tp, see docs/strategies.md.
        unit: what the objective counts, for the records.
        callbacks: called after steps and evaluations, by names; see `phalanx.Callback`. One with
            `state_dict` is saved and resumed with the run.
        log: called on the first rank with each record, its kind and its values, beside the run's
            own files: a few lines bring them to any other logger.
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

        `auto` is the fastest strategy that fits, on a rank for each GPU or core. A process that is
        a rank of a job, as under torchrun, joins it instead. The result is the first rank's. A run
        that fails before its first step leaves no folder behind.

        Raises:
            PhalanxError: the strategy does not split the model, or the run went wrong.
            Interrupted: a signal ended it; the step that it was at is saved.
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
        """Train as `train`.

        `command` is the command line that resumes, but for the folder; `choice` says why the
        strategy was chosen.
        """
        options = options or Options(out=Path("runs") / "job")
        if strategy == AUTO:
            resume = str(options.out) if options.resume else None
            asked = JobConfig(strategy=AUTO, device=options.device, resume=resume)
            strategy, choice = chosen(self, "phalanx.Trainer", asked)
        parsed = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
        refuse_servers(parsed, "a Trainer")
        is_new = not options.out.exists()
        advice = functools.partial(how_to_resume, options.out, resume_text(options.out, command))
        args = (parsed.num_ranks, self, parsed, options, command, (*choice,))
        try:
            return summary_of(train_module, *args, config=options, advice=advice)
        except PhalanxError:
            if is_new and read_rank_env().rank == 0 and not has_steps(options.out):
                shutil.rmtree(options.out, ignore_errors=True)
            raise

    def verify(
        self, strategy: str | Strategy, *, steps: int = 5, dtype: str = "float64"
    ) -> Verdict:
        """Compare the job's own steps under a strategy with one process of plain PyTorch.

        In float64 it takes them as `train` does, saves, and resumes under another strategy. In a
        narrower type the split alone is judged: AdamW steps on both sides, see verify/compare.py.

        Raises:
            StrategyError: it does not split this module.
            ConfigError: `build` makes no new module each time.
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
        if isinstance(self.build, nn.Module):
            check_build("phalanx.Trainer", self.build)
        check_objective(self.objective)
        check_data("data", self.data, is_trained=True)
        if self.validation is not None:
            check_data("validation", self.validation, is_trained=False)
        if isinstance(self.data, IterableDataset) and (self.shuffle or self.steps is None):
            raise ConfigError(
                f"{type(self.data).__name__} is an IterableDataset, which has its own order and no "
                "length; say shuffle=False and steps=N to phalanx.Trainer"
            )

    def loader(
        self, data: Dataset[Any], *, shuffle: bool = False, drop_last: bool = False
    ) -> DataLoader[Any]:
        """Return the global batches of a dataset."""
        return DataLoader(
            data, self.batch_size, shuffle or None, collate_fn=self.collate, drop_last=drop_last
        )


def trainer_of(script: str) -> Trainer:
    """Return the trainer that a script describes, as `my.py:job`.

    Raises:
        ConfigError: there is no such file or function, or it returns something else.
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
    # Ranks import it by this name: what it holds is pickled by reference.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with not_ending(script), finding_modules(script):
        module = importlib.import_module(path.stem)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ConfigError(
            f"{path} cannot be imported as '{path.stem}', which is {module.__file__} already; "
            "give the file another name"
        )
    job = getattr(module, function, None)
    if not callable(job):
        raise ConfigError(f"{path} has no function '{function}'; expected one that returns a job")
    check_job(script, job)
    with not_ending(script), finding_modules(script):
        trainer = job()
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"{script} returns a {type(trainer).__name__}; expected a phalanx.Trainer"
        )
    return trainer
