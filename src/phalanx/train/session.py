"""One run on one rank: opened, stepped, saved and resumed alike for text and for any module.

    Session                opens a run, takes its data and saves its state
      TextSession          adds the decoder, the token stream, bits per byte (text.py)
        ServedSession      adds weights that are on servers (served_session.py)
      ModuleSession        adds a Trainer's module, DataLoader and schedule (script/session.py)

loop.py drives a session, and report/ measures it.
"""

from __future__ import annotations

import dataclasses
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import nn

from phalanx.account.flops import Flops
from phalanx.account.planned import PlannedStep
from phalanx.checkpoint.adapters import save_adapters
from phalanx.checkpoint.frozen import FrozenWeights
from phalanx.checkpoint.in_memory import pace_of
from phalanx.checkpoint.manifest import Checkpoint, Manifest, complete_checkpoints
from phalanx.checkpoint.run_state import RunState, Stateful
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Ranks
from phalanx.comm.together import on_first_rank
from phalanx.config import OptimizerConfig
from phalanx.config.schema import RunConfig
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.utilization import CountedFlops
from phalanx.models.decoder import Head
from phalanx.parallel.accumulate import Runner
from phalanx.parallel.compression.chosen import compress
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import blocks_of
from phalanx.strategy import Strategy
from phalanx.train.callback import CallbackRunner, Callbacks
from phalanx.train.evaluate import LOSS, BestTracker
from phalanx.train.job.request import log_of
from phalanx.train.job.run_folder import check_unused
from phalanx.train.notice import announce, notice_if_slow
from phalanx.train.objective import Objective
from phalanx.train.precision import Precision
from phalanx.train.step import Step, StepResult

RECOMPILE_LIMIT = 64
"""Most graphs that a block may be compiled to."""


class Stream(Protocol):
    """Data in the order of a run, which an iteration yields step by step; its position is saved.

    Each item is the list of this rank's microbatches, on its device.
    """

    @property
    def num_rows(self) -> int:
        """Rows of the latest global batch."""
        ...

    def __next__(self) -> Sequence[Any]: ...

    def close(self) -> None:
        """End the threads that read ahead."""


