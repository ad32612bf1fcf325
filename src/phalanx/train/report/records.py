"""Watch the steps of a run on one rank: time, bytes, memory; rank 0 keeps and shows records."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.console import Console

from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.waits import around_waits
from phalanx.measure.environment import device_name, environment
from phalanx.measure.logs import RunLog, StepRecord
from phalanx.measure.memory import MemoryAccount, MemoryLedger
from phalanx.measure.peaks import Arithmetic, peak_of
from phalanx.measure.products import ProductTypes, quick_ceiling
from phalanx.measure.timer import StepTimer, StepTimes
from phalanx.measure.utilization import Utilization
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
        with records.watching(microbatches):
            result = step(microbatches)
        records.keep(result)

    A step lasts from the end of the one before it, so that work between two steps, such as
    keeping their records, is part of the rate; an evaluation is not.

    Attributes:
        session: the run that it watches.
        timer: the step ledger.
        entries: what one counted step sent.
        memory: what one step held on this rank; None before that step.
        last: result of the last step.
        losses: of the latest steps.
        evaluations: those made so far.
        num_steps: steps taken so far.
        ceiling_flops_per_s: the rate of products on a rank, the mean of all; None if not measured.
        log: where records are kept; None but on rank 0.
    """

    def __init__(self, session: Session, console: Console) -> None:
        """Begin to watch; rank 0 shows the run on `console`."""
        self.session = session
        self.timer = StepTimer(session.comm.device, history=MEASURED_STEPS)
        self.entries: list[Entry] = []
        self.memory: MemoryAccount | None = None
        self.last: StepResult | None = None
        self.losses = deque[float](maxlen=MEASURED_STEPS)
        self._units = deque[int](maxlen=MEASURED_STEPS)
        self.evaluations: list[Evaluation] = []
        self.num_steps = 0
        self._begin_s = time.perf_counter()
        self._types = ProductTypes()
        self._arithmetic: Arithmetic | None = None
        self.ceiling_flops_per_s: float | None = None
        self._begins_anew = True
        self._watching = ExitStack()
        self.log: RunLog | None = None
        if session.is_first:
            self.log = RunLog(session.out, console, session.num_steps, session.log)
            self.log.note("environment", environment())
            self.log.note("config", session.settings())
            for line in session.remarks():
                self.log.display.say(line)

    def __enter__(self) -> Records:
        self._watching.enter_context(
            self.session.step.watched(lambda name: self.timer.phase(TERMS[name]))
        )
        if self.session.comm.device.type == "cpu":  # a GPU's stream waits, not this thread
            self._watching.enter_context(around_waits(lambda _: self.timer.phase("communication")))
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
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Measure the step that is taken inside; one is counted, and one accounted for."""
        del microbatches
        step = self.session.step
        if self.num_steps == LEDGER_STEP:
            with Ledger(self.session.comm) as ledger, step.watched(ledger.phase):
                yield
            self.entries = ledger.entries()
        elif self.num_steps == 0 and self.session.arithmetic is None:
            with self._types:
                yield
        elif self.num_steps == MEMORY_STEP and self.blind_spot is None:
            memory = MemoryLedger(step.model, step.optimizer, self.session.comm.device)
            with memory, step.watched(memory.phase):
                yield
            self.memory = memory.account()
        else:
            with compiling(self.session.config.compile and self.num_steps == 0):
                yield

    def keep(self, result: StepResult) -> None:
        """Keep the record of the step that has just been watched."""
        session, self.last = self.session, result
        self.losses.append(result.loss)
        self._units.append(session.num_units(result))
        times = self.timer.end_step()
        self.num_steps += 1
        if self.num_steps == 1:
            self._measure_ceiling()
            self._begins_anew = True  # without the measurement
        if self.log is None:
            return
        use, num_units = self.utilization(times.wall_s, session.num_rows), self._units[-1]
        of = "ceiling" if use is None or use.peak is None else "data sheet"
        self.log.step(
            StepRecord(
                step=session.step.steps_done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.learning_rate,
                tokens=num_units,
                tokens_per_s=num_units / times.wall_s,
                mfu=None if use is None else use.mfu(of),
                mfu_of=of,
                times=times,
                unit=session.unit,
                skipped=result.is_skipped,
            )
        )

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Record a measurement on the validation data, which has just been made."""
        self._begins_anew = True
        if evaluation is None:
            return
        self.evaluations.append(evaluation)
        if self.log is not None:
            self.log.evaluation(evaluation.step, evaluation.loss, evaluation.metrics)

    def measured(self) -> list[StepTimes]:
        """Return the times of the latest steps after the warm-up, or of the first, not watched."""
        times = list(self.timer.history)
        num_forgotten = self.num_steps - len(times)
        return times[max(0, WARMUP_STEPS - num_forgotten) :] or times[:LEDGER_STEP]

    def utilization(
        self, time_s: float | None = None, num_rows: int | None = None
    ) -> Utilization | None:
        """Return the part of the arithmetic used by a step, the median one of a full batch.

        None where the FLOPs of the step, or in which type they are, is not known.
        """
        flops, arithmetic = self.session.flops(num_rows), self._arithmetic
        if flops is None or arithmetic is None:
            return None
        causal, full = flops
        if time_s is None:
            time_s = statistics.median(times.wall_s for times in self.measured())
        device = self.session.comm.device
        is_listed = device.type == "cuda"  # no processor is
        return Utilization(
            causal=causal,
            full=full,
            time_s=time_s,
            num_devices=self.session.strategy.num_ranks,
            peak=peak_of(device_name(device), arithmetic) if is_listed else None,
            ceiling_flops_per_s=self.ceiling_flops_per_s,
        )

    @property
    def median_units(self) -> float:
        """Tokens (or samples) of the median step, over all ranks."""
        return statistics.median(self._units)

    @property
    def seconds(self) -> float:
        """Seconds since the run was first measured."""
        return time.perf_counter() - self._begin_s

    @property
    def blind_spot(self) -> str | None:
        """Why the memory of a step cannot be accounted for, None if it can."""
        config = self.session.config
        if config.compile:
            return "under --compile it would not see what compiled code holds"
        if config.debug_comm:
            # It runs our own operators past any other mode.
            return "--debug-comm would not see the collectives that it runs"
        return None

    def _measure_ceiling(self) -> None:
        """Measure products on all ranks at once; their mean rate is the ceiling of an MFU."""
        comm = self.session.comm
        found = self.session.arithmetic or self._types.most(comm.device)
        with said_if_long("measuring the rate of matrix products on all ranks"):
            own = 0.0 if found is None else quick_ceiling(comm.device, found)
        rates = torch.tensor([own, own > 0], dtype=torch.float64).to(comm.device)
        total, num_known = comm.all_reduce(rates, "job").tolist()
        if num_known == comm.size("job"):
            self._arithmetic, self.ceiling_flops_per_s = found, total / comm.size("job")
