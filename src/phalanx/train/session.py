r"""What one rank trains with, whatever it trains: the loop and the records know only this.

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
from phalanx.checkpoint.saver import Saver
from phalanx.comm.comm import Ranks
from phalanx.config.schema import RunConfig
from phalanx.measure.peaks import Arithmetic
from phalanx.measure.utilization import CountedFlops
from phalanx.planner.planned import PlannedStep
from phalanx.strategy import Strategy
from phalanx.train.best import Best
from phalanx.train.callback import Called, Log
from phalanx.train.step import Step, StepResult


class Session(ABC):
    """A run on one rank; as a context it ends with the last checkpoint on the disk.

    Attributes:
        comm: the ranks.
        strategy: how the work is split.
        config: how the run is carried out.
        out: folder that the run writes to.
        step: takes the steps.
        saver: saves the checkpoints.
        unit: what the mean loss is over: "tokens" or "samples", say.
        called: the callbacks.
        log: is given each record, if it is set.
        best: judges the evaluations; None if they are not judged.
    """

    comm: Ranks
    strategy: Strategy
    config: RunConfig
    out: Path
    step: Step
    saver: Saver
    unit: str
    called: Called
    log: Log | None
    best: Best | None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.comm.is_first

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Optimizer steps of the whole run, those before a resume too."""

    # The steps: loop.py calls these on all ranks together.

    @abstractmethod
    def next_microbatches(self) -> Sequence[Any]:
        """Return this rank's microbatches of the next global batch, on its device."""

    @contextmanager
    def stepping(self) -> Generator[None]:
        """Look at the step that is taken inside."""
        yield

    @property
    def may_stop(self) -> bool:
        """Whether a signal may end the run after the step that was taken last."""
        return True

    def stepped(self) -> None:
        """Do what follows a step, such as to move a schedule."""
        return

    @abstractmethod
    def validation_batches(self) -> Iterable[Any] | None:
        """Return this rank's batches of the validation data, on its device; None if there is none.

        An iterator over them may yield as many as other ranks have.
        """

    def scores(self, loss_sum: float) -> Mapping[str, float]:
        """Return measures of an evaluation beside its mean loss, by name."""
        del loss_sum
        return {}

    @abstractmethod
    def begin_save(self, *, is_passing: bool = False) -> None:
        """Begin to save a checkpoint, one that the next replaces if it `is_passing`.

        The run continues meanwhile.

        Raises:
            CheckpointError: the one before could not be written.
        """

    # The records: report/ asks these.

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the global batch that was taken last."""

    def num_units(self, result: StepResult) -> int:
        """Return how many tokens or samples a step took over all ranks; see `unit`."""
        return result.num_valid_tokens

    @property
    @abstractmethod
    def arithmetic(self) -> Arithmetic | None:
        """The data type of the products; None where the first step has to show it."""

    @abstractmethod
    def flops(
        self, num_rows: int | None = None
    ) -> tuple[Flops | CountedFlops, Flops | None] | None:
        """Return the FLOPs of a step of this number of rows, of a full global batch if None.

        Those with causal and with full attention; of a module the counted ones alone. None if they
        are not known.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, for its records."""

    def remarks(self) -> list[str]:
        """Return what a person should see before the first step, a line each."""
        return []

    @abstractmethod
    def title(self) -> str:
        """Describe the run in a line or two."""

    @abstractmethod
    def planned(self) -> PlannedStep | None:
        """Return a step of the run as the planner knows it; None if it cannot be counted."""

    def served_text(self) -> str | None:
        """Return what this worker sent servers, and how late; None without servers."""
        return None

    def sample(self) -> str:
        """Return text that the model writes; empty if it writes none. All ranks call this."""
        return ""

    def companions(self) -> Mapping[str, Path]:
        """Return files beside checkpoint and records, by name."""
        return {}

    @abstractmethod
    def resume_command(self, steps: int | None = None) -> str:
        """Return the command, or the Python, that resumes the run; for this number of steps."""

    def close(self) -> None:
        """Let go of what the session has open beside its saver."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        ends = ExitStack()
        ends.callback(self.close)
        ends.push(self.saver)
        ends.__exit__(*error)  # the saver waits for less after an error of another rank