class Session(ABC):
    """A run on one rank; leaving its context waits for the last checkpoint.

    Attributes:
        comm: communicator of the job's ranks.
        strategy: parallel strategy.
        config: settings of the run.
        out: folder that the run writes to.
        start: checkpoint to resume from; None in a new run.
        plan: plan that splits the model.
        step: the training step.
        frozen: the weights that no step changes.
        stream: the data.
        saver: saver of the run's checkpoints.
        in_memory: saves in the memory of hosts; None if there are none.
        command: command line that resumes the run, without the folder; empty if it has none.
        unit: unit over which the loss is averaged, such as "tokens" or "samples".
        called: the callbacks.
        logs: functions that rank 0 calls with each record.
        best: tracker of the best evaluation; None if the run does not track it.
        global_rows: rows of the global batch, if the data ranks must divide them; else None.
    """

    command: str
    unit: str
    step_type: type[Step] = Step
    start: Checkpoint | None = None
    plan: Plan[Any]
    global_rows: int | None = None

    def __init__(
        self,
        strategy: Strategy,
        config: RunConfig,
        out: Path,
        extras: Callbacks,
        *,
        precision: Precision | None,
        objective: Objective,
        updates: OptimizerConfig,
        num_rated_steps: int | None,
    ) -> None:
        """Build model, step, saver and stream; load the checkpoint if the run resumes from one.

        `precision` None leaves the dtypes to the model. `updates` and `num_rated_steps` are the
        step's, see `Step`: how gradients are clipped, and the length of the learning rate's curve.

        Raises:
            PhalanxError: the strategy, a setting or the checkpoint does not fit.
        """
        self.strategy, self.config, self.out = strategy, config, out
        measure = config.save_policy.best or (None if config.patience is None else LOSS)
        self.best = None if measure is None else BestTracker(measure, config.patience)
        self.comm = Ranks(strategy.of_worker, config.device, shares_memory=config.shared_memory)
        named = log_of(config.log_to) if self.is_first else None
        self.logs = [log for log in (extras.log, named) if log is not None]
        # 1. Lock the folder, then check it: a run that has ended meanwhile may have saved there.
        # 2. Split the model, then make its optimizer, which gets this rank's shards.
        # 3. Call the callbacks, then load the checkpoint, which has their states.
        # 4. Compile the model as it then is; read data last, from the loaded position on.
        self.saver = self.locked()
        try:
            self.claim()
            runner, model = self.build(), self.plan.model
            how = (config.compress, self.plan.strategy, config.precision)
            announce(compress(runner.reducer, *how, is_resumed=self.start is not None))
            needs_scaler = precision is not None and precision.needs_scaler
            self.step = self.step_type(
                model,
                self.optimizer_of(model),
                objective,
                updates,
                comm=self.comm,
                num_steps=num_rated_steps,
                run=runner,
                scaler=torch.amp.GradScaler(config.device) if needs_scaler else None,
                nonfinite=config.nonfinite,
            )
            self.called = CallbackRunner(extras, model)
            self.frozen = FrozenWeights(model)
            self.register()
            if self.start is not None:
                with notice_if_slow(f"reading {self.start.folder}"):
                    self.state.load(self.start)
                self.step.steps_done = self.start.about.steps_done
            if config.compile:
                compile_blocks(model)
            self.stream = self.open_stream()
            self.in_memory = pace_of(
                *(self.out, config.memory_every, model, self.step.optimizer),
                *(self.step.steps_done, announce, self.comm.size("pp")),
            )
        except BaseException:
            self.saver.__exit__(None, None, None)  # release the lock
            raise

    # The parts of a session: __init__ calls these in this order.

    def locked(self) -> Saver:
        """Return the saver, which locks the folder of the run."""
        keep = self.config.save_policy.keep
        return Saver(self.out, keep=keep, num_stages=self.comm.size("pp"))

    def claim(self) -> None:
        """Check the folder now that it is locked: another run may have saved there meanwhile."""
        on_first_rank(lambda: check_unused(self.out, self.start), f"cannot save in {self.out}")

    @abstractmethod
    def build(self) -> Runner:
        """Set `plan`, split its model with the initial weights, and return the model's runner."""

    @abstractmethod
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the split model."""

    def register(self) -> None:
        """Register objects besides the callbacks, whose states a checkpoint has."""
        is_whole = self.strategy.pp.degree == 1
        self.called.registered.add_extra_state(self.step.model, is_whole=is_whole)

    @abstractmethod
    def open_stream(self) -> Stream:
        """Return the data, from the position of the checkpoint on."""

    @property
    def state(self) -> RunState:
        """The objects that a checkpoint has."""
        step = self.step
        return RunState(
            step.model, [step.optimizer], self.parts(), self.called.registered, self.frozen
        )

    def parts(self) -> dict[str, Stateful]:
        """Return the objects whose states the manifest of a checkpoint has, by name."""
        tracked: dict[str, Stateful] = {} if self.best is None else {"best": self.best}
        return {"scaler": self.step.scaler, **tracked}

    @abstractmethod
    def manifest(self, *, is_passing: bool) -> Manifest:
        """Return the manifest of a checkpoint after the latest step, without states."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the records and messages of the job."""
        return self.comm.is_first

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Optimizer steps of the whole run, including those before a resume."""

    # Methods for steps: loop.py calls them on all ranks together.

    def next_microbatches(self) -> Sequence[Any]:
        """Return this rank's microbatches of the next global batch, on its device."""
        return next(self.stream)

    @contextmanager
    def stepping(self) -> Generator[None]:
        """Wrap a step."""
        yield

    @property
    def may_stop(self) -> bool:
        """Whether a signal may end the run after the latest step."""
        return True

    def stepped(self) -> None:
        """Run the actions that follow a step, such as stepping a learning-rate scheduler."""
        return

    @abstractmethod
    def validation_batches(self) -> Iterable[Any] | None:
        """Return this rank's validation batches, on its device; None without validation data.

        Batches may have empty rows, or 0 rows, so that all ranks have equally many batches.
        """

    def scores(self, loss_sum: float) -> Mapping[str, float]:
        """Return further measures of an evaluation by name, computed from its loss sum."""
        del loss_sum
        return {}

    def begin_save(self, *, is_passing: bool = False) -> None:
        """Start to save a checkpoint in the background; for `is_passing` see `Manifest`.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """
        self.state.begin_save(self.saver, self.manifest(is_passing=is_passing))
        save_adapters(self.step.model, self.saver.run, self.comm.size("pp"))

    def save_in_memory(self) -> None:
        """Begin to save in memory if such a save is due after the latest step."""
        if (pace := self.in_memory) is None:
            return

        def begin() -> None:
            if self.best is not None:
                self.saver.finish()  # the disk has the best checkpoint that the state speaks of
            self.state.begin_save(pace.saver, self.manifest(is_passing=True))

        pace.after_step(self.step.steps_done, begin)

    @property
    def saved_steps(self) -> int:
        """Steps of the last checkpoint on the disk, read before the first step of this process.

        A process that replaces a lost one, which had not saved a due one, may be further.
        """
        if self.start is None or not self.start.is_in_memory:
            return self.step.steps_done
        return on_first_rank(lambda: max(complete_checkpoints(self.out), default=0), "cannot save")

    @property
    def is_behind(self) -> bool:
        """Whether the latest `begin_save` could not save, because other workers are a step ahead.

        False without parameter servers.
        """
        return False

    # Methods for records: report/ calls them.

    def num_units(self, result: StepResult) -> int:
        """Return the tokens or samples of a step over all ranks; see `unit`."""
        return result.num_valid_tokens

    @property
    def arithmetic(self) -> Arithmetic | None:
        """Arithmetic of the matrix products; None if it must be observed in the first step."""
        return None

    @abstractmethod
    def flops(
        self, num_rows: int | None = None
    ) -> tuple[Flops | CountedFlops, Flops | None] | None:
        """Return the FLOPs of a step on `num_rows` rows, by default on a full global batch.

        All ranks of `comm` are counted, with parameter servers only this worker.
        The first value counts attention as causal, the second as full. For a module, the first is
        the counted FLOPs and the second None. Return None if the FLOPs are not known.
        """

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, for its records."""
        return dataclasses.asdict(self.config)

    def missed(self) -> Mapping[int, StepResult]:
        """Return step -> result of steps that a lost process took, but did not record."""
        return {}

    def remarks(self) -> list[str]:
        """Return notices to show before the first step, a line each."""
        if self.start is None:
            return []
        return self.called.registered.remarks_on(self.start.about.registered)

    @abstractmethod
    def title(self) -> str:
        """Describe the run in a line or two."""

    @abstractmethod
    def planned(self) -> PlannedStep[Any] | None:
        """Return the planner's description of a step; None if the planner cannot model it."""

    def served_text(self) -> str | None:
        """Describe this worker's server traffic and gradient staleness; None without servers."""
        return None

    def sample(self) -> str:
        """Return text that the model generates, or an empty string; all ranks call this."""
        return ""

    def close(self) -> None:
        """Close the resources of the session, except the saver."""
        self.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        ends = ExitStack()
        if self.is_first or (is_under_torchrun() and read_rank_env().local_rank == 0):
            ends.callback(self.saver.upload)
        ends.callback(self.close)
        ends.push(self.saver)
        if self.in_memory is not None:
            ends.push(self.in_memory.saver)
        ends.__exit__(*error)  # the saver waits less if the error is a lost rank


