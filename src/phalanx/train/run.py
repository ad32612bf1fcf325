"""Run a training configuration, in processes that this one or torchrun starts; return a summary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.comm.together import on_first_rank
from phalanx.config import TrainConfig
from phalanx.config.schema import RunConfig
from phalanx.data.survey import Progress
from phalanx.errors import ConfigError, Interrupted, TrainingError
from phalanx.launch import attach, schedulers
from phalanx.launch.local import prepare_server, run_ranks
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.launch.torchrun import run_here
from phalanx.report.terminal import Terminal
from phalanx.train.callback import Callback, Callbacks, Log
from phalanx.train.job.request import Request, settle
from phalanx.train.job.resolve import Job, complete, facts_of
from phalanx.train.job.resume import continued
from phalanx.train.job.run_folder import claim, net_files, out_folder, removed_if_refused
from phalanx.train.loop import Stopped, how_to_resume
from phalanx.train.loop import train as train_session
from phalanx.train.report.summary import Summary
from phalanx.train.text import TextSession

NOTHING = Callbacks()
"""No callbacks and no logger."""

Outcome = TypeVar("Outcome", Summary, Summary | None)

Announce = Callable[[Job], None]
"""Called with the job before its first step."""


def train(
    config: TrainConfig,
    announce: Announce | None = None,
    progress: Progress | None = None,
    *,
    callbacks: Mapping[str, Callback] = MappingProxyType({}),
    log: Log | None = None,
) -> Summary:
    """Train by `config`: start the rank processes, or run as one of those that torchrun started.

    Args:
        config: configuration of the run.
        announce: called once with the job before its first step; under torchrun on rank 0.
        progress: called repeatedly while the data is prepared.
        callbacks: see `phalanx.Trainer`.
        log: see `phalanx.Trainer`.

    Raises:
        PhalanxError: the configuration or data is invalid, or the run failed.
    """
    attach.report_in_one_message()
    schedulers.adopt()
    if is_under_torchrun():
        attach.leave_at_end()
    extras = Callbacks(dict(callbacks), log)
    extras.check()
    config = continued(config)
    if config.server.worker:
        raise ConfigError(
            f"server.worker is {config.server.worker}, a worker without a summary; start it by: "
            "phalanx train"
        )
    summary = run(settle(config), announce, progress, extras)
    assert summary is not None, "the first worker has one"
    return summary


def run(
    request: Request,
    announce: Announce | None = None,
    progress: Progress | None = None,
    extras: Callbacks = NOTHING,
) -> Summary | None:
    """Train by a checked request; see `train`. Return None in a worker other than worker 0."""
    if request.strategy.is_served and is_under_torchrun():
        raise ConfigError(
            f"strategy {request.strategy} starts its own workers and servers, on this host; leave "
            "torchrun out"
        )
    if is_under_torchrun():
        config = request.config
        with net_files(config, out_folder(config, request.strategy, request.name)):
            return run_here(
                lambda: complete(request, progress),
                facts_of,
                functools.partial(_train_here, announce, extras),
                device=config.device,
                threads=config.threads,
                timeout_s=config.timeout_s,
            )
    prepare_server()
    job = complete(request, progress)
    if announce is not None:
        announce(job)
    return start(job, extras)


def start(job: Job, extras: Callbacks = NOTHING) -> Summary | None:
    """Start the ranks of a resolved job on this host, and return the summary; see `run`.

    Raises:
        PhalanxError: the run failed.
        Interrupted: a signal ended the run; a checkpoint was saved if there was time.
    """
    served_run = None
    if job.strategy.is_served:
        from phalanx.train import served_run

        served_run.check(job)  # before the folder is created
    job = claim(job)
    advice = functools.partial(how_to_resume, job.out, TextSession.command)
    if served_run is None:
        args = (job.strategy.num_ranks, job, extras)
        with net_files(job.config, job.out), removed_if_refused(job.out, is_new=job.is_new):
            return summary_of(train_rank, *args, config=job.config, advice=advice)
    worker = job.config.server.worker
    if worker:
        advice = functools.partial(str, "worker 0 of the job saves the checkpoints")
    num_here = job.strategy.num_ranks if worker is None else 1
    run_here = served_run.run_served if worker is None else served_run.run_worker
    with _with_resume_advice(advice):
        return _finished(run_here(job, extras, functools.partial(_say_starting, num_here)))


def train_rank(job: Job, extras: Callbacks = NOTHING) -> Summary | Stopped:
    """Train on this rank, together with the other ranks of the job."""
    return train_session(TextSession(job, extras))


def summary_of(
    function: Callable[..., Summary | Stopped],
    num_ranks: int,
    *args: Any,
    config: RunConfig,
    advice: Callable[[], str],
) -> Summary:
    """Start the ranks of a run on this host, or run as a rank; return rank 0's summary.

    `advice` returns how to resume the run; for the other arguments see `run_ranks`.

    Raises:
        PhalanxError: the run failed.
        Interrupted: a signal ended the run; a checkpoint was saved if there was time.
    """
    with _with_resume_advice(advice):
        outcomes: list[Summary | Stopped] = run_ranks(
            function,
            num_ranks,
            *args,
            device=config.device,
            threads=config.threads,
            timeout_s=config.timeout_s,
            say_starting=functools.partial(_say_starting, num_ranks),
        )
    return _finished(outcomes[0])


def _say_starting(num_ranks: int) -> None:
    Terminal().say(f"starting {num_ranks} processes ...")


@contextmanager
def _with_resume_advice(advice: Callable[[], str]) -> Generator[None]:
    """Add `advice()` on how to resume to an error of the ranks that are started inside."""
    try:
        yield
    except BaseException as error:
        if is_under_torchrun():  # the handler that ends the rank adds the advice
            raise
        # Rank 0's display hides the terminal's cursor; a killed rank does not show it again.
        Terminal().restore()
        if isinstance(error, Interrupted):
            raise Interrupted(error.signum, advice()) from None
        if isinstance(error, TrainingError):
            error.add_note(advice())
        raise


def _finished(outcome: Outcome | Stopped) -> Outcome:
    if isinstance(outcome, Stopped):
        raise Interrupted(outcome.signum, outcome.words)
    return outcome


def _train_here(announce: Announce | None, extras: Callbacks, job: Job) -> Summary:
    # The name of a new folder contains the time, so rank 0's name is used on all ranks.
    def place() -> dict[str, Any]:
        claimed = claim(job)
        return {"out": claimed.out, "is_new": claimed.is_new}

    job = dataclasses.replace(job, **on_first_rank(place, f"cannot write to {job.out}"))
    is_first = dist.get_rank() == 0
    if announce is not None and is_first:
        announce(job)
    with removed_if_refused(job.out, is_new=job.is_new and is_first):
        session = TextSession(job, extras)
    return _finished(train_session(session))
