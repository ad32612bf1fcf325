"""Run a job with parameter servers; each worker is a torch.distributed job of one process."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from phalanx.config.validate import check_kind
from phalanx.errors import ConfigError
from phalanx.launch import rank_log
from phalanx.launch.failure import report
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import Work, num_cores, run_supervised
from phalanx.server.processes import JobRoles, meeting_of, names_of, serve
from phalanx.server.requests import JobAddress, JobEnded, JobStopped
from phalanx.server.secret import Secret, read_secret
from phalanx.server.wire import check_address
from phalanx.train.callback import Callbacks
from phalanx.train.job.resolve import Job
from phalanx.train.job.run_folder import STARTED
from phalanx.train.loop import Stopped, Watcher, take_steps
from phalanx.train.loop import train as train_session
from phalanx.train.report.summary import Summary
from phalanx.train.served_session import ServedSession, consistency_of


def check(job: Job) -> None:
    """Check that the settings work with parameter servers.

    Raises:
        ConfigError: a setting does not; the message names the nearest one that does.
    """
    config, consistency = job.config, consistency_of(job)
    check_kind(config.optimizer, job.strategy)
    if job.device == "cuda":
        raise ConfigError(
            f"strategy {job.strategy} runs only on the CPU; the nearest is --device cpu"
        )
    if config.debug_comm:
        raise ConfigError(
            f"debug_comm compares collectives, but {job.strategy} has none; leave debug_comm out"
        )
    if config.profile is not None:
        raise ConfigError(
            f"profile is {config.profile}, but the workers of {job.strategy} are jobs of one rank "
            "each; profile without servers, such as dp2"
        )
    if consistency.kind == "local" and config.server.rule != "adamw":
        raise ConfigError(
            f"server.rule is {config.server.rule}, but the workers of {job.strategy} use AdamW, "
            "and its servers use Nesterov momentum; leave server.rule out"
        )
    server, strategy = config.server, job.strategy
    if server.groups > strategy.dp.degree:
        raise ConfigError(
            f"server.groups is {server.groups}, but {strategy} has {strategy.dp.degree} workers; "
            f"the nearest is {strategy.dp.degree}"
        )
    if server.table_rule is None and server.table_lr is not None:
        raise ConfigError(
            f"server.table_lr is {server.table_lr:g}, but server.table_rule is unset; set "
            "server.table_rule to adagrad"
        )
    if server.table_rule is not None and consistency.kind == "local":
        raise ConfigError(
            f"server.table_rule is {server.table_rule}, but the workers of {strategy} push updates "
            f"of all weights; leave server.table_rule out, or use dp{strategy.dp.degree}:ps"
        )
    if server.table_rule is not None and job.shape.tied:
        raise ConfigError(
            f"server.table_rule is {server.table_rule}, but the embedding of {job.name} is also "
            "its output projection, whose gradient has every row; leave server.table_rule out, or "
            "set shape.tied to false"
        )
    if config.server.coordinator is not None:
        _meeting(job)
    size = consistency.num_local_steps
    for name, steps in (("steps", job.num_steps), ("save: every", config.save_policy.every)):
        if steps % size:
            raise ConfigError(
                f"{name} is {steps}, but the workers of {job.strategy} synchronize only after "
                f"every {size} steps; the nearest is {max(1, round(steps / size)) * size}"
            )


class _Unwatched(Watcher):
    """The watcher of workers other than worker 0: keeps no records."""


MAX_RESTARTS: Final = 100
"""Most restarts of processes in a run."""

LOOK_S: Final = 0.05
"""Seconds between two polls of worker 0, when done, for workers that still train."""


def train_worker(
    job: Job, worker: int, meeting: JobAddress, extras: Callbacks | None = None
) -> Summary | Stopped | None:
    """Train as worker `worker`; worker 0 waits for the others, and returns the run's outcome.

    Another worker returns at once if the job has ended: worker 0 does not wait for a lost worker,
    and may end the job before a new process replaces it.
    """
    try:
        session = ServedSession(job, worker, meeting, extras)
    except JobStopped as stopped:
        return Stopped(stopped.signum, "no step was taken")
    except JobEnded as ended:
        if worker == 0:
            raise
        report(str(ended))
        return None
    client = session.client
    outcome: Summary | Stopped | None = None
    if worker == 0:
        outcome = train_session(session)
        signum = outcome.signum if isinstance(outcome, Stopped) else 0
        with PULSE.waiting("the end of the other workers"):
            while client.leave(signum) > 0:
                time.sleep(LOOK_S)
        client.end()
        (session.out / STARTED).unlink(missing_ok=True)
    else:
        try:
            with rank_log.kept(session.out, worker), session, PULSE.handling_stop():
                with session.step.watched(PULSE.phase):
                    stop_signal = take_steps(session, _Unwatched())
        except JobStopped as stopped:
            stop_signal = stopped.signum
        except JobEnded as ended:
            report(str(ended))
            client.close()
            return None
        if stop_signal:
            done = f"step {session.step.steps_done} of {session.num_steps} is done"
            outcome = Stopped(stop_signal, done)
        client.leave()
    client.close()
    return outcome


def run_served(job: Job, extras: Callbacks, say_starting: Callable[[], None]) -> Summary | Stopped:
    """Start the servers and workers of a job on this host; return worker 0's outcome."""
    config, num_workers = job.config, job.strategy.num_ranks
    folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
    meeting = meeting_of(folder, Secret.new())
    numbers = config.server.num_servers, config.server.groups
    roles = JobRoles(meeting.secret.job, meeting, folder / "journal", *numbers)
    first, *others = (_work(job, worker, meeting, extras) for worker in range(num_workers))
    logs = job.out / rank_log.FOLDER
    serving: list[Work] = [
        (role, serve, (roles, role, folder, logs / f"{role}.log")) for role in names_of(*numbers)
    ]
    try:
        # Worker 0 waits for the other workers that are live. A new process of a lost one ends, as
        # the servers do, when worker 0 returns.
        return _run_works(job, first, [*others, *serving], num_workers, say_starting)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_worker(
    job: Job, extras: Callbacks, say_starting: Callable[[], None]
) -> Summary | Stopped | None:
    """Run one worker of a job whose servers run already; only worker 0 returns an outcome."""
    worker = job.config.server.worker
    assert worker is not None, "the caller starts all workers without it"
    return _run_works(job, _work(job, worker, _meeting(job), extras), [], 1, say_starting)


def _work(job: Job, worker: int, meeting: JobAddress, extras: Callbacks) -> Work:
    return f"worker {worker}", train_worker, (job, worker, meeting, extras)


def _meeting(job: Job) -> JobAddress:
    """Return the address and secret of the job's coordinator, which is started separately.

    Raises:
        ConfigError: the address or the secret file is not valid.
    """
    server = job.config.server
    assert server.coordinator is not None and server.secret, "they are checked with the settings"
    check_address("server.coordinator", server.coordinator)
    return JobAddress(server.coordinator, read_secret(Path(server.secret)))


def _run_works(
    job: Job, work: Work, beside: Sequence[Work], num_here: int, say_starting: Callable[[], None]
) -> Any:
    """Return the result of `work`; `num_here` workers share this host's cores."""
    config = job.config
    return run_supervised(
        [work],
        beside,
        device=job.device,
        threads=config.threads or max(1, num_cores() // num_here),
        timeout_s=config.timeout_s,
        max_restarts=MAX_RESTARTS,
        say_starting=say_starting,
    )[0]
