"""Measure time, bytes and memory of the steps on each rank; rank 0 writes and shows records."""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from phalanx.account.rank_memory import memory
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.ranges import named
from phalanx.comm.together import barrier, gather_on_first
from phalanx.comm.waits import around_waits
from phalanx.config.profile_options import ProfileOptions
from phalanx.launch.failure import READER_LEFT
from phalanx.launch.launched import is_restarted
from phalanx.measure.environment import device_name, environment
from phalanx.measure.expert_load import Routing
from phalanx.measure.logs import RunLog, StepRecord
from phalanx.measure.memory import MemoryAccount, MemoryLedger, allocator_snapshot
from phalanx.measure.peaks import Arithmetic, peak_of
from phalanx.measure.products import ProductTypes, quick_ceiling
from phalanx.measure.rank_places import gathered
from phalanx.measure.rank_times import RankWindow, window_of
from phalanx.measure.timer import StepTimer, StepTimes
from phalanx.measure.utilization import Utilization
from phalanx.planner.calibration import blank
from phalanx.planner.kept_rates import machine_of
from phalanx.report.terminal import Terminal
from phalanx.train.evaluate import Evaluation
from phalanx.train.notice import compiling, notice_if_slow
from phalanx.train.report.prediction import kinds_of
from phalanx.train.session import Session
from phalanx.train.step import TERMS, StepResult

if TYPE_CHECKING:
    from phalanx.measure.profile import Profile  # with torch.profiler, which few runs need

LEDGER_STEP = 1
"""Index of the first step whose collectives are counted: the second, when all buffers exist."""

MEMORY_STEP = 2
"""Index of the step whose memory is accounted: the third, which the medians exclude; or the first
after it that is not profiled."""

WARMUP_STEPS = 3
"""First steps of this process that the medians exclude; a shorter run uses only its first step."""

MEASURING_STEPS = 20
"""Number of steps from which a run measures the rates that predict a step, if none are kept."""

ROUTING_RECORDS = 200
"""About how many steps of a run have records of the routing to experts, at even distances."""

MEASURED_STEPS = 10_000
"""Number of latest steps whose times and losses are kept."""


