"""Pipeline stages that sleep instead of computing, run by the training runtime on one rank.

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

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.schedule import Action, build_schedule
from phalanx.parallel.pipeline.simulate import Span
from phalanx.parallel.pipeline.stage import Stages


class WaitTimes(NamedTuple):
    """Times of a stage for one microbatch.

    Attributes:
        forward_s: forward F, seconds.
        input_s: gradient of the input I, seconds.
        weights_s: gradients of the weights W, seconds.
    """

    forward_s: float
    input_s: float
    weights_s: float

    def of(self, action: Action) -> float:
        """Return the time of an action, seconds; the first stage has no gradient of an input."""
        both_s = self.input_s + self.weights_s
        if action.stage == 0:
            return {"F": self.forward_s, "B": both_s, "I": 0.0, "W": both_s}[action.op]
        return {"F": self.forward_s, "B": both_s, "I": self.input_s, "W": self.weights_s}[action.op]


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
        self, num_stages: int, here: Sequence[int], times: WaitTimes, message_size: int
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
    times: WaitTimes,
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
