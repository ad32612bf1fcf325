"""Train a job on a rank in the trainer's own loop, and take down what happens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.comm.comm import Ranks, local_shard
from phalanx.data.rows import count_rows
from phalanx.script.session import ModuleSession
from phalanx.strategy import Strategy
from phalanx.train.evaluate import Evaluation
from phalanx.train.loop import Watcher, take_steps
from phalanx.train.step import StepResult
from phalanx.verify.compare import Difference
from phalanx.verify.locate import Recorded, locate, suspect_of
from phalanx.verify.record import (
    BitsKey,
    Case,
    RankFacts,
    bits_of,
    full_tensors,
    gradients_of,
)
from phalanx.verify.reference import StepRecord, Values, kept_by
from phalanx.verify.settings import EVALUATION
from phalanx.verify.trace import Recorder
from phalanx.verify.verdict import Place
from phalanx.verify.whereabouts import Whereabouts

if TYPE_CHECKING:
    from phalanx.script.trainer import Options, Trainer


@dataclass
class Witnessed:
    """What a rank has done; full tensors are the first rank's alone.

    Attributes:
        begin: weights, buffers and what the optimizer keeps, before the first step taken.
        records: of each step, by its number.
        facts: what all ranks must agree on, by the number of the step.
        evaluations: validation losses, by the steps done.
        idle: modules that an evaluation has left in eval mode.
        evaluated: sum of the losses of this rank's rows of the last batch, in eval mode.
    """

    begin: StepRecord
    records: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    facts: dict[int, RankFacts] = field(default_factory=dict[int, RankFacts])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    idle: list[str] = field(default_factory=list[str])
    evaluated: float = 0.0


def witness(trainer: Trainer, strategy: Strategy, options: Options) -> Witnessed:
    """Train on this rank, with the others of the job, and return what happened."""
    with Whereabouts() as at, ModuleSession(trainer, strategy, options) as run:
        at.follow(run.step.model)
        seen = Witness(run)
        with run.step.watched(seen.phase), run.step.watched(at.phase):
            take_steps(run, seen)
        seen.seen.evaluated = float(evaluate(run, seen.last))
    return seen.seen


class Witness(Watcher):
    """Takes down what can be compared, in place of a run's records.

    Attributes:
        seen: all of it.
        last: microbatches of the last step.
    """

    def __init__(self, run: ModuleSession) -> None:
        self.run = run
        self.last: Sequence[Any] = []
        self._training = {n for n, m in run.step.model.named_modules() if m.training}
        self._gradients: dict[str, Tensor] = {}
        self._rates: dict[str, float] = {}
        self.seen = Witnessed(self._full(self._held()))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Take down gradients before they are clipped, and the rates of the update."""
        if name == "clip":
            self._gradients = {n: g.clone() for n, g in gradients_of(self.run.step.model).items()}
        elif name == "optimizer":
            groups = enumerate(self.run.optimizer.param_groups)
            self._rates = {str(n) if n else "": float(group["lr"]) for n, group in groups}
        yield

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Note the microbatches of a step."""
        self._note_idle()
        self.last = microbatches
        yield

    def keep(self, result: StepResult) -> None:
        """Take down the step that has just been taken."""
        number = self.run.step.steps_done - 1
        held: dict[str, dict[str, Tensor]] = {"gradient": self._gradients, **self._held()}
        norms = {"2": result.grad_norm}
        bits: dict[BitsKey, str] = {}
        for quantity, tensors in held.items():
            bits |= bits_of(quantity, tensors)
        finite = {n: bool(local_shard(g).isfinite().all()) for n, g in self._gradients.items()}
        nonfinite = [name for name, is_finite in finite.items() if not is_finite]
        self.seen.facts[number] = RankFacts(result.loss, norms, bits, nonfinite)
        numbers = {"loss": {"": result.loss}, "norm": norms, "learning rate": self._rates}
        self.seen.records[number] = {**numbers, **self._full(held)}

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Take down an evaluation, and what it leaves."""
        if evaluation is not None:
            self.seen.evaluations[evaluation.step] = evaluation.loss
            self._note_idle()

    def _note_idle(self) -> None:
        now = {name for name, module in self.run.step.model.named_modules() if module.training}
        self.seen.idle += sorted(self._training - now)

    def _held(self) -> dict[str, dict[str, Tensor]]:
        model, states = self.run.step.model, self.run.optimizer.state
        named = dict(model.named_parameters())
        kept = kept_by({name: states[p] for name, p in named.items() if p in states})
        weights = {name: p.detach() for name, p in named.items()}
        return {"buffer": dict(model.named_buffers()), **kept, "weight": weights}

    def _full(self, held: dict[str, dict[str, Tensor]]) -> dict[str, Values]:
        full = {what: full_tensors(tensors, self.run.comm) for what, tensors in held.items()}
        return dict(full) if self.run.comm.is_first else {}


def evaluate(
    run: ModuleSession, microbatches: Sequence[Any], recorder: Recorder | None = None
) -> Tensor:
    """Return the sum of the losses of all ranks in eval mode; every rank calls this together."""
    total = torch.zeros((), dtype=torch.float64, device=run.comm.device)
    modes = {module: module.training for module in run.step.model.modules()}

    def forward(batch: Any) -> Tensor:
        if recorder is None:
            return run.step.objective.loss_sum(run.step.model, batch, 0)
        with recorder.phase("forward"):
            return run.step.objective.loss_sum(run.step.model, batch, 0)

    run.step.model.eval()
    for run.step.run.microbatch, microbatch in enumerate(microbatches):
        made = run.step.run.infer(microbatch, forward)
        total += 0 if made is None else made
    for module, is_training in modes.items():
        module.training = is_training
    return run.comm.all_reduce(total, "loss")


def locate_rank(
    trainer: Trainer, strategy: Strategy, options: Options, case: Case, first: Difference
) -> Place:
    """Train again on this rank, and find the module at which it goes wrong."""

    def record(first: Difference) -> Recorded:
        with ModuleSession(trainer, strategy, options) as run:
            found = _Pointer(run, first)
            with run.step.watched(found.phase):
                take_steps(run, found)
            if first.quantity == EVALUATION:
                found.recorder.restart()
                evaluate(run, found.last, found.recorder)
        begin = sum(count_rows(batch) for batch in case.batches[: first.step])
        return found.recorder, [rows - begin for rows in found.rows]

    return locate(case, strategy, Ranks(strategy, options.device), first, record)


class _Pointer(Witness):
    """Has one step recorded."""

    def __init__(self, run: ModuleSession, first: Difference) -> None:
        super().__init__(run)
        copies, suspect = run.strategy.tp.degree == 1, suspect_of(first)
        self.recorder = Recorder(run.step.model, run.step.run, copies=copies, suspect=suspect)
        self._first = first
        self.rows: list[Tensor] = []

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Record a phase of a step."""
        with self.recorder.phase(name), super().phase(name):
            yield

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Record a step if it is the one."""
        is_it = self.run.step.steps_done == self._first.step
        if is_it:
            self.rows = list(self.run.microbatches.rows())
        if is_it and self._first.quantity != EVALUATION:
            self.recorder.restart()
        with super().watching(microbatches):
            yield
        self.recorder.is_on = False
