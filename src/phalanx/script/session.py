"""A trainer's run on one rank: module, data, optimizer, and their position and checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from phalanx.checkpoint.run_state import Stateful
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.state import state_of
from phalanx.comm.comm import Ranks
from phalanx.comm.together import on_first_rank
from phalanx.config import OptimizerConfig
from phalanx.config.schema import RunConfig
from phalanx.data.rows import count_rows, map_tensors, take_rows
from phalanx.errors import CheckpointError, DataError
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.utilization import CountedFlops
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.batch_norm import batch_norms, require_statistics
from phalanx.parallel.compression.chosen import compress
from phalanx.parallel.dropout import MaskPosition, Masks, warning_of_draws
from phalanx.parallel.plan import Plan
from phalanx.script.checks import check_model, check_same_job, optimizer_of, scheduler_of
from phalanx.script.counting import counted_of, planned_of
from phalanx.script.deal import PlaceholderMicrobatch
from phalanx.script.flops import cut_by_flops, flops_of_trainer
from phalanx.script.guards.at_prepare import refuse_max_norm
from phalanx.script.guards.model import warn_of_buffers
from phalanx.script.loader import RankLoader
from phalanx.script.loss import CheckedObjective
from phalanx.script.order import JobGenerator
from phalanx.script.saves import latest, manifest_of, parts_of
from phalanx.strategy import Strategy
from phalanx.train.best import BestTracker
from phalanx.train.callback import CallbackRunner, Callbacks
from phalanx.train.job.run_folder import check_unused
from phalanx.train.loop import Stopped, train
from phalanx.train.notice import announce
from phalanx.train.precision import check_split, resolve
from phalanx.train.report.summary import Summary
from phalanx.train.session import Session
from phalanx.train.step import Step
from phalanx.train.text import compile_blocks

if TYPE_CHECKING:
    from phalanx.script.trainer import Options, Trainer


def train_module(
    trainer: Trainer,
    strategy: Strategy,
    options: Options,
    command: str = "",
    choice: Sequence[str] = (),
) -> Summary | Stopped:
    """Train on this rank of the job.

    `command` is the command line that resumes the run, without the folder; empty if the run was
    started in Python. `choice` are lines on why the strategy was chosen.
    """
    return train(ModuleSession(trainer, strategy, options, command, choice))


class ModuleSession(Session):
    """A trainer's run on one rank."""

    _resumed: Sequence[str] = ()

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy,
        options: Options,
        command: str = "",
        choice: Sequence[str] = (),
    ) -> None:
        """Build and split the model, and load the checkpoint if the run is resumed."""
        check_same_job(trainer, strategy, options)
        # Use the first rank's folder, because a name with the time may differ between ranks.
        self.out = on_first_rank(lambda: options.folder, f"cannot write to {options.out}")
        self._given = on_first_rank(lambda: options.out, "cannot resume")
        self.trainer, self.strategy, self.config = trainer, strategy, options
        self.unit = trainer.unit
        self._command, self._choice, self._is_resumed = command, choice, options.resume
        self.best, self.log = BestTracker.of(options), trainer.log
        self.precision = ModulePrecision(options)
        self.saver = Saver(
            self.out,
            keep=options.keep_checkpoints,
            num_stages=strategy.pp.degree,
        )
        with self.opening():
            self._open()

    def _open(self) -> None:
        trainer, strategy = self.trainer, self.strategy
        shares_memory = self.config.shared_memory
        self.comm = comm = Ranks(strategy, self.config.device, shares_memory=shares_memory)
        model = _built(trainer, self.precision)
        self.generator = JobGenerator()
        # Counted before the split, so that these are the FLOPs of the whole model.
        self._flops = flops_of_trainer(trainer, strategy, model, self.precision.of_batch)
        # With a global BatchNorm, each microbatch must have the rows it has on one process. Checked
        # on the whole model, because the ranks of all stages must read the same rows.
        is_cut_first = trainer.batch_norm == "global" and bool(batch_norms(model))
        # A spare row would enter the statistics of a BatchNorm.
        self._has_spares = not batch_norms(model)
        self._counted = counted_of(trainer, strategy, model) if comm.is_first else None
        refuse_max_norm(model)
        require_statistics(model, strategy, trainer.batch_norm)
        cut, self._stages = cut_by_flops(strategy, model, self._flops)
        self.plan = Plan(
            cut,
            model.to(comm.device),
            roles=trainer.roles,
            batch_norm=trainer.batch_norm,
            masks=Masks(trainer.seed, self._place),
            pp_rank=comm.coord("pp"),
        )
        check_split(self.config, self.plan)
        runner = self.plan.build(comm)
        self.optimizer = optimizer_of(trainer.optimizer, model)
        self.scheduler = scheduler_of(trainer.scheduler, self.optimizer)
        plain = trainer.loader(trainer.data, shuffle=trainer.shuffle, drop_last=trainer.drop_last)
        pieces = trainer.accumulation if is_cut_first else 1
        self.loader = RankLoader(
            plain, comm, self.generator, pieces=pieces, has_spares=self._has_spares
        )
        self.microbatches = self._cutting(self.loader, trainer.accumulation)
        self._calls: dict[int, dict[str, int]] = {}
        self._is_begun = False
        self.step = self._step_of(model, runner)
        self.called = CallbackRunner(Callbacks(trainer.callbacks, trainer.log), model)
        self.called.registered.add_extra_state(model, is_whole=self.strategy.pp.degree == 1)
        if self._is_resumed:
            self._resume()
        else:
            on_first_rank(lambda: check_unused(self.out, None), f"cannot begin a run in {self.out}")
        if self.config.compile:
            compile_blocks(model)
        self._batches = self._passes()

    def _step_of(self, model: nn.Module, runner: Runner) -> Step:
        how = (self.config.compress, self.strategy, self.config.precision)
        announce(compress(runner.reducer, *how, is_resumed=self._is_resumed))
        objective = CheckedObjective(
            self.trainer.objective,
            has_stages=self.comm.size("pp") > 1,
            autocast=self.precision.autocast,
            device=self.comm.device.type,
        )
        return Step(
            model,
            self.optimizer,
            objective,
            OptimizerConfig(clip_norm=self.trainer.max_norm or 0.0),
            comm=self.comm,
            num_steps=None,
            run=runner,
            scaler=self.precision.scaler(),
            nonfinite=self.config.nonfinite,
        )

    def _cutting(self, loader: RankLoader, accumulation: int) -> Microbatches:
        data_ranks = self.comm.size("data")
        return Microbatches(loader, accumulation, data_ranks, has_spares=self._has_spares)

    @property
    @override
    def num_steps(self) -> int:
        if self.trainer.steps is not None:
            return self.trainer.steps
        return self.trainer.epochs * len(self.loader)

    @override
    def next_microbatches(self) -> list[Any]:
        microbatches = self.microbatches.cut(self.precision.of_batch(next(self._batches)))
        if self._flops is not None and not self._flops.are_of(microbatches):
            self._flops = None  # off for the rest of the run, since row shapes vary
        self._calls.clear()
        return microbatches

    @contextmanager
    @override
    def stepping(self) -> Generator[None]:
        if self._is_begun or self.config.compile:  # draws of compiled modules are invisible
            yield
            return
        with warning_of_draws(self.step.model) as phase, self.step.watched(phase):
            yield

    @override
    def stepped(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        if not self._is_begun:
            self._is_begun = True
            warn_of_buffers(self.step.model, self.comm)
            state_of(self.step.model, self.optimizer)  # refuse now a state that no save can store

    def _passes(self) -> Iterator[Any]:
        """Yield this rank's batches, pass after pass."""
        is_rest = self._is_resumed  # the rest of a resumed pass may be empty
        while True:
            has_batches = False
            for batch in self.loader:
                has_batches = True
                yield batch
            if not has_batches and not is_rest:
                raise DataError(
                    f"the data ended after step {self.step.steps_done} of {self.num_steps}, and "
                    f"another pass over it yields no batch; set steps to {self.step.steps_done}, "
                    "or give data that can be read again"
                )
            is_rest = False

    @override
    def validation_batches(self) -> Iterable[Any] | None:
        if self.trainer.validation is None:
            return None
        plain = self.trainer.loader(self.trainer.validation)
        generator = JobGenerator(torch.get_rng_state())
        loader = RankLoader(plain, self.comm, generator, has_spares=self._has_spares)
        cutting = self._cutting(loader, 1)
        return (cutting.whole(self.precision.of_batch(batch)) for batch in loader)

    @override
    def parts(self) -> dict[str, Stateful]:
        schedulers = [] if self.scheduler is None else [self.scheduler]
        return parts_of([self.optimizer], schedulers, [self.loader], self.generator)

    @override
    def begin_save(self, *, is_passing: bool = False) -> None:
        about = manifest_of(
            self.strategy, self.step.steps_done, self.num_steps, is_passing=is_passing
        )
        self.state.begin_save(self.saver, about, replaces=True)

    def _resume(self) -> None:
        path = self._given
        start = on_first_rank(lambda: latest(path), f"cannot resume from {path}")
        if start is None:
            raise CheckpointError(f"cannot resume from {path}: there is no checkpoint in it")
        self.state.load(start)
        folder, about, _ = start
        on_first_rank(lambda: check_unused(self.out, start), f"cannot resume from {path}")
        self.step.steps_done = about.steps_done
        self._resumed = [
            *start.words(),
            _words_of_resuming(folder, about.strategy, str(self.strategy)),
        ]

    def _place(self) -> MaskPosition | None:
        number = self.step.run.microbatch
        rows = self.microbatches.rows()[number]
        rows = rows if len(rows) else rows.new_zeros(1)  # position 0 for a spare row
        return MaskPosition(self.step.steps_done, rows, self._calls.setdefault(number, {}))

    @property
    @override
    def num_rows(self) -> int:
        return self.loader.num_batch_rows

    @property
    @override
    def arithmetic(self) -> Arithmetic | None:
        return None

    @override
    def flops(self, num_rows: int | None = None) -> tuple[CountedFlops, None] | None:
        counted = self._flops
        if counted is None:
            return None
        rows = counted.num_rows if num_rows is None else num_rows
        return CountedFlops(round(counted.total * rows / counted.num_rows)), None

    @override
    def settings(self) -> dict[str, Any]:
        known = {"strategy": str(self.strategy), "steps": self.num_steps, "stages": self._stages}
        return {**known, **dataclasses.asdict(self.config), "out": str(self.out)}

    @override
    def remarks(self) -> list[str]:
        few = words_of_few(self.strategy, self.trainer.accumulation)
        words = [*self._choice, *self._resumed, *self._stages, *few]
        if self.step.steps_done >= self.num_steps:
            done = f"nothing to do: {self.step.steps_done} steps are done"
            words.append(f"{done}; --steps N resumes it up to step N")
        return words

    @override
    def title(self) -> str:
        trainer = self.trainer
        return (
            f"{_name_of(self.step.model)}, {self.strategy} on {self.comm.device.type}, global "
            f"batch {trainer.batch_size}, accumulation {trainer.accumulation}, "
            f"{self.step.steps_done} steps"
        )

    @override
    def planned(self) -> Any:
        if self._counted is None or self.precision.autocast is not None:
            return None
        return planned_of(self._counted, self.plan.strategy, self.trainer)

    @override
    def resume_command(self, steps: int | None = None) -> str:
        return resume_text(self.out, self._command, steps)


def _built(trainer: Trainer, precision: ModulePrecision) -> nn.Module:
    """Return the unsplit module in training mode, in the dtype of `precision`."""
    torch.manual_seed(trainer.seed)
    model = trainer.build()
    check_model(model)
    if not model.training:  # else submodules keep their modes
        model.train()
    return model if precision.weights is None else model.to(precision.weights)


def resume_text(out: Path, command: str, steps: int | None = None) -> str:
    """Return how to resume the run in `out`: `command` with the folder, or phalanx.Options."""
    if not command:
        return f"phalanx.Options(out={str(out)!r}, resume=True)"
    return f"{command} {shlex.quote(str(out))}" + ("" if steps is None else f" --steps {steps}")


class ModulePrecision:
    """The setting `precision` as dtypes for a user's module.

    Attributes:
        autocast: dtype of torch.autocast around each forward; None for no autocast.
        weights: dtype of weights and inputs; None to keep the dtypes of the module and its data.
    """

    def __init__(self, config: RunConfig) -> None:
        """Derive the dtypes from the settings."""
        self._config = config
        self.autocast: torch.dtype | None = None
        self.weights: torch.dtype | None = None
        if config.precision in ("bfloat16", "float16"):
            self.autocast = resolve(config.precision, config.device).compute
        elif config.precision != "auto":
            self.weights = resolve(config.precision, config.device).master

    def of_batch(self, batch: Any) -> Any:
        """Return a batch with its floating-point tensors in the dtype of the weights."""
        if self.weights is None:
            return batch
        return map_tensors(batch, lambda t: t.to(self.weights) if t.is_floating_point() else t)

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return a GradScaler for float16, else None."""
        return torch.amp.GradScaler("cuda") if self.autocast == torch.float16 else None


def _name_of(model: nn.Module) -> str:
    """Return the name of the model's class, without the subclass that fully_shard adds."""
    kinds = type(model).__mro__
    return next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))


