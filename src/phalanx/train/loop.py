"""The main job: train a decoder, measure it, evaluate it, save it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from phalanx.checkpoint import manifest
from phalanx.comm.together import barrier, on_first_rank
from phalanx.config import TrainConfig
from phalanx.config.fields import Use, keys_for, value_at
from phalanx.config.law import check
from phalanx.data.survey import Progress
from phalanx.debug.check import LIMIT_S, CollectiveCheck
from phalanx.errors import Interrupted, TrainingError
from phalanx.launch import slurm
from phalanx.launch.local import run_ranks
from phalanx.launch.pulse import PULSE
from phalanx.launch.torchrun import is_under_torchrun, run_here
from phalanx.train.evaluate import evaluate
from phalanx.train.job.resolve import Job, manifest_of, resolve
from phalanx.train.job.run_folder import claim
from phalanx.train.pace import Decision, Pace
from phalanx.train.precision import resolve as resolve_precision
from phalanx.train.report.records import Records
from phalanx.train.report.summary import Summary, summarize_run
from phalanx.train.session import Session, open_session

Announce = Callable[[Job], None]
"""Told the job before its first step."""


def train(
    config: TrainConfig, announce: Announce | None = None, progress: Progress | None = None
) -> Summary:
    """Train as `config` says: start the processes, or join those that torchrun started.

    Args:
        config: see `TrainConfig`; its defaults are the demo.
        announce: called once in the whole job, under torchrun by rank 0.
        progress: called now and then while the data is prepared.

    Returns:
        What was measured.

    Raises:
        PhalanxError: the configuration, the data or the run is at fault.
    """
    check(config)
    slurm.adopt()
    if is_under_torchrun():
        return run_here(
            lambda: resolve(config, progress),
            facts_of,
            functools.partial(_train_here, announce),
            device=config.device,
            threads=config.threads,
            timeout_s=config.timeout_s,
        )
    job = resolve(config, progress)
    if announce is not None:
        announce(job)
    return start(job)


def start(job: Job) -> Summary:
    """Start the ranks of a resolved job on this host and wait for the summary.

    Raises:
        PhalanxError: the run is at fault.
        Interrupted: a signal ended it; it has saved a checkpoint if it was given the time.
    """
    job = claim(job)
    try:
        outcome: Summary | Stopped = run_ranks(
            train_rank,
            job.strategy.num_ranks,
            job,
            device=job.device,
            threads=job.config.threads,
            timeout_s=job.config.timeout_s,
        )[0]
    except Interrupted as error:
        _restore_terminal()
        raise Interrupted(error.signum, how_to_go_on(job.out)) from None
    except TrainingError as error:
        _restore_terminal()
        error.add_note(how_to_go_on(job.out))
        raise
    except BaseException:
        _restore_terminal()
        raise
    return _summary_of(job, outcome)


def _restore_terminal() -> None:
    # The display of rank 0 hides the terminal's cursor; a rank that is ended leaves it so.
    console = Console()
    if console.is_terminal:
        console.show_cursor(True)
        console.print()  # what comes next does not go on in the line of the display


@dataclass(frozen=True)
class Stopped:
    """A run that a signal has ended between two steps, with a checkpoint.

    Attributes:
        signum: number of the signal.
        steps_done: steps that the checkpoint is after.
    """

    signum: int
    steps_done: int


def _summary_of(job: Job, outcome: Summary | Stopped) -> Summary:
    if isinstance(outcome, Stopped):
        done = f"step {outcome.steps_done} of {job.num_steps} is done"
        raise Interrupted(outcome.signum, f"{done}; {how_to_go_on(job.out)}")
    return outcome


def how_to_go_on(out: Path) -> str:
    """Say which checkpoint of a run stands, and how to go on from it."""
    checkpoints = manifest.whole(out)
    if not checkpoints:
        return f"there is no checkpoint in {out} yet"
    return f"{checkpoints[max(checkpoints)]} stands; go on by: phalanx train --resume {out}"


def train_rank(job: Job) -> Summary | Stopped:
    """Train on this rank, with the others of the job."""
    session = open_session(job)
    step = session.step
    with session.loader, session.saver, Records(session, Console()) as records:
        doing = PULSE.doing("the work between two steps")
        with doing, PULSE.heeding(), _checked(session), step.watched(PULSE.phase):
            stop_signal = _take_steps(session, records)
        if stop_signal and step.steps_done < job.num_steps:
            return Stopped(stop_signal, step.steps_done)
        with PULSE.doing("the summary"):
            summary = summarize_run(records)
    barrier()  # rank 0 writes for longer than the others; all return together
    return summary


def _take_steps(session: Session, records: Records) -> int:
    """Take all steps, evaluate and save; return the signal that ended them early, or 0."""
    step, config, num_steps = session.step, session.job.config, session.job.num_steps
    pace = Pace(60 * config.save_every_minutes, session.is_first)
    _evaluate(session, records)
    decision = Decision()
    while step.steps_done < num_steps and not decision.stop_signal:
        with PULSE.doing(f"data of step {step.steps_done + 1}"):
            with records.watching_data():
                microbatches = [batch.to(session.device) for batch in next(session.loader)]
            with records.watching():
                result = step(microbatches)
            records.keep(result)
        PULSE.steps_done = done = step.steps_done
        session.saver.poll()
        decision = pace.after_step(can_save=not session.saver.is_writing)
        is_last = done == num_steps
        is_saved = is_last or _is_due(done, config.save_every)
        is_passing = not is_saved and (decision.is_save_due or decision.stop_signal > 0)
        if is_last or (_is_due(done, config.eval_every) and not decision.stop_signal):
            _evaluate(session, records)
        if is_saved or is_passing:
            with PULSE.doing(f"beginning the checkpoint after step {done}"):
                session.begin_save(is_passing=is_passing)
            pace.saved()
    with PULSE.doing("writing the last checkpoint"):
        session.saver.finish()
    return decision.stop_signal


def _evaluate(session: Session, records: Records) -> None:
    with PULSE.doing(f"evaluation after step {session.step.steps_done}"):
        records.evaluation(evaluate(session))


@contextmanager
def _checked(session: Session) -> Generator[None]:
    """Compare the collectives of the ranks if the user asked for it."""
    config = session.job.config
    if not config.debug_comm:
        yield
        return
    collectives = CollectiveCheck(
        session.mesh,
        named=dict(session.model.named_parameters()),
        limit_s=min(LIMIT_S, config.timeout_s),
    )
    with collectives, session.step.watched(collectives.phase):
        yield


def _is_due(steps_done: int, every: int) -> bool:
    return every > 0 and steps_done % every == 0


def facts_of(job: Job) -> dict[str, Any]:
    """Return what must be the same on every rank, each of which has resolved the job by itself.

    Some settings are compared by what they come to, and some are a host's own.
    """
    steps_done, consumed = 0, 0
    if job.start is not None:
        steps_done, consumed = job.start.about.steps_done, job.start.about.consumed
    config = job.config
    return {
        **manifest_of(job, steps_done, consumed).stream,
        "device": job.device,
        "strategy": str(job.strategy),
        **{f"shape.{name}": value for name, value in dataclasses.asdict(job.shape).items()},
        "precision": resolve_precision(config.precision, job.device).name,
        "batch": str(job.batch),
        "training tokens": job.tokens.train.num_tokens,
        "steps": job.num_steps,
        "steps done": steps_done,
        "samples consumed": consumed,
        **{key: value_at(config, key) for key in keys_for(TrainConfig, Use.LAW)},
    }


def _train_here(announce: Announce | None, job: Job) -> Summary:
    # A folder named after the time must have one name.
    out = on_first_rank(lambda: claim(job).out, f"cannot write to {job.out}")
    job = dataclasses.replace(job, out=out)
    if announce is not None and dist.get_rank() == 0:
        announce(job)
    PULSE.advice = functools.partial(how_to_go_on, out)
    return _summary_of(job, train_rank(job))
