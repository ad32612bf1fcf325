r"""The interface between the training loop and records, and the text or module that is trained.

        TextSession (train/text.py)        ModuleSession (script/session.py)
           a decoder on text                  a Trainer of any module
                     \                          /
take_steps (loop.py)  -------- Session -------  Records, Summary (report/)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from phalanx.account.flops import Flops
from phalanx.account.planned import PlannedStep
from phalanx.checkpoint.run_state import RunState, Stateful
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Ranks
from phalanx.config.schema import RunConfig
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.utilization import CountedFlops
from phalanx.strategy import Strategy
from phalanx.train.best import BestTracker
from phalanx.train.callback import CallbackRunner, Log
from phalanx.train.step import Step, StepResult


class Session(ABC):
    """A run on one rank; leaving its context waits for the last checkpoint.

    Attributes:
        comm: communicator of the job's ranks.
        strategy: parallel strategy.
        config: settings of the run.
        out: folder that the run writes to.
        step: the training step.
        saver: saver of the run's checkpoints.
        unit: unit over which the loss is averaged, such as "tokens" or "samples".
        called: the callbacks.
        log: logger that is called with each record; None without one.
        best: tracker of the best evaluation; None if the run does not track it.
    """

    comm: Ranks
    strategy: Strategy
    config: RunConfig
    out: Path
    step: Step
    saver: Saver
    unit: str
    called: CallbackRunner
    log: Log | None
    best: BestTracker | None

    @property
    def state(self) -> RunState:
        """The objects that a checkpoint has."""
        parts: dict[str, Stateful] = {"scaler": self.step.scaler, **self.parts()}
        if self.best is not None:
            parts["best"] = self.best
        step = self.step
        return RunState(step.model, [step.optimizer], parts, self.called.registered)

    def parts(self) -> Mapping[str, Stateful]:
        """Return objects of this kind of session that a checkpoint has, by name."""
        return {}

    @contextmanager
    def opening(self) -> Generator[None]:
        """Release the lock of the run's folder if the block, which opens the session, raises."""
        try:
            yield
        except BaseException:
            self.saver.__exit__(None, None, None)
            raise

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the records and messages of the job."""
        return self.comm.is_first

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Optimizer steps of the whole run, including those before a resume."""

    # Methods for steps: loop.py calls them on all ranks together.

    @abstractmethod
    def next_microbatches(self) -> Sequence[Any]:
        """Return this rank's microbatches of the next global batch, on its device."""

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

    @abstractmethod
    def begin_save(self, *, is_passing: bool = False) -> None:
        """Start to save a checkpoint in the background; for `is_passing` see `Manifest`.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """

    @property
    def saved_steps(self) -> int:
        """Steps of the last checkpoint, read before the first step of this process.

        With parameter servers this process may replace a lost one that had not saved a due one.
        """
        return self.step.steps_done

    @property
    def is_behind(self) -> bool:
        """Whether the latest `begin_save` could not save, because other workers are a step ahead.

        False without parameter servers.
        """
        return False

    # Methods for records: report/ calls them.

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the latest global batch."""

    def num_units(self, result: StepResult) -> int:
        """Return the tokens or samples of a step over all ranks; see `unit`."""
        return result.num_valid_tokens

    @property
    @abstractmethod
    def arithmetic(self) -> Arithmetic | None:
        """Arithmetic of the matrix products; None if it must be observed in the first step."""

    @abstractmethod
    def flops(
        self, num_rows: int | None = None
    ) -> tuple[Flops | CountedFlops, Flops | None] | None:
        """Return the FLOPs of a step on `num_rows` rows, by default on a full global batch.

        All ranks of `comm` are counted, with parameter servers only this worker.
        The first value counts attention as causal, the second as full. For a module, the first is
        the counted FLOPs and the second None. Return None if the FLOPs are not known.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, for its records."""

    def missed(self) -> Mapping[int, StepResult]:
        """Return step -> result of steps that a lost process took, but did not record."""
        return {}

    def remarks(self) -> list[str]:
        """Return notices to show before the first step, a line each."""
        return []

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

    def companions(self) -> Mapping[str, Path]:
        """Return files of the run besides checkpoints and records, by name."""
        return {}

    @abstractmethod
    def resume_command(self, steps: int | None = None) -> str:
        """Return the command or Python code that resumes the run, up to `steps` steps if given."""

    def close(self) -> None:
        """Close the resources of the session, except the saver."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        ends = ExitStack()
        ends.callback(self.close)
        ends.push(self.saver)
        ends.__exit__(*error)  # the saver waits less if the error is a lost rank
