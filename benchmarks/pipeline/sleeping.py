"""A pipeline schedule as planned and as measured, with stages that sleep instead of computing.

    python benchmarks/pipeline/sleeping.py 1f1b --microbatches 8 --forward-ms 50 --steps 7 [--svg F]

The plan is the simulation that `phalanx show` prints. The measurement runs the same actions on
processes of this host with the training runtime, so the difference is the cost of the runtime and
of the messages. The options are those of `phalanx show 1f1b`, and --steps; --trace writes the
measured timeline.

A sleeping stage needs no core, so eight stages run in parallel on a machine with two cores. All
else is as in a training step: `Pipeline` runs the actions of the schedule, activations and
gradients are messages between processes, and backward runs an autograd graph:

    received -- waits I --+
                          + -- output         F waits before this graph is built
    weight ---- waits W --+

The two halves of a backward are two nodes: `B` runs both, and `I` and `W` run one each. The first
stage receives nothing, so its `I` does nothing, and its `W` runs the complete backward.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.config.command_line import read_command_line
from phalanx.config.fields import Range
from phalanx.launch.local import run_ranks
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.schedule import Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import Span, Timeline
from phalanx.parallel.pipeline.stage import Stages
from phalanx.planner.stages import write_trace
from phalanx.report.terminal import Terminal
from phalanx.show.animation import draw
from phalanx.show.schedules import (
    ShowSchedule,
    StageDurations,
    outcome_of,
    schedule_of,
    show_schedule,
    stage_times,
)
from phalanx.show.shown import Lanes, Outcome
from phalanx.show.tables import printed

MESSAGE_NUMBERS: Final = 1024
"""Number of float32 values of an activation, and of its gradient."""

DISTURBED: Final = 0.02
"""Relative excess of the measured waits above which a remark on a disturbed machine is shown."""


@dataclass(frozen=True, kw_only=True)
class MeasureSchedule(ShowSchedule):
    """Run a pipeline schedule with stages that sleep, beside its plan."""

    steps: Annotated[int, Range(1, 100, "[]")] = 3
    """Steps to measure, after one that warms up."""


@dataclass(frozen=True)
class RankRecord:
    """Measurements of one rank.

    Attributes:
        steps: waits of each step, in order of their ends, in seconds of `time.monotonic`, a clock
            that all processes of a host share. A `B` appears as an `I` and a `W`.
        most_held: peak number of forward graphs, each of one stage, alive at the same time.
        gradients: stage -> gradient of its weight in the last step.
    """

    steps: list[list[Span]]
    most_held: int
    gradients: dict[int, float]


class TimedStages(Stages):
    """The stages of a rank, which sleep instead of computing.

    Attributes:
        waits: waits of the current step, in order.
        most_held: peak number of forward graphs, each of one stage, alive at the same time.
    """

    has_fixed_sizes: ClassVar[bool] = True

    def __init__(
        self, num_stages: int, here: Sequence[int], times: StageDurations, message_size: int
    ) -> None:
        """Create a weight for each stage in `here`; messages have `message_size` float32 values."""
        super().__init__([range(stage, stage + 1) for stage in range(num_stages)], here)
        self.waits: list[Span] = []
        self.most_held = 0
        self._times = times
        self._message_size = message_size
        self._weights = {stage: nn.Parameter(torch.zeros(())) for stage in here}
        self._num_held = 0

    @override
    def weights(self, stage: int) -> list[nn.Parameter]:
        return [self._weights[stage]]

    @override
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        """Sleep, and return `received` plus the weight, which is 0, as a message.

        `forward` returns the number of the microbatch, which fills the message of the first stage.
        """
        microbatch = int(forward())
        self.wait(Action("F", stage, microbatch))
        weight = _wait_in_backward(
            self._weights[stage], self, Action("W", stage, microbatch), is_counted=True
        )
        if received is None:
            return torch.full((self._message_size,), float(microbatch)) + weight
        return _wait_in_backward(received, self, Action("I", stage, microbatch)) + weight

    def wait(self, action: Action) -> None:
        """Sleep for the time of an action, and record its span."""
        begin_s = time.monotonic()
        time.sleep(self._times.of(action))
        self.waits.append(Span(action, begin_s, time.monotonic()))

    def hold(self, graph: object) -> None:
        """Count a forward graph until it is freed."""
        self._num_held += 1
        self.most_held = max(self.most_held, self._num_held)
        weakref.finalize(graph, self._let_go)

    def _let_go(self) -> None:
        self._num_held -= 1


class _WaitInBackward(Function):
    """Identity function whose backward sleeps."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, stages: TimedStages, action: Action, is_counted: bool
    ) -> Tensor:
        ctx.stages, ctx.action = stages, action
        if is_counted:
            stages.hold(ctx)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.stages.wait(ctx.action)
        return gradients[0], None, None, None


def _wait_in_backward(
    tensor: Tensor, stages: TimedStages, action: Action, is_counted: bool = False
) -> Tensor:
    return cast(Tensor, _WaitInBackward.apply(tensor, stages, action, is_counted))


def half_square(output: Tensor) -> Tensor:
    """Return half the sum of squares, whose gradient is `output`, so that messages are not zero."""
    return output.square().sum() / 2


