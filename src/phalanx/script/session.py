"""A trainer's run on one rank: module, data, optimizer, and their position and checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.run_state import Stateful
from phalanx.checkpoint.state import state_of
from phalanx.comm.together import on_first_rank
from phalanx.config import OptimizerConfig
from phalanx.data.rows import count_rows, map_tensors, take_rows
from phalanx.errors import CheckpointError, DataError
from phalanx.measure.utilization import CountedFlops
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.batch_norm import batch_norms, require_statistics
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
from phalanx.train.callback import Callbacks
from phalanx.train.loop import Stopped, train
from phalanx.train.precision import check_split, resolve
from phalanx.train.report.summary import Summary
from phalanx.train.session import Session

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

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy,
        options: Options,
        command: str = "",
        choice: Sequence[str] = (),
    ) -> None:
        """Open the session of a trainer."""
        check_same_job(trainer, strategy, options)
        self.trainer, self.unit = trainer, trainer.unit
        self._given = on_first_rank(lambda: options.out, "cannot resume")
        self.command, self._choice = command, choice
        self._calls: dict[int, dict[str, int]] = {}
        self._is_begun = False
        is_open = options.precision == "auto"  # the dtypes of the module and its data
        precision = None if is_open else resolve(options.precision, options.device)
        is_mixed = precision is not None and precision.compute != precision.master
        self._autocast = precision.compute if precision is not None and is_mixed else None
        self._dtype = None if precision is None or is_mixed else precision.master
        super().__init__(
            strategy,
            options,
            # The first rank's folder, because a name with the time may differ between ranks.
            on_first_rank(lambda: options.folder, f"cannot write to {options.out}"),
            Callbacks(trainer.callbacks, trainer.log),
            precision=precision,
            objective=CheckedObjective(
                trainer.objective,
                has_stages=strategy.pp.degree > 1,
                autocast=self._autocast,
                device=options.device,
            ),
            updates=OptimizerConfig(clip_norm=trainer.max_norm or 0.0),
            num_rated_steps=None,
        )

    @override
    def claim(self) -> None:
        if cast("Options", self.config).resume:
            path = self._given
            self.start = on_first_rank(lambda: latest(path), f"cannot resume from {path}")
            if self.start is None:
                raise CheckpointError(f"cannot resume from {path}: there is no checkpoint in it")
        super().claim()

    @override
    def build(self) -> Runner:
        trainer, strategy, comm = self.trainer, self.strategy, self.comm
        torch.manual_seed(trainer.seed)
        model = trainer.build()
        check_model(model)
        if not model.training:  # else submodules keep their modes
            model.train()
        model = model if self._dtype is None else model.to(self._dtype)
        # Counted before the split, so that these are the FLOPs of the whole model.
        self._flops = flops_of_trainer(trainer, strategy, model, self._cast)
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
        self.generator = JobGenerator()
        plain = trainer.loader(trainer.data, shuffle=trainer.shuffle, drop_last=trainer.drop_last)
        pieces = trainer.accumulation if is_cut_first else 1
        self.loader = RankLoader(
            plain, comm, self.generator, pieces=pieces, has_spares=self._has_spares
        )
        return self.plan.build(comm)

    @override
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_of(self.trainer.optimizer, model, self.comm)
        self.scheduler = scheduler_of(self.trainer.scheduler, optimizer)
        return optimizer

    @override
    def open_stream(self) -> Microbatches:
        self.microbatches = Microbatches(
            self._passes(),
            self.loader,
            self.trainer.accumulation,
            self.comm.size("data"),
            has_spares=self._has_spares,
        )
        return self.microbatches

    @property
    @override
    def num_steps(self) -> int:
        if self.trainer.steps is not None:
            return self.trainer.steps
        return self.trainer.epochs * len(self.loader)

    @override
    def next_microbatches(self) -> Sequence[Any]:
        microbatches = super().next_microbatches()
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
            # Refuse now a state that no save can store.
            state_of(self.step.model, self.step.optimizer)

    def _passes(self) -> Iterator[Any]:
        """Yield this rank's batches, pass after pass."""
        is_rest = self.start is not None  # the rest of a resumed pass may be empty
        while True:
            has_batches = False
            for batch in self.loader:
                has_batches = True
                yield self._cast(batch)
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
        is_spare = self._has_spares  # a rank without rows computes one that does not count
        return (
            PlaceholderMicrobatch(batch) if loader.has_no_rows and is_spare else batch
            for batch in map(self._cast, loader)
        )

    @override
    def parts(self) -> dict[str, Stateful]:
        schedulers = [] if self.scheduler is None else [self.scheduler]
        own = parts_of([self.step.optimizer], schedulers, [self.loader], self.generator)
        return super().parts() | own

    @override
    def manifest(self, *, is_passing: bool) -> Manifest:
        done, num_steps = self.step.steps_done, self.num_steps
        return manifest_of(self.strategy, done, num_steps, is_passing=is_passing)

    def _cast(self, batch: Any) -> Any:
        """Return a batch with its floating-point tensors in the dtype of the weights."""
        if self._dtype is None:
            return batch
        return map_tensors(batch, lambda t: t.to(self._dtype) if t.is_floating_point() else t)

    def _place(self) -> MaskPosition | None:
        number = self.step.run.microbatch
        rows = self.microbatches.rows()[number]
        rows = rows if len(rows) else rows.new_zeros(1)  # position 0 for a spare row
        return MaskPosition(self.step.steps_done, rows, self._calls.setdefault(number, {}))

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
        return {**known, **super().settings(), "out": str(self.out)}

    @override
    def remarks(self) -> list[str]:
        words = [*self._choice]
        if self.start is not None:
            before, now = self.start.about.strategy, str(self.strategy)
            change = "" if before == now else f", with another strategy: {before} -> {now}"
            words += [*self.start.words(), f"resumes {self.start.folder}{change}"]
        words += [*self._stages, *words_of_few(self.strategy, self.trainer.accumulation)]
        if self.step.steps_done >= self.num_steps:
            done = f"nothing to do: {self.step.steps_done} steps are done"
            words.append(f"{done}; --steps N resumes it up to step N")
        return words

    @override
    def title(self) -> str:
        trainer = self.trainer
        # Without the subclass that fully_shard adds.
        kinds = type(self.step.model).__mro__
        name = next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))
        return (
            f"{name}, {self.strategy} on {self.comm.device.type}, global "
            f"batch {trainer.batch_size}, accumulation {trainer.accumulation}, "
            f"{self.step.steps_done} steps"
        )

    @override
    def planned(self) -> Any:
        if self._counted is None or self._autocast is not None:
            return None
        return planned_of(self._counted, self.plan.strategy, self.trainer)


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
    """A stream of batches, each cut into the microbatches of a step.

    With `has_spares`, placeholders replace microbatches that have no rows on this rank.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        loader: RankLoader,
        accumulation: int,
        num_data_ranks: int,
        *,
        has_spares: bool,
    ) -> None:
        """Cut `batches`, which `loader` yields."""
        self._batches, self._loader = batches, loader
        self._accumulation, self._num_data_ranks = accumulation, num_data_ranks
        self._has_spares = has_spares

    @property
    def num_rows(self) -> int:
        """Rows of the latest global batch."""
        return self._loader.num_batch_rows

    def close(self) -> None:
        """Do nothing: the DataLoader ends its workers itself."""

    def __next__(self) -> list[Any]:
        """Return this rank's microbatches of a batch, without those that no rank has rows of."""
        batch, loader = next(self._batches), self._loader
        num_shards = self._num_data_ranks if len(loader.piece_sizes) == 1 else 1
        most = -(-loader.num_batch_rows // num_shards)  # microbatches with rows on some rank
        if loader.has_no_rows and self._has_spares:
            return [PlaceholderMicrobatch(batch)] * min(self._accumulation, most)
        if self._accumulation == 1:
            return [batch]
        return [
            take_rows(batch, rows)
            if rows.stop > rows.start or not self._has_spares
            else PlaceholderMicrobatch(take_rows(batch, slice(1)))
            for rows in self._pieces(count_rows(batch))[:most]
        ]

    def rows(self) -> Sequence[Tensor]:
        """Return the row positions of each microbatch of the last batch, see `RankLoader.rows`."""
        rows = self._loader.rows
        return [rows[piece] for piece in self._pieces(len(rows))]

    def _pieces(self, num_rows: int) -> list[slice]:
        """Return the slice of each microbatch in this rank's rows of a batch."""
        sizes = self._loader.piece_sizes
        if len(sizes) <= 1:
            least, more = divmod(num_rows, self._accumulation)
            sizes = [least + (number < more) for number in range(self._accumulation)]
        ends = list(itertools.accumulate(sizes, initial=0))
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
