"""Train on a rank in the loop of `phalanx train`, and take down what happens."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.comm import Ranks, local_shard
from phalanx.data.batch import Batch
from phalanx.train.evaluate import Evaluation
from phalanx.train.job.resolve import Job
from phalanx.train.loop import Watcher, take_steps
from phalanx.train.objective import Objective
from phalanx.train.step import StepResult
from phalanx.train.text import TextSession
from phalanx.verify.compare import Difference
from phalanx.verify.history import History
from phalanx.verify.locate import Recorded, locate, suspect_of
from phalanx.verify.record import Case, full_tensors, gradients_of, state_of
from phalanx.verify.reference import MOMENTS, StepRecord
from phalanx.verify.trace import Recorder
from phalanx.verify.verdict import Place
from phalanx.verify.whereabouts import Whereabouts


def train_rank(job: Job) -> History:
    """Train on this rank, and return what happened."""
    with Whereabouts() as at:
        session = TextSession(job)
        with session:
            witness = Witness(session)
            at.follow(session.model)
            with session.step.watched(witness.phase), session.step.watched(at.phase):
                take_steps(session, witness)
    return witness.history


class Witness(Watcher):
    """Takes down what the loop does as a `history`, in place of a run's records."""

    def __init__(self, session: TextSession) -> None:
        self._session = session
        self._gradients: dict[str, Tensor] = {}
        self._weights = self._shards()
        self.history = History(self._state())
        session.step.objective = _Noting(session.step.objective, self.history.rows)
        for block in session.model.blocks:  # those of other stages are never called
            block.register_forward_hook(self._note_output)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Take down the gradients once they are reduced, before they are clipped."""
        if name == "clip":
            self._gradients = full_tensors(gradients_of(self._session.model), self._session.comm)
        yield

    def keep(self, result: StepResult) -> None:
        """Take down a step."""
        step, model = self._session.step, self._session.model
        self.history.records[step.steps_done - 1] = {
            "loss": {"": result.loss},
            "gradient": self._gradients if self._session.is_first else {},
            "norm": {f"{step.config.clip_p:g}": result.grad_norm},
            "learning rate": {"": result.learning_rate},
            "buffer": {},  # a decoder has none
            **self._state(),
        }
        self._weights = self._shards()
        state = state_of(model, step.optimizer)
        kept = {
            "weights": state["weight"],
            "gradients": gradients_of(model),
            "moments": {(what, name): t for what in MOMENTS for name, t in state[what].items()},
        }
        for what, tensors in kept.items():
            self.history.dtypes[what] = {str(tensor.dtype) for tensor in tensors.values()}

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Take down an evaluation, and what it leaves."""
        history, done = self.history, self._session.step.steps_done
        history.consumed[done] = self._session.loader.consumed
        if evaluation is not None:
            history.evaluations[done] = evaluation.loss
        history.is_training &= self._session.model.training
        history.is_kept &= all(map(torch.equal, self._weights, self._shards()))

    def _shards(self) -> list[Tensor]:
        return [local_shard(p).detach().clone() for p in self._session.model.parameters()]

    def _state(self) -> StepRecord:
        """Gather weights and moments for rank 0; every rank calls this together."""
        state = state_of(self._session.model, self._session.step.optimizer)
        full = {what: full_tensors(tensors, self._session.comm) for what, tensors in state.items()}
        return full if self._session.is_first else {}

    def _note_output(self, module: nn.Module, args: object, output: Tensor) -> None:
        del module, args
        self.history.dtypes.setdefault("output of a block", set()).add(str(output.dtype))


@dataclass(frozen=True)
class _Noting(Objective):
    """An objective that notes the rows that it computes on in training."""

    inner: Objective
    rows: dict[int, list[list[int]]]

    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        if torch.is_grad_enabled():
            self.rows.setdefault(step, []).append(microbatch.rows_B.tolist())
        return self.inner.loss_sum(model, microbatch, step)

    def num_valid(self, microbatch: Batch) -> int | Tensor:
        return self.inner.num_valid(microbatch)


def locate_rank(job: Job, case: Case, first: Difference) -> Place:
    """Take the run again on this rank, and find the module at which a step goes wrong."""
    comm = Ranks(job.strategy, job.device)
    return locate(case, job.strategy, comm, first, functools.partial(_record_step, job, case))


def _record_step(job: Job, case: Case, first: Difference) -> Recorded:
    session, step = TextSession(job), first.step
    copies, suspect = job.strategy.tp.degree == 1, suspect_of(first)
    recorder = Recorder(session.model, session.step.run, copies=copies, suspect=suspect)
    rows: dict[int, list[list[int]]] = {}
    session.step.objective = _Noting(session.step.objective, rows)
    with session, session.step.watched(recorder.phase):
        take_steps(session, _Pointer(session, recorder, step))
    begin = int(case.batches[step].rows_B[0])
    return recorder, [torch.tensor(each) - begin for each in rows[step]]


@dataclass(frozen=True)
class _Pointer(Watcher):
    """Has one step of the loop recorded."""

    session: TextSession
    recorder: Recorder
    step: int

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        del microbatches
        if self.session.step.steps_done == self.step:
            self.recorder.restart()
        yield
        self.recorder.is_on = False
