"""Profile steps of a run on each rank: the trace of torch.profiler, and the spans of each step.

    RUN/trace/rank3.1700000000000000000.pt.trace.json       a cycle of steps, by torch.profiler
    RUN/trace/spans/step0000012/rank0003.jsonl              a step, see measure/spans.py

    step       1      2        3        4        5
    cycle      wait | warmup | active | active |
    torch             warms up, records ....... writes
    spans                      written  written
    clocks                   compared          compared

Ranks communicate at both ends of the active steps only. A rank that cannot write continues until
then, and all ranks end the profile together.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import (
    ProfilerAction,
    ProfilerActivity,
    profile,
    schedule,
    tensorboard_trace_handler,
)

from phalanx.comm.comm import Comm
from phalanx.comm.ranges import around_ranges
from phalanx.comm.together import first_object, reason_of
from phalanx.config.profile_options import ProfileOptions
from phalanx.measure import clock
from phalanx.measure.memory import MemoryLedger
from phalanx.measure.span_recorder import SpanRecorder
from phalanx.measure.spans import ComputeSpan, CounterSample, StepSpans, WaitSpan
from phalanx.parallel.skeleton import blocks_of
from phalanx.strategy import Strategy

_ACTIVE = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Profile:
    """The profile of a run on one rank; a loop calls `begin_step` and `end_step` on all ranks.

    Attributes:
        recorder: recorder of the current step; None unless the step is active.
        is_over: whether no later step will be observed.
    """

    def __init__(
        self,
        run: Path,
        comm: Comm,
        strategy: Strategy,
        options: ProfileOptions,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        phases: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Observe the first step if it is due; every rank calls this together.

        Args:
            run: folder of the run.
            comm: communicator of the job.
            strategy: strategy of the run.
            options: which steps are profiled, and what of them.
            model: model whose blocks are named.
            optimizers: its optimizers; None if the memory of a step cannot be counted.
            phases: range of a phase -> term of the step ledger, see `SpanRecorder`.
            say: prints a sentence for the user; called on rank 0.
        """
        self.recorder: SpanRecorder | None = None
        self.is_over = False
        self._run, self._comm, self._strategy, self._options = run, comm, strategy, options
        self._model, self._phases, self._say = model, phases, say
        self._optimizers = optimizers if options.profile_memory else None
        self._memory: MemoryLedger | None = None
        cycle = {"wait": options.wait, "warmup": options.warmup, "active": options.active}
        self._action_of = schedule(**cycle, repeat=options.repeat)
        self._num_steps, self._step = 0, 0
        self._profiler: profile | None = None
        self._is_recording = False
        self._failure: str | None = None
        self._open = ExitStack()
        self._folder = run / "trace"
        self._partial = self._folder / f".rank{comm.rank}"  # of a trace that is not whole
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch prints its start and end
        shutil.rmtree(self._partial, ignore_errors=True)  # of a run that was killed
        self._prepare()

    @property
    def _action(self) -> ProfilerAction:
        return self._action_of(self._num_steps)

    def begin_step(self, step: int) -> None:
        """Begin a step, `step` counted from 1 in the run; drop a step that has begun already."""
        self._open.close()
        self._step, self.recorder = step, None
        if self.is_over or self._action not in _ACTIVE:
            return
        self.recorder = SpanRecorder(self._comm, self._phases)
        # torch's name of a step, by which tools find it.
        self._open.enter_context(record_function(f"ProfilerStep#{self._num_steps}"))
        self._open.enter_context(self.recorder)
        self._open.enter_context(self.recorder.around_blocks(blocks_of(self._model)))
        if self._optimizers is not None:
            memory = self._memory = MemoryLedger(self._model, self._optimizers, self._comm.device)

            def in_range(name: str, _: str) -> AbstractContextManager[None]:
                return memory.phase(name) if name in self._phases else nullcontext()

            self._open.enter_context(around_ranges(in_range))
            self._open.enter_context(memory)

    def end_step(
        self, terms_s: Mapping[Any, float] | None = None, switches: Sequence[tuple[Any, Any]] = ()
    ) -> None:
        """End the step and write its spans; after the last active step also torch's trace.

        Args:
            terms_s: seconds by term of the step ledger; the sums of the spans if None.
            switches: switches of the step's `StepTimer`.
        """
        if self.is_over:
            return
        if (recorder := self.recorder) is not None:
            end_s = clock.now()
            self._open.close()
            self.recorder = None
            self._keep(lambda: self._write(recorder, end_s, terms_s, switches))
            if self._action == ProfilerAction.RECORD_AND_SAVE:
                self._finish()
        self._num_steps += 1
        if not self.is_over:
            self._prepare()

    def close(self, *, is_failed: bool) -> None:
        """End the profile; write what was recorded of a cycle unless the run failed."""
        self._open.close()
        if self._is_recording and not is_failed:
            self._finish()
        elif self._profiler is not None:
            if not self._is_recording:  # as torch.profiler ends a warm-up
                self._profiler.start_trace()
            self._profiler.stop_trace()
        self._profiler, self.is_over = None, True

    def _prepare(self) -> None:
        """Prepare what the next step needs."""
        action = self._action
        if action == ProfilerAction.NONE:
            cycle = self._options.wait + self._options.warmup + self._options.active
            num_steps = self._options.repeat * cycle
            self.is_over = 0 < num_steps <= self._num_steps
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if self._comm.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            names = ("record_shapes", "profile_memory", "with_stack", "with_flops")
            switches = {name: getattr(self._options, name) for name in names}
            self._profiler = profile(activities=activities, **switches)
            self._profiler.prepare_trace()
        if action in _ACTIVE and not self._is_recording:
            self._keep(lambda: clock.compare(self._run, self._comm))
            self._profiler.start_trace()
            self._is_recording = True

    def _finish(self) -> None:
        """Write torch's trace of a cycle; end the profile if a rank could not write."""
        assert self._profiler is not None
        self._profiler.stop_trace()
        profiler, self._profiler, self._is_recording = self._profiler, None, False
        self._keep(lambda: clock.compare(self._run, self._comm))
        self._keep(lambda: self._export(profiler))
        if (failure := first_object(self._failure)) is not None:
            self.is_over = True
            if self._comm.is_first:
                self._say(f"the profile ends, because it cannot be written: {failure}")

    def _keep(self, work: Callable[[], object]) -> None:
        """Run `work`, which writes a file or is a collective that may; note that it failed."""
        try:
            work()
        except OSError as error:
            self._failure = self._failure or reason_of(error)

    def _write(
        self,
        recorder: SpanRecorder,
        end_s: float,
        terms_s: Mapping[Any, float] | None,
        switches: Sequence[tuple[Any, Any]],
    ) -> None:
        if self._failure is not None:
            return
        times_s = [at_s for _, at_s in switches if isinstance(at_s, float)]  # a GPU's are events
        begin_s, end_s = (times_s[0], times_s[-1]) if times_s else (recorder.begin_s, end_s)
        spans = recorder.spans(begin_s, end_s, switches if times_s else ())
        if self._memory is not None:
            curve = self._memory.curve()["curve"]
            for at_s, *held in zip(curve["at_s"], *curve["bytes"].values(), strict=True):
                at_s = min(max(self._memory.begin_s + at_s, begin_s), end_s)
                spans.append(
                    CounterSample(at_s, "memory", dict(zip(curve["bytes"], held, strict=True)))
                )
        if terms_s is None:
            terms_s = defaultdict[Any, float](float)
            for span in spans:
                if isinstance(span, ComputeSpan | WaitSpan):
                    terms_s[span.term] += span.end_s - span.begin_s
        StepSpans(
            step=self._step,
            rank=self._comm.rank,
            num_ranks=self._comm.size("job"),
            host=socket.gethostname(),
            strategy=str(self._strategy),
            axes=self._comm.axes,
            coords={axis: self._comm.coord(axis) for axis in self._comm.axes},
            begin_s=begin_s,
            end_s=end_s,
            unix_s=time.time() - clock.now() + begin_s,
            terms_s=dict(terms_s),
            spans=spans,
            device=self._comm.device.type,
        ).write(self._run)

    def _export(self, profiler: profile) -> None:
        """Write torch's trace beside its place, and move it there once it is whole."""
        if self._failure is not None:
            return
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            name = f"rank{self._comm.rank}"
            tensorboard_trace_handler(str(self._partial), worker_name=name)(profiler)
            for file in self._partial.glob("*.json"):
                with file.open("rb") as trace:  # torch says nothing of a full disk
                    trace.seek(max(0, file.stat().st_size - 4096))
                    if not (end := trace.read().rstrip()).endswith(b"}") or b"traceName" not in end:
                        raise OSError(f"the disk has no room for {self._folder / file.name}")
                file.replace(self._folder / file.name)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