def records_routing(number: int, num_steps: int) -> bool:
    """Return whether step `number` of `num_steps` records the routing: also the first and last."""
    return number in (1, num_steps) or number % -(-num_steps // ROUTING_RECORDS) == 0


class Records:
    """Measures the steps that a caller takes in a session; leaving its context closes the log.

        with records.watching_data():
            microbatches = ...
        with records.watching(microbatches):
            result = step(microbatches)
        records.keep(result)

    A step's time starts at the end of the previous step, so that it includes work between steps,
    such as writing records. An evaluation is excluded.

    Attributes:
        session: the session that is measured.
        timer: step ledger, which times the phases.
        entries: collectives of step LEDGER_STEP and their bytes; empty before.
        memory: memory account of step MEMORY_STEP on this rank; None before.
        last: result of the latest step.
        routing: load of the experts in the latest step that recorded it; None before.
        losses: losses of the latest steps, at most MEASURED_STEPS.
        evaluations: evaluations so far.
        num_steps: steps taken so far by this process.
        profile: profile of the run; None without one.
        ceiling_flops_per_s: measured FLOP/s of matrix products, mean over ranks; None before.
        windows: times of the steps on every rank, on rank 0 of several; the latest MEASURED_STEPS.
        placement: places of the ranks on rank 0; None on other ranks.
        machine: measured rates and links of this machine on rank 0, without any before.
        log: log of the records on rank 0; None on other ranks.
    """

    def __init__(self, session: Session) -> None:
        """Start to measure; rank 0 opens the log and shows the run."""
        self.session = session
        self.timer = StepTimer(session.comm.device, history=MEASURED_STEPS)
        self.entries: list[Entry] = []
        self._has_entries = False
        self.memory: MemoryAccount | None = None
        self._memory_ledger: MemoryLedger | None = None
        self.last: StepResult | None = None
        self.routing: Routing | None = None
        self.losses = deque[float](maxlen=MEASURED_STEPS)
        self._units = deque[int](maxlen=MEASURED_STEPS)
        self.evaluations: list[Evaluation] = []
        self.num_steps = 0
        self._begin_s = time.perf_counter()
        self._types = ProductTypes()
        self._arithmetic: Arithmetic | None = None
        self.ceiling_flops_per_s: float | None = None
        self.machine = blank("gpu" if session.comm.device.type == "cuda" else "cpu")
        self._restart_timer = True
        self._ungathered: list[StepTimes] = []
        self._after_save: set[int] = set()
        self.windows = deque[RankWindow]()
        self._watching = ExitStack()
        self.placement = gathered(session.comm)
        self.log: RunLog | None = None
        self.profile: Profile | None = None
        if session.is_first:
            terminal = Terminal(reader_left=READER_LEFT)
            self.log = RunLog(session.out, terminal, session.num_steps, session.logs)
            assert self.placement is not None, "the first rank has it"
            self.log.note("environment", environment())
            links = self.placement.links
            self.log.note("placement", {**vars(self.placement), "links": links})
            self.log.note("config", session.settings())
            for number, found in session.missed().items():
                values = {"loss": found.loss, "grad_norm": found.grad_norm}
                values |= {"lr": found.learning_rate, "tokens": found.num_valid_tokens}
                self.log.note("step", {"step": number, **values, "skipped": found.is_skipped})
            for line in session.remarks():
                self.log.display.terminal.say(line)
            if len(self.placement.hosts) > 1:
                self.log.display.terminal.show(self.placement.table())
        if session.config.profile is not None:
            from phalanx.measure.profile import Profile

            self.profile = Profile(
                session.out,
                session.comm,
                session.strategy,
                ProfileOptions.parse(session.config.profile),
                model=session.step.model,
                optimizers=[session.step.optimizer] if self.blind_spot is None else None,
                phases=TERMS,
                say=lambda words: self.log and self.log.display.terminal.say(words, "yellow"),
            )

    def __enter__(self) -> Records:
        self._watching.enter_context(
            self.session.step.watched(lambda name: self.timer.phase(TERMS[name]))
        )
        if self.session.comm.device.type == "cpu":  # on a GPU the stream waits, not this thread
            self._watching.enter_context(around_waits(lambda _, axis: self.timer.wait(axis)))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.profile is not None:
            self.profile.close(is_failed=kind is not None)
        self._watching.close()
        if self.log is not None:
            self.log.close()

    @contextmanager
    def watching_data(self) -> Generator[None]:
        """Start a step, and count the time inside toward its data phase."""
        if self._restart_timer:
            self.timer.begin_step()
            self._restart_timer = False
        if self.profile is not None:
            self.profile.begin_step(self.session.step.steps_done + 1)
        with named("data"), self.timer.phase("data"):
            yield

    @contextmanager
    def watching(self, microbatches: Sequence[Any]) -> Generator[None]:
        """Measure the step inside: also bytes in LEDGER_STEP, and memory in MEMORY_STEP."""
        del microbatches
        step = self.session.step
        # A worker of parameter servers knows the loads of its own tokens alone.
        step.balance.is_recorded = not self.session.strategy.is_served and records_routing(
            step.steps_done + 1, self.session.num_steps
        )
        # Not in a profiled step, whose trace would have the time that a memory ledger takes.
        recorder = None if self.profile is None else self.profile.recorder
        counted: Ledger | None = recorder
        with ExitStack() as stack:
            stack.enter_context(compiling(self.session.config.compile and self.num_steps == 0))
            if recorder is not None:
                pass
            elif self.num_steps >= LEDGER_STEP and not self._has_entries:
                counted = stack.enter_context(Ledger(self.session.comm))
                stack.enter_context(step.watched(counted.phase))
            elif self.num_steps == 0 and self.session.arithmetic is None:
                stack.enter_context(self._types)
            elif self.num_steps >= MEMORY_STEP and self.memory is None and self.blind_spot is None:
                ledger = MemoryLedger(step.model, step.optimizer, self.session.comm.device)
                self._memory_ledger = stack.enter_context(ledger)
                stack.enter_context(step.watched(ledger.phase))
                if self.session.comm.device.type == "cuda" and self.profile is not None:
                    file = f"trace/memory-rank{self.session.comm.rank:04}.pickle"
                    stack.enter_context(allocator_snapshot(self.session.out / file))
            yield
        if counted is not None:
            self.entries, self._has_entries = counted.entries(), True

    def keep(self, result: StepResult) -> None:
        """Record the result of the step that was measured last."""
        session, self.last = self.session, result
        self.losses.append(result.loss)
        self._units.append(session.num_units(result))
        times = self.timer.end_step()
        self._ungathered.append(times)
        if self.profile is not None and not self.profile.is_over:
            self.profile.end_step(times.terms_s, self.timer.switches)
            self._restart_timer = True  # exclude the writing of traces from the next step
        self.num_steps += 1
        if self.num_steps == 1:
            self._measure_ceiling()
            self._restart_timer = True  # exclude the measurement from the next step
        if self._memory_ledger is not None:
            self.memory = self._memory_ledger.account()
            self._write_curves(self._memory_ledger.curve())
            self._memory_ledger = None
            self._restart_timer = True
        self.routing = result.routing or self.routing
        if self.log is None:
            return
        if result.routing is not None:
            self.log.routing(session.step.steps_done, result.loss, result.routing)
        use, num_units = self.utilization(times.wall_s, session.stream.num_rows), self._units[-1]
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
                mfu_of=of if use is None else f"{of}{use.basis}",
                times=times,
                unit=session.unit,
                skipped=result.is_skipped,
                experts="" if self.routing is None else self.routing.brief(),
            )
        )

    def evaluation(self, evaluation: Evaluation | None) -> None:
        """Record an evaluation, and exclude its time from the next step."""
        self._restart_timer = True
        if evaluation is None:
            return
        self.evaluations.append(evaluation)
        if self.log is not None:
            self.log.evaluation(evaluation.step, evaluation.loss, evaluation.metrics)

    def saved(self) -> None:
        """Judge no rank by the next step, which has the time of beginning a checkpoint."""
        self._after_save.add(self.session.step.steps_done + 1)

    def gather(self) -> None:
        """Record the times of the steps since the last call on every rank."""
        comm, times = self.session.comm, self._ungathered
        if comm.size("job") == 1 or not times:
            times.clear()
            return
        with self.timer.wait("world"):
            ranks = gather_on_first((socket.gethostname(), times))
        if self.log is not None:
            last = self.session.step.steps_done
            hosts, times_s = zip(*ranks, strict=True)
            sent: dict[str, tuple[int, float]] = {}
            for entry in self.entries:
                calls, num_bytes = sent.get(entry.axis, (0, 0.0))
                sent[entry.axis] = calls + entry.calls, num_bytes + entry.sent_bytes
            window = window_of(
                range(last - len(times) + 1, last + 1),
                hosts,
                comm.axes,
                times_s,
                saved=self._after_save,
                planned=self.session.plan.stage_parts,
                sent=sent,
            )
            self.windows.append(window)
            while self.windows[0].steps[-1] <= last - MEASURED_STEPS:
                self.windows.popleft()
            self.log.ranks(window)
        self._after_save = {
            step for step in self._after_save if step > self.session.step.steps_done
        }
        times.clear()

    def measured(self) -> list[StepTimes]:
        """Return the kept times without WARMUP_STEPS; in a shorter run those before LEDGER_STEP."""
        times = list(self.timer.history)
        num_forgotten = self.num_steps - len(times)
        return times[max(0, WARMUP_STEPS - num_forgotten) :] or times[:LEDGER_STEP]

    def utilization(
        self, time_s: float | None = None, num_rows: int | None = None
    ) -> Utilization | None:
        """Return the FLOP utilization of a step, by default of the median step on a full batch.

        With parameter servers this worker alone is measured, because its job has one rank.

        None if the FLOPs of the step, or the dtype of their arithmetic, are not known.
        """
        flops, arithmetic = self.session.flops(num_rows), self._arithmetic
        if flops is None or arithmetic is None:
            return None
        causal, full = flops
        if time_s is None:
            time_s = statistics.median(times.wall_s for times in self.measured())
        device = self.session.comm.device
        is_listed = device.type == "cuda"  # data-sheet peaks of CPUs are not listed
        return Utilization(
            causal=causal,
            full=full,
            time_s=time_s,
            num_devices=self.session.comm.size("job"),
            peak=peak_of(device_name(device), arithmetic) if is_listed else None,
            ceiling_flops_per_s=self.ceiling_flops_per_s,
        )

    @property
    def median_units(self) -> float:
        """Median tokens (or samples) of a step, over all ranks."""
        return statistics.median(self._units)

    @property
    def seconds(self) -> float:
        """Seconds since this object was created."""
        return time.perf_counter() - self._begin_s

    @property
    def blind_spot(self) -> str | None:
        """Why the memory of a step cannot be measured; None if it can."""
        config = self.session.config
        if config.compile:
            return "--compile hides the tensors inside compiled code"
        if config.debug_comm:
            # The check runs Phalanx's operators outside of other dispatch modes.
            return "--debug-comm hides the collectives that it runs"
        return None

    def _write_curves(self, curve: dict[str, Any]) -> None:
        """Gather the memory curves of all ranks; rank 0 writes them with the planner's bytes."""
        session = self.session
        curves = gather_on_first((session.comm.coord("pp"), curve))
        if self.log is not None:
            planned, predicted = session.planned(), None
            if planned is not None:
                stages = memory(planned, "cpu" if session.comm.device.type == "cpu" else "gpu")
                predicted = [
                    {"at_peak": kinds_of(of.at_peak()), "at_most": kinds_of(of.causes)}
                    for of in stages
                ]
            for rank, (stage, values) in enumerate(curves):
                values |= {"step": session.step.steps_done, "rank": rank, "stage": stage}
                self.log.note("memory", {**values, "predicted": predicted and predicted[stage]})
        barrier()  # the other ranks wait for the prediction here, not in their next step

    def _measure_ceiling(self) -> None:
        """Measure matrix products on all ranks at once; their mean rate is the MFU's ceiling."""
        comm = self.session.comm
        found = self.session.arithmetic or self._types.dominant(comm.device)
        with notice_if_slow("measuring the rate of matrix products on all ranks"):
            own = 0.0 if found is None else quick_ceiling(comm.device, found)
        rates = torch.tensor([own, own > 0], dtype=torch.float64).to(comm.device)
        total, num_known = comm.all_reduce(rates, "job").tolist()
        if num_known == comm.size("job"):
            self._arithmetic, self.ceiling_flops_per_s = found, total / comm.size("job")
            config = self.session.config
            # Compiled steps have no prediction, a check of collectives would be measured too, and a
            # short run would take longer than without.
            is_long = self.session.num_steps >= MEASURING_STEPS and not is_restarted()
            measures = is_long and not (config.compile or config.debug_comm)
            with notice_if_slow("measuring the rates that predict a step"):
                self.machine = machine_of(comm, cast(str, found), measures=measures)
