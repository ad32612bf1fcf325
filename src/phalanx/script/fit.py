"""A trainer's run on one rank: split the model, take the steps, keep records, save."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import IterableDataset

from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.state import state_of
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.together import on_first_rank
from phalanx.comm.waits import told_to
from phalanx.config import OptimizerConfig
from phalanx.data.rows import count_rows, map_batch, tensors_of
from phalanx.debug.check import CollectiveCheck
from phalanx.errors import CheckpointError, DataError
from phalanx.launch.pulse import PULSE
from phalanx.measure.environment import environment
from phalanx.measure.logs import RunLog, StepRecord
from phalanx.measure.memory import MemoryAccount, MemoryLedger
from phalanx.measure.timer import StepTimer
from phalanx.models.attention import to_device
from phalanx.parallel.batch_norm import batch_norms, settle_batch_norms
from phalanx.parallel.dropout import Place, can_be_keyed, key_dropouts, naming_draws
from phalanx.parallel.plan import Plan
from phalanx.script import checkpoint
from phalanx.script.buffers import refuse_max_norm, warn_of_buffers
from phalanx.script.checks import (
    check_count,
    check_model,
    check_same_job,
    optimizer_of,
    scheduler_of,
)
from phalanx.script.deal import Spare
from phalanx.script.flops import Flops, flops_of
from phalanx.script.loader import RankLoader
from phalanx.script.loss import check_sum
from phalanx.script.mfu import Mfu, ProductTypes
from phalanx.script.order import Draws
from phalanx.script.stages import cut_by_flops
from phalanx.strategy import Strategy
from phalanx.train.objective import Objective
from phalanx.train.pace import Pace
from phalanx.train.step import TERMS, Step, StepResult
from phalanx.verify.reference import in_training

if TYPE_CHECKING:
    from phalanx.script.trainer import Options, Trainer

LEDGER_STEP, MEMORY_STEP, WARMUP_STEPS = 1, 2, 3
"""The steps whose bytes are counted and whose memory is, and how many no median has."""


@dataclass(frozen=True)
class Fitted:
    """What a run has done.

    Attributes:
        steps_done: steps taken, those before it went on too.
        losses: of each step of this process.
        evaluations: step and mean loss of each measurement on the validation data.
        sent: what the first rank sent in one step.
        memory: what it held in one step; None where fewer than three were taken.
        step_s: median wall time of a step; None likewise.
        mfu: share of the rate of matrix products that the model's FLOPs took; None if unknown, as
            where rows are padded to the longest of their batch.
        checkpoint: folder of the last one.
        stop_signal: the signal that ended the run before its last step, or 0.
        resume_by: the command that resumes the run, or what to say in Python.
    """

    steps_done: int
    losses: list[float]
    evaluations: list[tuple[int, float]]
    sent: list[Entry]
    memory: MemoryAccount | None
    step_s: float | None
    mfu: float | None
    checkpoint: str
    stop_signal: int = 0
    resume_by: str = ""


def fit(trainer: Trainer, strategy: Strategy, options: Options, command: str = "") -> Fitted:
    """Train on this rank, with the others of the job.

    `command` is the command line, but for the folder, that resumes the run; empty if none does.
    """
    check_same_job(trainer, strategy, options)
    # A folder named after the time must have one name.
    out = on_first_rank(lambda: options.out, f"cannot write to {options.out}")
    options = dataclasses.replace(options, out=out)
    stages = strategy.pp.degree
    with Saver(out, timeout_s=options.timeout_s, num_stages=stages) as saver:
        run = Fit(trainer, strategy, options, saver, command)
        with run.records:
            return run.run()


class Fit:
    """What one rank works with."""

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy,
        options: Options,
        saver: Saver,
        command: str,
        records: Callable[[Fit], Records] | None = None,
    ) -> None:
        """Split the model, and load a checkpoint if there is one to go on from."""
        self.trainer, self.strategy, self.options = trainer, strategy, options
        self.saver = saver
        self.comm = comm = Ranks(strategy, options.device)
        torch.manual_seed(trainer.seed)
        model = trainer.build()
        check_model(model)
        in_training(model)
        self.draws = Draws()
        # Before anything is split: the FLOPs are those of one process.
        self.flops = self._count_flops(model)
        # BatchNorm over all ranks takes the rows of a microbatch that one process has in it. Asked
        # of the whole model: the ranks of all stages must read the same rows.
        is_cut_first = trainer.batch_norm == "global" and bool(batch_norms(model))
        # A row that counts nothing would count in the statistics of a BatchNorm.
        self._has_spares = not batch_norms(model)
        refuse_max_norm(model)
        settle_batch_norms(model, comm, trainer.batch_norm)
        cut, self.stages = cut_by_flops(strategy, model, self.flops)
        plan = Plan(cut, model.to(comm.device), roles=trainer.roles, pp_rank=comm.coord("pp"))
        runner = plan.build(comm)
        self.optimizer = optimizer_of(trainer.optimizer, model)
        self.scheduler = scheduler_of(trainer.scheduler, self.optimizer)
        plain = trainer.loader(trainer.data, shuffle=trainer.shuffle, drop_last=trainer.drop_last)
        self._calls: dict[int, dict[str, int]] = {}
        self._saved = ""
        self.resume_by = f"phalanx.Options(out={str(options.out)!r}, resume=True)"
        if command:
            self.resume_by = f"{command} {options.out}"
        pieces = trainer.accumulation if is_cut_first else 1
        self.loader = RankLoader(
            plain, comm, self.draws, pieces=pieces, has_spares=self._has_spares
        )
        self.step = Step(
            model,
            self.optimizer,
            _OfSums(trainer.objective, has_stages=comm.size("pp") > 1),
            OptimizerConfig(clip_norm=trainer.max_norm or 0.0),
            comm=comm,
            num_steps=None,
            run=runner,
        )
        if can_be_keyed(strategy):
            key_dropouts(model, trainer.seed, self._place)
        if options.resume:
            self._resume()
        else:
            checkpoint.check_unused(options.out)
        self.records = (records or Records)(self)
        self.pace = Pace(60 * options.save_every_minutes, comm.is_first)

    def run(self) -> Fitted:
        """Take the steps; a signal ends them after the one under way, with a checkpoint."""
        options = self.options
        with ExitStack() as stack:
            stack.enter_context(PULSE.doing("the work between two steps"))
            stack.enter_context(PULSE.heeding())
            stack.enter_context(self.step.watched(PULSE.phase))
            if options.debug_comm:
                stack.enter_context(self._checked())
            self._evaluate()
            batches = self._batches()
            while self.step.steps_done < self.num_steps and not self.pace.stop_signal:
                self._take(batches)
        is_cut_short = self.step.steps_done < self.num_steps
        return self.records.result(self._saved, self.pace.stop_signal if is_cut_short else 0)

    def _take(self, batches: Iterator[Any]) -> None:
        """Take a step, and save and evaluate after it if that is due."""
        step, options, pace = self.step, self.options, self.pace
        with PULSE.doing(f"data of step {step.steps_done + 1}"), self.records.timer.phase("data"):
            microbatches = self._cut(next(batches))
        self._calls.clear()
        with ExitStack() as stack:
            if not self.records.losses:
                phase = stack.enter_context(naming_draws(step.model))
                stack.enter_context(step.watched(phase))
            result = self.records.take(step, microbatches)
        if self.scheduler is not None:
            self.scheduler.step()
        self.records.keep(result)
        PULSE.steps_done = done = step.steps_done
        if len(self.records.losses) == 1:
            warn_of_buffers(step.model, self.comm)
            state_of(step.model, self.optimizer)  # refuses what could not be saved at the end
        pace.after_step(can_save=True)
        is_last = done == self.num_steps
        is_asked = options.eval_every and done % options.eval_every == 0
        if is_last or (is_asked and not pace.stop_signal):
            self._evaluate()
        is_due = pace.is_save_due or pace.stop_signal > 0
        if is_last or is_due or (options.save_every and done % options.save_every == 0):
            with PULSE.doing(f"the checkpoint after step {done}"):
                self._note_saved(self._save())
            pace.saved()
            self.records.timer.begin_step()  # without the save

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        if self.trainer.steps is not None:
            return self.trainer.steps
        return self.trainer.epochs * len(self.loader)

    def _batches(self) -> Iterator[Any]:
        """Yield this rank's batches, pass after pass."""
        is_rest = self.options.resume  # of a pass that was stopped at its end nothing may be left
        while True:
            has_batches = False
            for batch in self.loader:
                has_batches = True
                yield batch
            if not has_batches and not is_rest:
                raise DataError(
                    f"the data ended after step {self.step.steps_done} of {self.num_steps}, and a "
                    "further pass over it has none; set steps to that, or give data that can be "
                    "read again"
                )
            is_rest = False

    def _cut(self, batch: Any) -> list[Any]:
        """Return this rank's microbatches of a batch: those in which some rank has a row."""
        loader, num_pieces = self.loader, self.trainer.accumulation
        num_shares = self.comm.size("data") if len(loader.piece_sizes) == 1 else 1
        most = -(-loader.num_batch_rows // num_shares)  # of a rank; then one has more than others
        if loader.is_at_empty and self._has_spares:
            return [Spare(batch)] * min(num_pieces, most)
        if num_pieces == 1:
            return [batch]
        pieces = self._pieces(count_rows(batch))
        return [self._piece(batch, rows) for rows in pieces[:most]]

    def _piece(self, batch: Any, rows: slice) -> Any:
        if rows.stop > rows.start or not self._has_spares:
            return map_batch(batch, lambda tensor: tensor[rows])
        return Spare(map_batch(batch, lambda tensor: tensor[:1]))

    def rows(self) -> Sequence[torch.Tensor]:
        """Return where the rows of each microbatch of the last batch stand, see `RankLoader`."""
        rows = self.loader.rows
        return [rows[piece] for piece in self._pieces(len(rows))]

    def _pieces(self, num_rows: int) -> list[slice]:
        """Return where each microbatch stands among this rank's rows of a batch."""
        sizes = self.loader.piece_sizes
        if len(sizes) <= 1:
            least, more = divmod(num_rows, self.trainer.accumulation)
            sizes = [least + (number < more) for number in range(self.trainer.accumulation)]
        ends = list(itertools.accumulate(sizes, initial=0))
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def _evaluate(self) -> None:
        """Measure the mean loss of the validation data; every rank calls this together."""
        if self.trainer.validation is None:
            return
        plain = self.trainer.loader(self.trainer.validation)
        objective, device = self.step.objective, self.comm.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)

        def forward(batch: Any) -> torch.Tensor:
            return objective.loss_sum(self.step.model, batch, 0)

        modes = {module: module.training for module in self.step.model.modules()}
        self.step.model.eval()
        draws = Draws(torch.get_rng_state())
        loader = RankLoader(plain, self.comm, draws, has_spares=self._has_spares)
        for rows in loader:
            batch = Spare(rows) if loader.is_at_empty and self._has_spares else rows
            loss_sum = self.step.run.infer(batch, forward)
            totals[0] += 0 if loss_sum is None else loss_sum  # the last stage of a pipeline has it
            totals[1] += objective.num_valid(batch)
        for module, is_training in modes.items():  # some may be frozen in eval()
            module.training = is_training
        self.comm.all_reduce(totals[:1], "loss")
        self.comm.all_reduce(totals[1:], "data")
        self.records.evaluation(self.step.steps_done, float(totals[0] / totals[1].clamp(min=1)))

    def _checked(self) -> CollectiveCheck:
        return CollectiveCheck(self.comm, named=dict(self.step.model.named_parameters()))

    def _standing(self) -> checkpoint.Standing:
        return checkpoint.Standing(
            strategy=str(self.strategy),
            steps_done=self.step.steps_done,
            draws=self.draws.state,
            loaders=[self.loader.state()],
            schedulers=[] if self.scheduler is None else [self.scheduler],
        )

    def _note_saved(self, where: Path) -> None:
        """Have the run's end, and whoever ends it early, name a checkpoint."""
        self._saved = str(where)
        PULSE.saved(f"{where} stands; go on by: {self.resume_by}")

    def _save(self) -> Path:
        return checkpoint.save(self.saver, self.step.model, [self.optimizer], self._standing())

    def _resume(self) -> None:
        found = checkpoint.load(
            self.options.out, self.step.model, [self.optimizer], self._standing()
        )
        if found is None:
            raise CheckpointError(
                f"cannot go on from {self.options.out}: there is no checkpoint in it"
            )
        where, stood = found
        self._note_saved(where)
        self.step.steps_done, self.draws.state = stood.steps_done, stood.draws
        self.loader.set_state(stood.loaders[0])

    def _place(self) -> Place | None:
        number = self.step.run.microbatch
        rows = self.loader.rows[self._pieces(len(self.loader.rows))[number]]
        rows = rows if len(rows) else rows.new_zeros(1)  # of a spare row
        return Place(self.step.steps_done, rows, self._calls.setdefault(number, {}))

    def _count_flops(self, model: nn.Module) -> Flops | None:
        """Return the FLOPs of a global batch; None if they are not counted, or are not all."""
        is_stream = isinstance(self.trainer.data, IterableDataset)  # which may have no second pass
        if self.strategy.recompute.kind != "none" or is_stream:
            return None
        state = torch.get_rng_state()
        batch = next(iter(self.trainer.loader(self.trainer.data)), None)
        torch.set_rng_state(state)
        if batch is None or not tensors_of(batch):
            return None
        return flops_of(model, self.trainer.objective, batch)


