"""Run the list of a pipeline schedule on this rank.

The runner of a step over pipelines, as accumulate.py is without: a loop over the actions of the
lowered list (lowering.py), forward and backward of each microbatch, stage by stage. What a stage
makes goes to the next on this rank as it is, or passes a send and a receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Phase, no_phase
from phalanx.comm.pending import Pending
from phalanx.comm.ranges import named
from phalanx.errors import StrategyError
from phalanx.parallel.accumulate import Forward, Runner, Scale
from phalanx.parallel.pipeline.lowering import (
    lower,
    other_end,
    other_stage,
    receive_before,
    send_after,
)
from phalanx.parallel.pipeline.schedule import Action, Schedule
from phalanx.parallel.pipeline.sizes import Sizes
from phalanx.parallel.pipeline.split_backward import (
    Groups,
    backward_input,
    backward_weights,
)
from phalanx.parallel.pipeline.stage import Outline, Stages
from phalanx.parallel.reduce import GradientReducer


class Pipeline(Runner):
    """The runner of the stages of one rank.

    Attributes:
        stages: of this rank.
        weights: parameters of each of them.
        rank_of: stage -> rank.
        sizes: of what the ranks send each other.
    """

    def __init__(
        self,
        stages: Stages,
        comm: Comm,
        schedule_of: Callable[[int], Schedule],
        reducer: GradientReducer | None = None,
        replicas: Sequence[nn.Parameter] = (),
    ) -> None:
        """Run stages by the schedules that `schedule_of` has for a number of microbatches."""
        super().__init__(reducer, replicas)
        self.stages, self.comm = stages, comm
        self._schedule_of = schedule_of
        self._lists: dict[int, tuple[Action, ...]] = {}
        self.rank_of = schedule_of(1).rank_of
        self.sizes = Sizes(comm, are_fixed=stages.has_fixed_sizes)
        stages.prepare()
        # Once all axes have split the model: what fsdp gathers has other parameters for a while.
        self.weights = {stage: stages.weights(stage) for stage in stages.here}

    @override
    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        scale: Scale,
        phase: Phase = no_phase,
    ) -> None:
        step = _Step(self, microbatches, forward, scale, phase)
        for action in self._list(len(microbatches)):
            self.microbatch = action.microbatch
            with named(f"pp {action}"), phase("forward" if action.op[-1] == "F" else "backward"):
                step.run(action)
        if self.reducer is not None:
            self.reducer.finish(phase)

    @override
    @torch.no_grad()
    def infer(self, microbatch: Any, forward: Forward) -> Tensor | None:
        step = _Step(self, [microbatch], forward, lambda output: output)
        for action in self._list(1):
            if action.op[-1] == "F":
                with named(f"pp {action}"):
                    step.run(action)
        _, output = step.kept.get((self.stages.num_stages - 1, 0), (None, None))
        return output

    def _list(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return what this rank does in a step of this number of microbatches."""
        if num_microbatches not in self._lists:
            schedule = self._schedule_of(num_microbatches)
            self._lists[num_microbatches] = lower(schedule, self.comm.coord("pp"))
        return self._lists[num_microbatches]


