"""Train on a rank in the loop of `phalanx train`, and record steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.ledger import Phase, no_phase
from phalanx.data.rows import count_rows
from phalanx.train.evaluate import Evaluation
from phalanx.train.loop import Watcher, take_steps
from phalanx.train.session import Session
from phalanx.train.step import StepResult
from phalanx.verify.compare import Difference
from phalanx.verify.locate import locate, suspect_of
from phalanx.verify.record import Case, StepWitness, bits_of, full_tensors
from phalanx.verify.reference import History, evaluating
from phalanx.verify.settings import EVALUATION
from phalanx.verify.trace import Recorder
from phalanx.verify.verdict import Place, Whereabouts

Rows = Callable[[Any, Sequence[Any]], Sequence[Tensor]]
"""Function of (session, its latest microbatches) -> positions in the data of each one's rows."""


class SessionWitness(StepWitness, Watcher):
    """Watcher of the loop that records the steps and evaluations of a session."""

    def __init__(self, session: Session, rows: Rows) -> None:
        super().__init__(session.step)
        self.session = session
        self.last: Sequence[Any] = []
        self._rows = rows
        self._training = self._in_training()
        self._weights = self._bits_of_weights()
        held = {what: full_tensors(tensors, session.comm) for what, tensors in self.held().items()}
        self.history.begin[session.step.steps_done] = held

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Record the rows of a step, and modules that are no longer in training mode."""
        self._note_idle()
        self.last = microbatches
        rows = self._rows(self.session, microbatches)
        self.history.rows[self.step.steps_done] = [row for each in rows for row in each.tolist()]
        yield

    def keep(self, result: StepResult) -> None:
        """Record the step that has ended."""
        super().keep(result)
        self._weights = self._bits_of_weights()

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Record an evaluation, and whether it changed module modes or weights."""
        if evaluation is not None:
            self.history.evaluations[evaluation.step] = evaluation.loss
            self._note_idle()
        self.history.is_kept &= self._weights == self._bits_of_weights()

    def _in_training(self) -> set[str]:
        return {name for name, module in self.step.model.named_modules() if module.training}

    def _note_idle(self) -> None:
        self.history.idle += sorted(self._training - self._in_training())

    def _bits_of_weights(self) -> dict[Any, str]:
        # From the optimizer, which has the shards: a model under FSDP2 may have full parameters.
        groups = enumerate(self.step.optimizer.param_groups)
        named = {f"{at}.{n}": p for at, group in groups for n, p in enumerate(group["params"])}
        return bits_of("weight", {name: p.detach() for name, p in named.items()})


def take_down(session: Callable[[], Session], witness: Callable[[Any], SessionWitness]) -> History:
    """Train on this rank, together with the other ranks, and return the recorded history."""
    with Whereabouts() as at, session() as run:
        at.follow(run.step.model)
        seen = witness(run)
        with run.step.watched(seen.phase), run.step.watched(at.phase):
            take_steps(run, seen)
        seen.history.evaluated = float(evaluate(run, seen.last))
    return seen.history


def evaluate(session: Session, microbatches: Sequence[Any], phase: Phase = no_phase) -> Tensor:
    """Return the sum of the losses of all ranks in eval mode; every rank calls this together."""
    step = session.step
    total = torch.zeros((), dtype=torch.float64, device=session.comm.device)

    def forward(batch: Any) -> Tensor:
        with phase("forward"):
            return step.objective.loss_sum(step.model, batch, 0)

    with evaluating(step.model):
        for step.run.microbatch, microbatch in enumerate(microbatches):
            made = step.run.infer(microbatch, forward)
            total += 0 if made is None else made
    return session.comm.all_reduce(total, "loss")


def find(session: Callable[[], Session], rows: Rows, case: Case, first: Difference) -> Place:
    """Repeat the training on this rank, and return the place at which it goes wrong."""
    with session() as run:
        strategy, comm = run.strategy, run.comm
        watcher = _StepRecorder(run, rows, first)
        recorder = watcher.recorder
        with run.step.watched(recorder.phase):
            take_steps(run, watcher)
        if first.quantity == EVALUATION:
            recorder.restart()
            evaluate(run, watcher.last, recorder.phase)
        begin = sum(count_rows(batch) for batch in case.batches[: first.step])
        positions = [each.cpu() - begin for each in watcher.rows]
    return locate(case, strategy, comm, first, lambda _: (recorder, positions))


class _StepRecorder(Watcher):
    """Watcher of the loop that records the modules' tensors in the step of a difference."""

    def __init__(self, run: Session, rows: Rows, first: Difference) -> None:
        copies, suspect = run.strategy.tp.degree == 1, suspect_of(first)
        self.recorder = Recorder(run.step.model, run.step.run, copies=copies, suspect=suspect)
        self.rows: Sequence[Tensor] = []
        self.last: Sequence[Any] = []
        self._run, self._rows_of, self._first = run, rows, first

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Record the step if it is the one that differs."""
        self.last = microbatches
        if self._run.step.steps_done == self._first.step:
            self.rows = self._rows_of(self._run, microbatches)
            if self._first.quantity != EVALUATION:
                self.recorder.restart()
        yield
        self.recorder.is_on = False