class _OfSums:
    """An objective whose first losses are looked at: a mean would be off by its count.

    The loss of no rows is 0: as a mean, times their count, it would not be a number. What a stage
    of a pipeline gives the next, which some models return to the objective, is no loss.
    """

    def __init__(self, objective: Objective, *, has_stages: bool) -> None:
        self._objective = objective
        self._has_stages = has_stages
        self._is_checked = False

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> torch.Tensor:
        rows = microbatch.rows if isinstance(microbatch, Spare) else microbatch
        loss = self._objective.loss_sum(model, rows, step)
        if self._has_stages and loss.ndim > 0:
            return loss
        if not self._is_checked and torch.is_grad_enabled() and rows is microbatch:
            check_sum(loss, self._objective.num_valid(rows), "Objective.loss_sum")
            self._is_checked = True
        count = self.num_valid(microbatch)
        if not isinstance(count, torch.Tensor):  # filled in on the device: no copy is waited for
            count = loss.new_full((), count, dtype=torch.int64)
        return torch.where(to_device(count, loss.device) > 0, loss, 0.0)

    def num_valid(self, microbatch: Any) -> int | torch.Tensor:
        if isinstance(microbatch, Spare):
            return 0
        count = self._objective.num_valid(microbatch)
        check_count(count)
        return count


