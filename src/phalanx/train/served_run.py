"""Run a job with parameter servers; each worker is a torch.distributed job of one process.

Worker 0 evaluates, saves and writes the records, as rank 0 of any run does. A worker that is
restarted in place of a lost one gets the number of finished steps from the servers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.account.flops import Flops
from phalanx.checkpoint.registered import LOCAL_ROUNDS, TABLE_SUMS
from phalanx.checkpoint.saver import Saver
from phalanx.data.batch import Batch
from phalanx.data.loader import Loader
from phalanx.errors import ConfigError
from phalanx.launch import rank_log
from phalanx.launch.agreement import check_same
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import num_cores
from phalanx.launch.separate_jobs import Work, run_supervised
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import JobRoles, meeting_of, names_of, serve
from phalanx.server.requests import JobAddress
from phalanx.server.secret import Secret, read_secret
from phalanx.server.unanswered import JobStopped
from phalanx.train.callback import Callbacks
from phalanx.train.job.resolve import Job, facts_of
from phalanx.train.local_step import LocalStep
from phalanx.train.loop import Stopped, Watcher, take_steps
from phalanx.train.loop import train as train_session
from phalanx.train.report.summary import Summary
from phalanx.train.served_step import AsyncStep, ClockedStep, ServedStep
from phalanx.train.text import TextSession, loader_of


def consistency_of(job: Job) -> Consistency:
    """Return the consistency model in a job's strategy."""
    dp = job.strategy.dp
    return Consistency(dp.kind, dp.degree, dp.option or 0, job.config.server.grace_s)


def check(job: Job) -> None:
    """Check that the settings work with parameter servers.

    Raises:
        ConfigError: a setting does not; the message names the nearest one that does.
    """
    config, consistency = job.config, consistency_of(job)
    if job.device == "cuda":
        raise ConfigError(
            f"strategy {job.strategy} runs only on the CPU; the nearest is --device cpu"
        )
    if config.debug_comm:
        raise ConfigError(
            f"debug_comm compares collectives, but {job.strategy} has none; leave debug_comm out"
        )
    if consistency.kind == "local" and config.server.rule != "adamw":
        raise ConfigError(
            f"server.rule is {config.server.rule}, but the workers of {job.strategy} use AdamW, "
            "and its servers use Nesterov momentum; leave server.rule out"
        )
    _check_table(job)
    if config.server.coordinator is not None:
        _meeting(job)
    size = consistency.num_local_steps
    for name, steps in (("steps", job.num_steps), ("save_every", config.save_every)):
        if steps % size:
            raise ConfigError(
                f"{name} is {steps}, but the workers of {job.strategy} synchronize only after "
                f"every {size} steps; the nearest is {max(1, round(steps / size)) * size}"
            )


def _check_table(job: Job) -> None:
    """Raise ConfigError if `server.table_rule` or `table_lr` does not fit the other settings."""
    server, strategy = job.config.server, job.strategy
    if server.table_rule is None and server.table_lr is not None:
        raise ConfigError(
            f"server.table_lr is {server.table_lr:g}, but server.table_rule is unset; set "
            "server.table_rule to adagrad"
        )
    if server.table_rule is None:
        return
    if strategy.dp.kind == "local":
        raise ConfigError(
            f"server.table_rule is {server.table_rule}, but the workers of {strategy} push updates "
            f"of all weights; leave server.table_rule out, or use dp{strategy.dp.degree}:ps"
        )
    if job.shape.tied:
        raise ConfigError(
            f"server.table_rule is {server.table_rule}, but the embedding of {job.name} is also "
            "its output projection, whose gradient has every row; leave server.table_rule out, or "
            "set shape.tied to false"
        )


class NoSaver:
    """The saver of workers other than worker 0: saves nothing."""

    is_writing = False

    def reserve(self, *_: object) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class _Unwatched(Watcher):
    """The watcher of workers other than worker 0: keeps no records."""