def run_rank(
    kind: str,
    chunks: int,
    num_microbatches: int,
    times: StageDurations,
    message_size: int,
    num_steps: int,
) -> RankRecord:
    """Run the schedule on this rank of a pipeline; a barrier starts each step.

    A warm-up step precedes the recorded steps: it connects the ranks and exchanges message sizes.

    Args:
        kind: kind in `schedule.KINDS`.
        chunks: stages per rank, for kinds with a variable number.
        num_microbatches: microbatches of a step.
        times: times of each stage.
        message_size: number of float32 values of a message.
        num_steps: number of recorded steps.
    """
    comm = Ranks({"pp": torch.distributed.get_world_size()})
    schedule = build_schedule(kind, comm.size("pp"), num_microbatches, chunks)
    here = schedule.stages_of(comm.coord("pp"))
    stages = TimedStages(schedule.num_stages, here, times, message_size)
    pipeline = Pipeline(stages, comm, lambda _: schedule)
    steps: list[list[Span]] = []
    for _ in range(1 + num_steps):
        stages.waits = []
        for stage in here:
            stages.weights(stage)[0].grad = None
        barrier()
        pipeline(range(num_microbatches), torch.tensor, half_square)
        steps.append(stages.waits)
    gradients: dict[int, float] = {}
    for stage in here:
        gradient = stages.weights(stage)[0].grad
        assert gradient is not None, "every stage has run its backward"
        gradients[stage] = float(gradient)
    return RankRecord(steps[1:], stages.most_held, gradients)


def measure(config: MeasureSchedule, schedule: Schedule, times: StageDurations) -> Outcome:
    """Run the schedule on processes of this host, and measure its timeline."""
    records: list[RankRecord] = run_ranks(
        run_rank,
        config.ranks,
        schedule.kind,
        len(schedule.stages_of(0)),
        config.microbatches,
        times,
        MESSAGE_NUMBERS,
        config.steps,
        threads=1,
    )
    timeline = measured_timeline(schedule, records)
    held = [record.most_held for record in records]
    return outcome_of("measured", timeline, held, schedule, times)


def measured_timeline(schedule: Schedule, records: Sequence[RankRecord]) -> Timeline:
    """Return a timeline of the median begin and end of each action over the steps.

    Time 0 of a step is the begin of its first action on any rank. Medians keep the order: if in
    every step one action starts after another has ended, it does so in the medians too.
    """
    steps: list[list[list[Span]]] = []
    for waits in zip(*(record.steps for record in records), strict=True):
        begin_s = min(of_rank[0].begin for of_rank in waits)
        lanes = map(joined, schedule.orders, waits)
        steps.append([[Span(a, b - begin_s, e - begin_s) for a, b, e in lane] for lane in lanes])
    lanes = (
        tuple(
            Span(
                same[0].action,
                statistics.median(span.begin for span in same),
                statistics.median(span.end for span in same),
            )
            for same in zip(*of_rank, strict=True)
        )
        for of_rank in zip(*steps, strict=True)
    )
    return Timeline(tuple(lanes))


def joined(order: Sequence[Action], waits: Sequence[Span]) -> list[Span]:
    """Return the span of each action of a rank from its waits, which are in execution order."""
    expected = [part for action in order for part in parts_of(action)]
    assert [wait.action for wait in waits] == expected, "a rank runs its actions in their order"
    left, spans = iter(waits), list[Span]()
    for action in order:
        parts = [next(left) for _ in parts_of(action)]
        at = spans[-1].end if spans else waits[0].begin
        ends = [each for part in parts for each in (part.begin, part.end)] or [at]
        spans.append(Span(action, ends[0], ends[-1]))
    return spans


def parts_of(action: Action) -> list[Action]:
    """Return the waits that make up an action; see `StageDurations.of`."""
    if action.stage == 0:
        return {"F": [action], "I": []}.get(action.op, [action._replace(op="W")])
    return [action] if action.op != "B" else [action._replace(op=op) for op in ("I", "W")]


def remarks(config: MeasureSchedule, measured: Outcome) -> list[str]:
    """Return sentences on the meaning of the figures, and on disturbance by other work."""
    lines = [f"Measured is the median of {config.steps} steps: stages sleep, messages are real."]
    longer = sum(measured.busy) * measured.timeline.length / measured.work_s - 1
    if longer > DISTURBED:
        lines.append(
            f"Stages waited {100 * longer:.1f} % longer than asked: other work disturbed the "
            "machine, or --forward-ms is too short for its clock."
        )
    return lines


def main() -> None:
    kind, *words = sys.argv[1:]
    config = read_command_line(words, MeasureSchedule, prog=f"sleeping.py {kind}")
    schedule = schedule_of(kind, config)
    shown = show_schedule(kind, dataclasses.replace(config, trace=None))
    measured = measure(config, schedule, stage_times(config, schedule))
    parts = [
        Lanes(schedule, [*part.outcomes, measured]) if isinstance(part, Lanes) else part
        for part in shown.parts
    ]
    shown = dataclasses.replace(shown, parts=[*parts, *remarks(config, measured)])
    Terminal().show(*printed(shown))
    if config.svg is not None:
        draw(shown, Path(config.svg))
    if config.trace is not None:
        write_trace(measured.timeline, Path(config.trace))


if __name__ == "__main__":
    main()