def _words_of_resuming(folder: Path, before: str, now: str) -> str:
    change = "" if before == now else f", with another strategy: {before} -> {now}"
    return f"resumes {folder}{change}"


def words_of_few(strategy: Strategy, accumulation: int) -> list[str]:
    """Return a line of advice if a step has fewer microbatches than the degree of pp."""
    degree = strategy.pp.degree
    if accumulation >= degree:
        return []
    return [
        f"accumulation is {accumulation}, so that ranks of pp{degree} without a microbatch wait "
        f"for the others; with accumulation={2 * degree} they wait less"
    ]


class Microbatches:
    """Cuts batches into microbatches; with `has_spares`, placeholders replace empty ones."""

    def __init__(
        self, loader: RankLoader, accumulation: int, num_data_ranks: int, *, has_spares: bool
    ) -> None:
        self._loader = loader
        self._accumulation = accumulation
        self._num_data_ranks = num_data_ranks
        self._has_spares = has_spares

    def cut(self, batch: Any) -> list[Any]:
        """Return this rank's microbatches of a batch, without those that no rank has rows of."""
        loader = self._loader
        num_shards = self._num_data_ranks if len(loader.piece_sizes) == 1 else 1
        most = -(-loader.num_batch_rows // num_shards)  # microbatches with rows on some rank
        if loader.has_no_rows and self._has_spares:
            return [PlaceholderMicrobatch(batch)] * min(self._accumulation, most)
        if self._accumulation == 1:
            return [batch]
        pieces = self._pieces(count_rows(batch))
        return [self._piece(batch, rows) for rows in pieces[:most]]

    def whole(self, batch: Any) -> Any:
        """Return a whole batch for an evaluation; a placeholder if this rank has no rows."""
        return (
            PlaceholderMicrobatch(batch) if self._loader.has_no_rows and self._has_spares else batch
        )

    def rows(self) -> Sequence[Tensor]:
        """Return the row positions of each microbatch of the last batch, see `RankLoader.rows`."""
        rows = self._loader.rows
        return [rows[piece] for piece in self._pieces(len(rows))]

    def _piece(self, batch: Any, rows: slice) -> Any:
        if rows.stop > rows.start or not self._has_spares:
            return take_rows(batch, rows)
        return PlaceholderMicrobatch(take_rows(batch, slice(1)))

    def _pieces(self, num_rows: int) -> list[slice]:
        """Return the slice of each microbatch in this rank's rows of a batch."""
        sizes = self._loader.piece_sizes
        if len(sizes) <= 1:
            least, more = divmod(num_rows, self._accumulation)
            sizes = [least + (number < more) for number in range(self._accumulation)]
        ends = list(itertools.accumulate(sizes, initial=0))
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
