"""Stages of a pipeline that wait instead of computing, on the real runtime; one rank's part.

A stage that waits needs no core, so that eight of them run side by side on a machine of two. All
else is what a training step does: `Pipeline` takes the actions of the schedule, activations and
gradients are messages between processes, and backward walks a graph that autograd made:

    received -- waits I --+
                          + -- output         F waits before this graph is made
    weight ---- waits W --+

The two halves of a backward are two nodes, so that `B` runs both, and `I` and `W` one each. The
first stage receives nothing: its `I` has nothing to do, and its `W` does all of the backward.
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
    """How long a stage takes for one microbatch, in seconds.

    Attributes:
        forward_s: F.
        input_s: I, the gradient of its input.
        weights_s: W, the gradients of its weights.
    """

    forward_s: float
    input_s: float
    weights_s: float

    def of(self, action: Action) -> float:
        """Return the seconds of an action; the first stage has no gradient of an input."""
        both_s = self.input_s + self.weights_s
        if action.stage == 0:
            return {"F": self.forward_s, "B": both_s, "I": 0.0, "W": both_s}[action.op]
        return {"F": self.forward_s, "B": both_s, "I": self.input_s, "W": self.weights_s}[action.op]


@dataclass(frozen=True)
class RankRecord:
    """What one rank did.

    Attributes:
        steps: the waits of each step, in the order in which they ended, by `time.monotonic`, which
            is one clock for the processes of a host. A B is its I and its W.
        most_held: the most graphs of a forward of one stage that were there at a time.
        gradients: of the weight of each of its stages, from the last step.
    """

    steps: list[list[Span]]
    most_held: int
    gradients: dict[int, float]


class TimedStages(Stages):
    """The stages of a rank that wait.

    Attributes:
        waits: of the current step, in order.
        most_held: the most graphs of a forward of one stage that were there at a time.
    """

    has_fixed_sizes: ClassVar[bool] = True

    def __init__(
        self, num_stages: int, here: Sequence[int], times: WaitTimes, message_size: int
    ) -> None:
        """Make a weight for each of the stages `here`; messages have `message_size` numbers."""
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
        """Wait, and return as many numbers as a message has: what came in, plus the weight, 0.

        What `forward` returns is the number of the microbatch.
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
        """Wait as long as an action takes, and take down when."""
        begin_s = time.monotonic()
        time.sleep(self._times.of(action))
        self.waits.append(Span(action, begin_s, time.monotonic()))

    def hold(self, graph: object) -> None:
        """Count a graph for as long as it is there."""
        self._num_held += 1
        self.most_held = max(self.most_held, self._num_held)
        weakref.finalize(graph, self._let_go)

    def _let_go(self) -> None:
        self._num_held -= 1


class _WaitInBackward(Function):
    """The identity, whose backward waits."""

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
    """Return half the sum of squares: its gradient is `output`, so that messages carry numbers."""
    return output.square().sum() / 2


def run_rank(
    kind: str,
    chunks: int,
    num_microbatches: int,
    times: WaitTimes,
    message_size: int,
    num_steps: int,
) -> RankRecord:
    """Run the schedule on this rank of a pipeline; the ranks begin each step together.

    One step comes before the kept ones: in it the ranks learn the sizes of messages, and connect.

    Args:
        kind: of `schedule.KINDS`.
        chunks: stages a rank, of kinds that leave it open.
        num_microbatches: of a step.
        times: of each stage.
        message_size: numbers of a message, float32.
        num_steps: to keep.
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