@dataclass
class _Step:
    """The microbatches of one step on their way through this rank's stages.

    Attributes:
        values: tensors for a later compute or send, by RECEIVE, one that stays on this rank
            too.
        outlines: of the activations among them.
        kept: stage and microbatch -> input and output of a forward, until its backward.
        weight_work: likewise, what an I leaves to its W.
        sending: what has been sent, until it has been received.
        unreduced: stages of this rank whose gradients are not whole yet.
        last: parameters that the next backward reaches for the last time.
    """

    runner: Pipeline
    microbatches: Sequence[Any]
    forward_of: Forward
    scale: Scale
    phase: Phase = no_phase
    values: dict[Action, Tensor | Pending] = field(default_factory=dict)
    outlines: dict[Action, Outline] = field(default_factory=dict)
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    weight_work: dict[tuple[int, int], Groups] = field(default_factory=dict)
    sending: dict[Action, list[Pending]] = field(default_factory=dict)
    last: Sequence[nn.Parameter] = ()

    def __post_init__(self) -> None:
        self._stages = self.runner.stages
        self._last_stage = self._stages.num_stages - 1
        self.unreduced = set(self._stages.here)

    def run(self, action: Action) -> None:
        """Do one action of the list."""
        match action.op:
            case "F":
                self.forward(action)
            case "B" | "I" | "W":
                self.backward(action)
            case "SEND_F" | "SEND_B":
                self.send(action)
            case "RECV_F" | "RECV_B":
                self.receive(action)
            case "SENT_F" | "SENT_B":
                for pending in self.sending.pop(other_end(action)):
                    pending.wait()
            case "REDUCE":
                self.reduce(action)

    def forward(self, action: Action) -> None:
        """Run a stage on a microbatch."""
        _, stage, number = action
        received = None
        if (receive := receive_before(action, self._last_stage)) is not None:
            received = self.take(receive)
            self._stages.outline = self.outlines.pop(receive)
            is_trained = stage > self._stages.first_trained and torch.is_grad_enabled()
            received.requires_grad_(is_trained)
        microbatch = self.microbatches[number]
        output = self._stages.run(stage, received, lambda: self.forward_of(microbatch))
        if (send := send_after(action, self._last_stage)) is None:
            output = self.scale(output)
        else:
            self.values[other_end(send)] = output.detach()
            self.outlines[other_end(send)] = self._stages.outline
        self.kept[stage, number] = received, output

    def backward(self, action: Action) -> None:
        """Run the backward of a stage or a pass of it."""
        op, stage, number = action
        at = stage, number
        trained = [weight for weight in self.runner.weights[stage] if weight.requires_grad]
        if self.runner.reducer is not None and op != "I":
            self.runner.reducer.before_backward(self.last, self.runner.weights[stage])
            self.last = ()
        if op == "W":
            backward_weights(self.weight_work.pop(at), trained)
            return
        receive = receive_before(action, self._last_stage)
        gradient = None if receive is None else self.take(receive)
        received, output = self.kept.pop(at)
        if not output.requires_grad:  # a first stage that is not trained
            self.weight_work[at] = ()
        elif op == "B":
            output.backward(gradient)
        else:
            leaf = received if received is not None and received.requires_grad else None
            self.weight_work[at] = backward_input(output, gradient, leaf, trained)
        send = send_after(action, self._last_stage)
        if send is not None and received is not None:
            self.values[other_end(send)] = _gradient_of(received, stage)

    def take(self, receive: Action) -> Tensor:
        """Return what a receive brings, once it is there."""
        found = self.values.pop(receive)
        return found.wait() if isinstance(found, Pending) else found

    def send(self, action: Action) -> None:
        """Begin to send what a stage has made, an activation behind its header."""
        receive, stage = other_end(action), other_stage(action)
        target, tensor = self.runner.rank_of[stage], self.values.pop(receive)
        assert isinstance(tensor, Tensor), "a sent tensor was made here"
        begun = self.sending[receive] = []
        if action.op == "SEND_F":
            of, outline = self.microbatches[action.microbatch], self.outlines.pop(receive)
            with self.phase("sizes"):
                for part in self.runner.sizes.announce(stage, of, tensor, outline):
                    begun.append(self.runner.comm.send_start(part, "pp", target))
        begun.append(self.runner.comm.send_start(tensor.contiguous(), "pp", target))

    def receive(self, action: Action) -> None:
        """Begin to receive what another rank sends."""
        source = self.runner.rank_of[other_stage(action)]
        if action.op == "RECV_B":
            _, output = self.kept[action.stage, action.microbatch]
            buffer = torch.empty_like(output, memory_format=torch.contiguous_format)
        else:
            of = self.microbatches[action.microbatch]
            buffer, self.outlines[action] = self.runner.sizes.expect(action.stage, of, source)
        self.values[action] = self.runner.comm.recv_start(buffer, "pp", source)

    def reduce(self, action: Action) -> None:
        """Have the gradients of a stage reduced as its next backward makes them."""
        self.unreduced.remove(action.stage)
        later = {weight for stage in self.unreduced for weight in self.runner.weights[stage]}
        self.last = [weight for weight in self.runner.weights[action.stage] if weight not in later]


def _gradient_of(received: Tensor, stage: int) -> Tensor:
    """Return the gradient of what a stage has received; zeros if nothing before it is trained."""
    if received.grad is None and received.requires_grad:
        raise StrategyError(
            f"pp: stage {stage} gives no gradient to what it receives, as behind a detach() or "
            "under no_grad(), so that the layers before it would not be trained; freeze them by "
            "requires_grad_(False), or use dp or fsdp"
        )
    return torch.zeros_like(received) if received.grad is None else received.grad
