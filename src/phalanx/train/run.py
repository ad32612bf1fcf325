"""From a configuration to the summary of its run: start the processes, or join torchrun's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from phalanx.checkpoint import manifest
from phalanx.comm.together import on_first_rank
from phalanx.config import TrainConfig
from phalanx.data.survey import Progress
from phalanx.errors import Interrupted, TrainingError
from phalanx.launch import slurm
from phalanx.launch.local import prepare_server, run_ranks
from phalanx.launch.pulse import PULSE
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.launch.torchrun import run_here
from phalanx.train.job.request import Request, settle
from phalanx.train.job.resolve import Job, complete, facts_of
from phalanx.train.job.run_folder import claim
from phalanx.train.loop import Stopped, train_rank
from phalanx.train.report.summary import Summary

Announce = Callable[[Job], None]
"""Told the job before its first step."""


def train(
    config: TrainConfig, announce: Announce | None = None, progress: Progress | None = None
) -> Summary:
    """Train as `config` says: start the processes, or join those that torchrun started.

    `announce` is called once in the job, under torchrun by rank 0; `progress` now and then while
    the data is prepared.

    Raises:
        PhalanxError: the configuration, the data or the run is at fault.
    """
    slurm.adopt()
    return run(settle(config), announce, progress)


def run(
    request: Request, announce: Announce | None = None, progress: Progress | None = None
) -> Summary:
    """Train as is settled; see `train`."""
    if is_under_torchrun():
        return run_here(
            lambda: complete(request, progress),
            facts_of,
            functools.partial(_train_here, announce),
            device=request.config.device,
            threads=request.config.threads,
            timeout_s=request.config.timeout_s,
        )
    prepare_server()
    job = complete(request, progress)
    if announce is not None:
        announce(job)
    return start(job)


def start(job: Job) -> Summary:
    """Start the ranks of a resolved job on this host and wait for the summary.

    Raises:
        PhalanxError: the run is at fault.
        Interrupted: a signal ended it; it has saved a checkpoint if it was given the time.
    """
    job, num_ranks = claim(job), job.strategy.num_ranks

    def say_starting() -> None:
        Console().print(f"starting {num_ranks} processes ...", highlight=False)

    try:
        outcome: Summary | Stopped = run_ranks(
            train_rank,
            num_ranks,
            job,
            device=job.device,
            threads=job.config.threads,
            timeout_s=job.config.timeout_s,
            say_starting=say_starting,
        )[0]
    except BaseException as error:
        # The display of rank 0 hides the terminal's cursor; a rank that is ended leaves it so.
        console = Console()
        if console.is_terminal:
            console.show_cursor(True)
            console.print()  # what comes next does not go on in the line of the display
        if isinstance(error, Interrupted):
            raise Interrupted(error.signum, how_to_go_on(job.out)) from None
        if isinstance(error, TrainingError):
            error.add_note(how_to_go_on(job.out))
        raise
    return _summary_of(job, outcome)


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


def _train_here(announce: Announce | None, job: Job) -> Summary:
    # A folder named after the time must have one name.
    out = on_first_rank(lambda: claim(job).out, f"cannot write to {job.out}")
    job = dataclasses.replace(job, out=out)
    if announce is not None and dist.get_rank() == 0:
        announce(job)
    PULSE.advice = functools.partial(how_to_go_on, out)
    return _summary_of(job, train_rank(job))