class ServedSession(TextSession):
    """The session of one worker with parameter servers.

    Attributes:
        client: client of the servers.
    """

    step: ServedStep

    def __init__(
        self, job: Job, worker: int, meeting: JobAddress, extras: Callbacks | None = None
    ) -> None:
        self.worker, self._meeting = worker, meeting
        self._is_round_saved = False
        self.consistency = consistency_of(job)
        self.step_type = STEPS[self.consistency.kind]
        super().__init__(job, extras)
        size = self.consistency.num_local_steps
        clocks = (job.done[0] // size, job.num_steps // size)
        self.client = Client(meeting, worker, self.consistency, clocks, job.config.timeout_s)
        facts = facts_of(job)
        first: dict[str, Any] = self.client.ask_scheduler("agree", facts=facts)["facts"]
        check_same([first, json.loads(json.dumps(facts))])
        self.model.embedding.sparse = job.config.server.table_rule is not None
        self.step.join(self.client, job.config.server, is_first=self.is_first)
        self._loaders: dict[int, Loader] = {}
        self.loader = loader_of(job, worker)
        self.loader.consumed = self._consumed(self.step.steps_done)
        if self.consistency.kind != "local":
            self.step.batch_of = self._batch_of

    @property
    @override
    def is_first(self) -> bool:
        return self.worker == 0

    @override
    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer, server = super()._optimizer(model), self.job.config.server
        if server.rule == "adamw":
            return optimizer
        keys = ("params", "weight_decay")
        groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
        momentum = server.momentum if server.rule == "momentum" else 0.0
        return torch.optim.SGD(groups, self.job.config.optimizer.lr, momentum)

    @override
    def _claim(self, job: Job) -> None:
        self.data_rank = self.worker
        if not self.is_first:
            self.saver = cast(Saver, NoSaver())
        elif self._is_restarted(job.out / STARTED):  # restarted after worker 0 was lost
            self.saver = Saver(job.out, keep=job.config.keep_checkpoints)
        else:
            super()._claim(job)

    @override
    def _keep_origin(self) -> None:
        if self.is_first:
            super()._keep_origin()
            (self.out / STARTED).write_text(self._meeting.coordinator)

    def _is_restarted(self, mark: Path) -> bool:
        return mark.exists() and mark.read_text() == self._meeting.coordinator

    def _consumed(self, steps: int) -> int:
        """Return the position in the sample stream after `steps` steps of the run."""
        done, consumed = self.job.done
        end = self.loader.end
        at = consumed + (steps - done) * self.job.batch.global_size
        return at if end is None else min(at, end)

    def _batch_of(self, clock: int, slot: int) -> Sequence[Batch]:
        if slot not in self._loaders:
            self._loaders[slot] = loader_of(self.job, slot)
        return self._loaders[slot].step_at(self._consumed(clock))

    @override
    def validation_batches(self) -> Iterable[Batch] | None:
        return super().validation_batches() if self.is_first else None

    @override
    def _call(self, extras: Callbacks) -> None:
        super()._call(extras)
        if isinstance(self.step, LocalStep):
            self.called.registered.add(LOCAL_ROUNDS, self.step.rounds)
        if self.job.config.server.table_rule == "adagrad":
            self.called.registered.add(TABLE_SUMS, self.step.sums)

    @override
    def begin_save(self, *, is_passing: bool = False) -> None:
        if isinstance(self.step, LocalStep) and is_passing:
            self.step.is_save_due = self.is_first
        else:
            self._save(is_passing=is_passing)

    @property
    @override
    def may_stop(self) -> bool:
        """Whether a signal may stop this worker after the latest step, see `Session.may_stop`.

        In `local/H` all workers wait for each other at the end of a round. So worker 0 stops only
        after a round that was saved, and the other workers when worker 0 notifies them.
        """
        return not isinstance(self.step, LocalStep) or (self.is_first and self._is_round_saved)

    @override
    def stepped(self) -> None:
        super().stepped()
        self._is_round_saved = isinstance(self.step, LocalStep) and self.step.is_save_agreed
        if isinstance(self.step, LocalStep) and self.step.is_save_agreed:
            self.step.is_save_agreed = False
            done, every = self.step.steps_done, self.config.save_every
            if done < self.num_steps and not (every and done % every == 0):
                self._save(is_passing=True)

    def _save(self, *, is_passing: bool) -> None:
        is_local = isinstance(self.step, LocalStep)
        if self.is_first or is_local:
            self.step.before_save()
        if self.is_first:
            super().begin_save(is_passing=is_passing)
            if not is_local:
                self.step.optimizer.state.clear()

    @override
    def flops(self, num_rows: int | None = None) -> tuple[Flops, Flops]:
        """Return the FLOPs of this worker's part of a step, see `Session.flops`."""
        num_rows = num_rows or self.job.batch.global_size
        return super().flops(-(-num_rows // self.strategy.num_ranks))

    @override
    def sample(self) -> str:
        return super().sample() if self.is_first else ""

    @override
    def served_text(self) -> str:
        ages, client = self.client.ages(), self.client
        steps = max(1, self.step.steps_done - self.job.done[0])
        total = max(1, sum(ages.values()))
        shares = [f"{age} {100 * count / total:.0f} %" for age, count in ages.items()]
        late = ", ".join(shares[:MOST_AGES]) + (" ..." if len(shares) > MOST_AGES else "")
        return (
            f"{client.sent_bytes / steps / 2**20:.3f} MiB pushed and "
            f"{client.received_bytes / steps / 2**20:.3f} pulled over sockets per step and worker; "
            f"staleness of gradients in versions: {late}"
        )

    @override
    def close(self) -> None:
        super().close()
        for loader in self._loaders.values():
            loader.close()


STEPS: Final[dict[str, type[ServedStep]]] = {
    "ps": ClockedStep,
    "ssp": ClockedStep,
    "async": AsyncStep,
    "quorum": AsyncStep,
    "local": LocalStep,
}
"""Step class for each kind of dp with parameter servers."""

MAX_RESTARTS: Final = 100
"""Most restarts of processes in a run."""

MOST_AGES: Final = 12
"""Most gradient ages (staleness, in versions) that the summary shows."""

LOOK_S: Final = 0.05
"""Seconds between two polls of worker 0, when done, for workers that still train."""

STARTED: Final = ".served"
"""File in the run folder that worker 0 writes at its start, with the coordinator's address."""


def train_worker(
    job: Job, worker: int, meeting: JobAddress, extras: Callbacks | None = None
) -> Summary | Stopped | None:
    """Train as worker `worker`; worker 0 waits for the others, and returns the run's outcome."""
    try:
        session = ServedSession(job, worker, meeting, extras)
    except JobStopped as stopped:
        return Stopped(stopped.signum, "no step was taken")
    client = session.client
    outcome: Summary | Stopped | None = None
    if worker == 0:
        outcome = train_session(session)
        asked: dict[str, Any] = {"kind": "leave"}
        if isinstance(outcome, Stopped):
            asked = {"kind": "stop", "signum": outcome.signum}
        with PULSE.waiting("the end of the other workers"):
            while int(client.ask_scheduler(**asked)["num_live"]) > 0:
                time.sleep(LOOK_S)
        client.end()
    else:
        try:
            with rank_log.kept(session.out, worker), session, PULSE.handling_stop():
                with session.step.watched(PULSE.phase):
                    stop_signal = take_steps(session, _Unwatched())
        except JobStopped as stopped:
            stop_signal = stopped.signum
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
    num_servers = config.server.num_servers
    roles = JobRoles(meeting.secret.job, meeting, folder / "journal", num_servers)
    works: list[Work] = [
        (f"worker {worker}", train_worker, (job, worker, meeting, extras))
        for worker in range(num_workers)
    ]
    logs = job.out / rank_log.FOLDER
    serving: list[Work] = [
        (role, serve, (roles, role, folder, logs / f"{role}.log")) for role in names_of(num_servers)
    ]
    try:
        return _run_works(job, works, serving, say_starting)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_worker(
    job: Job, extras: Callbacks, say_starting: Callable[[], None]
) -> Summary | Stopped | None:
    """Run one worker of a job whose servers run already; only worker 0 returns an outcome."""
    worker = job.config.server.worker
    args = (job, worker, _meeting(job), extras)
    works: list[Work] = [(f"worker {worker}", train_worker, args)]
    return _run_works(job, works, [], say_starting)


def _meeting(job: Job) -> JobAddress:
    """Return the address and secret of the job's coordinator, which is started separately.

    Raises:
        ConfigError: the address or the secret file is not valid.
    """
    server = job.config.server
    assert server.coordinator is not None and server.secret, "they are checked with the settings"
    return JobAddress(server.coordinator, read_secret(Path(server.secret)))


def _run_works(
    job: Job, works: Sequence[Work], serving: Sequence[Work], say_starting: Callable[[], None]
) -> Any:
    config = job.config
    return run_supervised(
        works,
        serving,
        device=job.device,
        threads=config.threads or max(1, num_cores() // len(works)),
        timeout_s=config.timeout_s,
        max_restarts=MAX_RESTARTS,
        say_starting=say_starting,
    )[0]