class Records:
    """Watches the steps on this rank; the first rank keeps and shows what is measured."""

    def __init__(self, run: Fit, console: Console | None = None) -> None:
        """Begin to watch; the first rank shows on `console`, standard output if None."""
        self._run = run
        comm = run.comm
        self.timer = StepTimer(comm.device)
        self.entries: list[Entry] = []
        self.memory: MemoryAccount | None = None
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, float]] = []
        self._mfu = Mfu(run.flops, comm)
        self._types = ProductTypes()
        self._watching = ExitStack()
        self.log: RunLog | None = None
        if comm.is_first:
            self.log = RunLog(run.options.out, console or Console(), run.num_steps)
            self.log.note("environment", environment())
            config = {"strategy": str(run.strategy), "steps": run.num_steps, "stages": run.stages}
            self.log.note("config", config)
            for line in run.stages:
                self.log.display.say(line)

    def __enter__(self) -> Records:
        watcher = self._run.step.watched(lambda name: self.timer.phase(TERMS[name]))
        self._watching.enter_context(watcher)
        if self._run.comm.device.type == "cpu":
            self._watching.enter_context(told_to(lambda _: self.timer.phase("communication")))
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        if self.log is not None:
            self.log.close()

    def take(self, step: Step, microbatches: list[Any]) -> StepResult:
        """Take a step, one of which is counted and one accounted for."""
        number = len(self.losses)
        self._mfu.look(microbatches)
        if number == 0:
            with self._types:
                result = step(microbatches)
        elif number == LEDGER_STEP:
            with Ledger(self._run.comm) as ledger, step.watched(ledger.phase):
                result = step(microbatches)
            self.entries = ledger.entries()
        elif number == MEMORY_STEP and not self._run.options.debug_comm:
            memory = MemoryLedger(step.model, step.optimizer, self._run.comm.device)
            with memory, step.watched(memory.phase):
                result = step(microbatches)
            self.memory = memory.account()
        else:
            result = step(microbatches)
        return result

    def keep(self, result: StepResult) -> None:
        """Keep the record of the step that has just been taken."""
        self.losses.append(result.loss)
        times = self.timer.end_step()
        if len(self.losses) == 1:
            self._measure_rate()
            self.timer.begin_step()  # without the measurement
        if self.log is not None:
            self.log.step(
                StepRecord(
                    step=self._run.step.steps_done,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=result.learning_rate,
                    tokens=result.num_valid_tokens,
                    tokens_per_s=result.num_valid_tokens / times.wall_s,
                    mfu=self._mfu.share(times.wall_s, self._run.loader.num_batch_rows),
                    times=times,
                    unit=self._run.trainer.unit,
                    skipped=result.is_skipped,
                )
            )

    def evaluation(self, steps_done: int, loss: float) -> None:
        """Keep a measurement on the validation data, which is no part of a step."""
        self.evaluations.append((steps_done, loss))
        self.timer.begin_step()
        if self.log is not None:
            self.log.evaluation(steps_done, loss)

    def result(self, saved: str, stop_signal: int) -> Fitted:
        """Return what the run has done."""
        times = [each.wall_s for each in list(self.timer.history)[WARMUP_STEPS:]]
        step_s = statistics.median(times) if times else None
        return Fitted(
            steps_done=self._run.step.steps_done,
            losses=self.losses,
            evaluations=self.evaluations,
            sent=self.entries,
            memory=self.memory,
            step_s=step_s,
            mfu=None if step_s is None else self._mfu.share(step_s),
            checkpoint=saved,
            stop_signal=stop_signal,
            resume_by=self._run.resume_by,
        )

    def _measure_rate(self) -> None:
        """Measure the rate of matrix products that the MFU is a share of; all ranks call this."""
        self._mfu.measure(self._types)
