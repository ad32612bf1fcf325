"""Watch the steps of a run on one rank: time, bytes, memory; rank 0 keeps and shows records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
from rich.console import Console

from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.waits import told_to
from phalanx.measure.environment import device_name, environment
from phalanx.measure.logs import RunLog, StepRecord
from phalanx.measure.memory import MemoryAccount, MemoryLedger
from phalanx.measure.peaks import Arithmetic, peak_of
from phalanx.measure.products import arithmetic_in, quick_ceiling
from phalanx.measure.timer import StepTimer, StepTimes
from phalanx.measure.utilization import Utilization
from phalanx.planner.model_shape import step_flops
from phalanx.train.evaluate import Evaluation
from phalanx.train.notice import compiling, said_if_long
from phalanx.train.session import Session
from phalanx.train.step import TERMS, StepResult

LEDGER_STEP = 1
"""The step of this process whose collectives are counted: the second, when all buffers exist."""

MEMORY_STEP = 2
"""The step of this process whose memory is accounted for: the third, one that is not timed."""

WARMUP_STEPS = 3
"""Steps of this process that are left out of every median; a shorter run has but its first."""

MEASURED_STEPS = 10_000
"""Steps whose times are kept, the latest."""


class Records:
    """Measures each step of a session, and never takes one; as a context it keeps the files open.

        with records.watching_data():
            microbatches = ...
        with records.watching():
            result = step(microbatches)
        records.keep(result)

    A step lasts from the end of the one before it, so that what is done between two steps, such as
    keeping their records, is part of the rate; an evaluation is not.

    Attributes:
        session: what is watched.
        timer: the step ledger.
        entries: what one counted step sent.
        memory: what one step held on this rank; None before that step.
        last: result of the last step.
        evaluations: those made so far.
        num_steps: steps taken so far.
        ceiling_flops_per_s: the rate one rank's matrix products reach while all ranks are busy.
        log: where records are kept; None but on rank 0.
    """

    def __init__(self, session: Session, console: Console) -> None:
        self.session = session
        self.timer = StepTimer(session.comm.device, history=MEASURED_STEPS)
        self.entries: list[Entry] = []
        self.memory: MemoryAccount | None = None
        self.last: StepResult | None = None
        self.evaluations: list[Evaluation] = []
        self._begin_s = time.perf_counter()
        with said_if_long("measuring the rate of matrix products on all ranks"):
            self.ceiling_flops_per_s = self._measure_ceiling()
        self.num_steps = 0
        self._consumed = session.loader.consumed
        self._begins_anew = True
        self._watching = ExitStack()
        self.log: RunLog | None = None
        if session.is_first:
            self.log = RunLog(session.job.out, console, session.job.num_steps)
            self.log.note("environment", environment())
            self.log.note("config", asdict(session.job.config))

    def __enter__(self) -> Records:
        self._watching.enter_context(
            self.session.step.watched(lambda name: self.timer.phase(TERMS[name]))
        )
        if self.session.comm.device.type == "cpu":  # a GPU's stream waits, not this thread
            self._watching.enter_context(told_to(lambda _: self.timer.phase("communication")))
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        if self.log is not None:
            self.log.close()

    @contextmanager
    def watching_data(self) -> Generator[None]:
        """Book what runs inside as the data of the step that begins."""
        if self._begins_anew:
            self.timer.begin_step()
            self._begins_anew = False
        with self.timer.phase("data"):
            yield

    @contextmanager
    def watching(self) -> Generator[None]:
        """Measure the step that is taken inside; one is counted, and one accounted for."""
        step = self.session.step
        if self.num_steps == LEDGER_STEP:
            with Ledger(self.session.comm) as ledger, step.watched(ledger.phase):
                yield
            self.entries = ledger.entries()
        elif self.num_steps == MEMORY_STEP and self.blind_spot is None:
            memory = MemoryLedger(step.model, step.optimizer, self.session.comm.device)
            with memory, step.watched(memory.phase):
                yield
            self.memory = memory.account()
        else:
            with compiling(self.session.job.config.compile and self.num_steps == 0):
                yield

    def keep(self, result: StepResult) -> None:
        """Keep the record of the step that has just been watched."""
        self.last = result
        times = self.timer.end_step()
        self.num_steps += 1
        consumed = self.session.loader.consumed
        num_rows, self._consumed = consumed - self._consumed, consumed
        if self.log is None:
            return
        use = self.utilization(times.wall_s, num_rows)
        num_tokens = num_rows * self.session.job.config.corpus.seq_len
        of = "ceiling" if use.peak is None else "data sheet"
        self.log.step(
            StepRecord(
                step=self.session.step.steps_done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.learning_rate,
                tokens=num_tokens,
                tokens_per_s=num_tokens / times.wall_s,
                mfu=use.mfu(of),
                mfu_of=of,
                times=times,
                skipped=result.is_skipped,
            )
        )

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Record a measurement on the validation text, which has just been made."""
        self._begins_anew = True
        if evaluation is None:
            return
        self.evaluations.append(evaluation)
        if self.log is not None:
            steps_done = self.session.step.steps_done
            self.log.evaluation(steps_done, evaluation.loss, evaluation.bits_per_byte)

    def measured(self) -> list[StepTimes]:
        """Return the times of the latest steps after the warm-up, or of the first, not watched."""
        times = list(self.timer.history)
        num_forgotten = self.num_steps - len(times)
        return times[max(0, WARMUP_STEPS - num_forgotten) :] or times[:LEDGER_STEP]

    def utilization(self, time_s: float | None = None, num_rows: int | None = None) -> Utilization:
        """Return the share of the arithmetic used by a step, the median one of a full batch."""
        job = self.session.job
        sizes = (job.shape, job.config.corpus.seq_len, num_rows or job.batch.global_size)
        if time_s is None:
            time_s = statistics.median(times.wall_s for times in self.measured())
        device = self.session.comm.device
        is_listed = device.type == "cuda"  # no processor is
        return Utilization(
            causal=step_flops(*sizes, "causal", job.strategy.recompute),
            full=step_flops(*sizes, "full", job.strategy.recompute),
            time_s=time_s,
            num_devices=job.strategy.num_ranks,
            peak=peak_of(device_name(device), self._arithmetic) if is_listed else None,
            ceiling_flops_per_s=self.ceiling_flops_per_s,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the run was first measured."""
        return time.perf_counter() - self._begin_s

    @property
    def blind_spot(self) -> str | None:
        """Why the memory of a step cannot be accounted for, None if it can."""
        config = self.session.job.config
        if config.compile:
            return "under --compile it would not see what compiled code holds"
        if config.debug_comm:
            # It runs our own operators past any other mode.
            return "--debug-comm would not see the collectives that it runs"
        return None

    @property
    def _arithmetic(self) -> Arithmetic:
        dtype: torch.dtype = getattr(torch, self.session.precision.name)
        found = arithmetic_in(dtype, self.session.comm.device)
        assert found is not None, "products of every precision are measured"
        return found

    def _measure_ceiling(self) -> float:
        """Measure on all ranks at once, and return the mean over the ranks."""
        comm = self.session.comm
        mine = quick_ceiling(comm.device, self._arithmetic)
        total = torch.tensor(mine, dtype=torch.float64, device=comm.device)
        return float(comm.all_reduce(total, "job")) / comm.size("job")
