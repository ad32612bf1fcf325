"""The training loop for text and for any module: step, evaluate, save."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.checkpoint import manifest
from phalanx.comm.together import barrier
from phalanx.debug.check import LIMIT_S, CollectiveCheck
from phalanx.errors import CheckpointError, StoreError
from phalanx.launch import rank_log
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import JobReport, is_restarted, launched
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.notice import compiling
from phalanx.train.pace import StopAndSaveSync
from phalanx.train.report.records import Records
from phalanx.train.report.summary import Summary, summarize_run
from phalanx.train.session import Session, resume_text
from phalanx.train.step import StepResult


@dataclass(frozen=True)
class Stopped:
    """The result of a run that a signal has ended between two steps, with a checkpoint.

    Attributes:
        signum: number of the signal.
        words: message with the steps done and the command that resumes the run.
    """

    signum: int
    words: str


def train(session: Session) -> Summary | Stopped:
    """Train on this rank, together with the other ranks of the job."""
    step = session.step
    PULSE.advice = functools.partial(how_to_resume, session.out, session.command)
    logged = rank_log.kept(session.out, session.comm.rank)
    with session, logged, Records(session) as records:
        if session.is_first and (job := launched()) is not None:
            run = str(session.out.absolute())
            about = JobReport(
                strategy=str(session.strategy), run=run, global_rows=session.global_rows
            )
            about.write(job.folder)
        doing = PULSE.doing("the work between two steps")
        with doing, PULSE.handling_stop(), _checked(session), step.watched(PULSE.phase):
            try:
                stop_signal = take_steps(session, records)
            except CheckpointError as error:  # of a save
                error.add_note(PULSE.advice())
                raise
        if stop_signal:
            done = f"step {step.steps_done} of {session.num_steps} is done"
            outcome = Stopped(stop_signal, f"{done}; {PULSE.advice()}")
        else:
            with PULSE.doing("the summary"):
                outcome = summarize_run(records)
    # Exit together: rank 0 writes longer than the others, and hosts the store by which they save.
    barrier()
    return outcome


def how_to_resume(out: Path, command: str) -> str:
    """Return a message with the last checkpoint of a run, and how to resume; see `resume_text`."""
    try:
        checkpoints = manifest.complete_checkpoints(out)
    except StoreError as error:
        return str(error)
    if not checkpoints:
        return f"there is no checkpoint in {out} yet"
    last = checkpoints[max(checkpoints)]
    return f"last checkpoint: {last}; resume by: {resume_text(out, command)}"


class Watcher(Protocol):
    """Observer that the loop notifies of steps and evaluations; does nothing by default."""

    @contextmanager
    def watching_data(self) -> Generator[None]:
        """Wrap the loading of a step's data."""
        yield

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Wrap a step over this rank's microbatches."""
        yield

    def keep(self, result: StepResult) -> None:
        """Receive the result of the step."""

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Receive the latest evaluation; None without validation data."""

    def saved(self) -> None:
        """Note that a checkpoint has begun since the latest step."""

    def gather(self) -> None:
        """Gather from all ranks what has been recorded since the last call; all ranks call it."""


def take_steps(session: Session, records: Watcher) -> int:
    """Take all steps, evaluate and save; return the signal that stopped the loop early, or 0."""
    step, config, num_steps = session.step, session.config, session.num_steps
    policy = config.save_policy
    pace = StopAndSaveSync(policy, session.is_first)
    is_over = session.best is not None and session.best.is_over
    is_unsaved = False  # the run ends once a checkpoint could be saved
    if not is_restarted() or step.steps_done >= num_steps:  # else the next step comes first
        with compiling(config.compile):
            _evaluate(session, records)
    saved = session.saved_steps
    if policy.num_due(saved, step.steps_done, num_steps):
        saved = _begin_save(session, pace, saved, is_passing=False)
    while step.steps_done < num_steps and not is_over:
        if pace.stop_signal and session.may_stop:
            break
        with PULSE.doing(f"data of step {step.steps_done + 1}"):
            with records.watching_data():
                microbatches = session.next_microbatches()
            with records.watching(microbatches), session.stepping():
                result = step(microbatches)
            session.stepped()
            records.keep(result)
        PULSE.steps_done = done = step.steps_done
        session.saver.poll()
        session.save_in_memory()
        pace.after_step(can_save=not session.saver.is_writing)
        if pace.has_compared:
            records.gather()
        # due after a step       evaluate          save
        # last step, end asked   yes               for good
        # eval_every             unless a signal   if the best so far: until the next save
        # `every` of save                          for good
        # clock, signal                            until the next save
        is_over = session.called.step(done, result) or is_unsaved or done == num_steps
        is_best, earlier = False, session.best and session.best.state_dict()
        is_eval_due = config.eval_every > 0 and done % config.eval_every == 0
        if is_over or (is_eval_due and not pace.stop_signal):
            is_best, is_asked = _evaluate(session, records)
            is_over = is_over or is_asked
        is_saved = is_over or policy.num_due(saved, done, num_steps) > 0
        is_passing = is_best or pace.is_save_due or pace.stop_signal > 0
        if is_saved or is_passing:
            saved = _begin_save(session, pace, saved, is_passing=not is_saved)
            records.saved()
            if is_best and session.best and earlier and session.is_behind:
                session.best.load_state_dict(earlier)  # no checkpoint has the weights it measured
            is_unsaved = is_over and session.is_behind and done < num_steps
            is_over = is_over and not is_unsaved
    with PULSE.doing("writing the last checkpoint"):
        session.saver.finish()
    records.gather()
    return 0 if is_over else pace.stop_signal


def _begin_save(session: Session, pace: StopAndSaveSync, saved: int, *, is_passing: bool) -> int:
    """Begin a checkpoint; return its steps, or `saved` if other workers are a step ahead."""
    with PULSE.doing(f"beginning the checkpoint after step {session.step.steps_done}"):
        session.begin_save(is_passing=is_passing)
    if session.is_behind:
        return saved
    pace.saved()
    return session.step.steps_done


def _evaluate(session: Session, records: Watcher) -> tuple[bool, bool]:
    """Evaluate; return whether it is the best so far, and whether it ends the run."""
    with PULSE.doing(f"evaluation after step {session.step.steps_done}"):
        records.evaluation(found := evaluate(session))
        if found is None:
            return False, False
        is_asked = session.called.evaluation(found)
    is_best = session.best is not None and session.best.take(found)
    return is_best, is_asked or (session.best is not None and session.best.is_over)


@contextmanager
def _checked(session: Session) -> Generator[None]:
    """Compare the collectives of the ranks if `debug_comm` is set."""
    config = session.config
    if not config.debug_comm:
        yield
        return
    collectives = CollectiveCheck(
        session.comm,
        named=dict(session.step.model.named_parameters()),
        limit_s=min(LIMIT_S, config.timeout_s),
    )

    def phase(name: str) -> AbstractContextManager[None]:
        return collectives.phase(f"{name} of step {session.step.steps_done + 1}")

    with collectives, session.step.watched(phase):
        yield
