"""The session of a worker with parameter servers.

Worker 0 evaluates, saves and writes the records, as rank 0 of any run does. A worker that is
restarted in place of a lost one gets the number of finished steps from the servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.account.flops import Flops
from phalanx.checkpoint.manifest import complete_checkpoints
from phalanx.checkpoint.registered import LOCAL_ROUNDS, TABLE_SUMS
from phalanx.checkpoint.saver import Saver
from phalanx.data.samples import Batch
from phalanx.launch import rank_log
from phalanx.launch.agreement import check_same
from phalanx.measure.logs import METRICS_FILE
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import log_of
from phalanx.server.requests import JobAddress
from phalanx.train.callback import Callbacks
from phalanx.train.job.resolve import Job, facts_of
from phalanx.train.job.run_folder import STARTED, check_unused, continues_served
from phalanx.train.local_step import LocalStep
from phalanx.train.served_step import AsyncStep, ClockedStep, ServedStep
from phalanx.train.step import StepResult
from phalanx.train.text import TextSession, loader_of

MOST_AGES: Final = 12
"""Most gradient ages (staleness, in versions) that the summary shows."""


def consistency_of(job: Job) -> Consistency:
    """Return the consistency model in a job's strategy."""
    dp = job.strategy.dp
    return Consistency(dp.kind, dp.degree, dp.option or 0, job.config.server.grace_s)


class NoSaver:
    """The saver of workers other than worker 0: saves nothing."""

    is_writing = False

    def reserve(self, *_: object) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def upload(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


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
        log = log_of(f"worker {worker}", self.out / rank_log.FOLDER / "connections.log")
        self.client = Client(meeting, worker, self.consistency, clocks, job.config.timeout_s, log)
        facts = facts_of(job)
        first = self.client.agree(facts)
        names = ("the job, to which a lost worker returns without --resume", f"worker {worker}")
        check_same([first, json.loads(json.dumps(facts))], names)
        self.model.embedding.sparse = job.config.server.table_rule is not None
        if self.consistency.kind != "local":
            self.step.batch_of = lambda clock, slot: loader_of(self.job, slot).step_at(
                self._consumed(clock)
            )
        self.step.join(self.client, job.config.server, is_first=self.is_first)
        if self.is_first and max(complete_checkpoints(self.out), default=0) > self.step.steps_done:
            check_unused(self.out, job.start)  # the servers are of another job than the folder
        self.loader.consumed = self._consumed(self.step.steps_done)

    @property
    @override
    def is_first(self) -> bool:
        return self.worker == 0

    @property
    @override
    def data_rank(self) -> int:
        return self.worker

    @override
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer, server = super().optimizer_of(model), self.job.config.server
        if server.rule == "adamw":
            return optimizer
        keys = ("params", "weight_decay")
        groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
        momentum = server.momentum if server.rule == "momentum" else 0.0
        return torch.optim.SGD(groups, self.job.config.optimizer.lr, momentum)

    @override
    def locked(self) -> Saver:
        return super().locked() if self.is_first else cast(Saver, NoSaver())

    @override
    def claim(self) -> None:
        # A new process of worker 0, after one was lost, continues in its folder as it is.
        if self.is_first and not continues_served(self.out, self._meeting.coordinator):
            super().claim()
            (self.out / STARTED).write_text(self._meeting.coordinator)

    def _consumed(self, steps: int) -> int:
        """Return the position in the sample stream after `steps` steps of the run."""
        done, consumed = self.job.done
        end = self.loader.end
        at = consumed + (steps - done) * self.job.batch.global_size
        return at if end is None else min(at, end)

    @override
    def validation_batches(self) -> Iterable[Batch] | None:
        return super().validation_batches() if self.is_first else None

    @override
    def register(self) -> None:
        super().register()
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
        if isinstance(self.step, LocalStep):
            return self.is_first and self._is_round_saved
        return not self.is_behind

    @property
    @override
    def saved_steps(self) -> int:
        if not self.is_first:
            return super().saved_steps
        return max(complete_checkpoints(self.out), default=self.job.done[0])

    @property
    @override
    def is_behind(self) -> bool:
        return self.step.is_behind

    @override
    def missed(self) -> dict[int, StepResult]:
        if not self.is_first or self.step.steps_done == self.job.done[0]:
            return {}
        with (self.out / METRICS_FILE).open() as file:
            lines = map(json.loads, file)
            last = max((each["step"] for each in lines if each["kind"] == "step"), default=0)
        return {n: each for n, each in self.step.results().items() if last < n}

    @override
    def stepped(self) -> None:
        super().stepped()
        self._is_round_saved = isinstance(self.step, LocalStep) and self.step.is_save_agreed
        if isinstance(self.step, LocalStep) and self.step.is_save_agreed:
            self.step.is_save_agreed = False
            done = self.step.steps_done
            if not self.config.save_policy.num_due(done - 1, done, self.num_steps):
                self._save(is_passing=True)

    def _save(self, *, is_passing: bool) -> None:
        is_local = isinstance(self.step, LocalStep)
        if self.is_first or is_local:
            self.step.before_save()
        if self.is_first:
            if not self.is_behind:
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


STEPS: Final[dict[str, type[ServedStep]]] = {
    "ps": ClockedStep,
    "ssp": ClockedStep,
    "async": AsyncStep,
    "quorum": AsyncStep,
    "local": LocalStep,
}
"""Step class for each kind of dp with parameter servers."""