def resume_text(out: Path, command: str, steps: int | None = None) -> str:
    """Return how to resume the run in `out`: `command` with the folder, or phalanx.Options."""
    if not command:
        return f"phalanx.Options(out={str(out)!r}, resume=True)"
    return f"{command} {shlex.quote(str(out))}" + ("" if steps is None else f" --steps {steps}")


def compile_blocks(model: nn.Module) -> None:
    """Compile each block and a decoder's loss, or a model without blocks as a whole.

    Each microbatch size gets its own graph (`dynamic=False`). A dynamic-shape graph may sum in
    another order than a static one, and which of them Dynamo uses for a batch depends on earlier
    batches, so a resumed run would not match bit for bit. There are few sizes, but each is compiled
    with and without gradients and documents; beyond RECOMPILE_LIMIT, Dynamo would run eagerly.
    """
    with suppress(ImportError):  # torch shows progress with tqdm if it is installed
        from tqdm import tqdm

        # Replace tqdm's lock, a system semaphore, which a rank that exits abruptly would leak.
        cast(Any, tqdm).set_lock(threading.RLock())
    dynamo_config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    for block in [block for _, block in blocks_of(model)] or [model]:
        block.compile(dynamic=False)
    for module in model.modules():
        if isinstance(module, Head):
            module.compiles_loss = True
