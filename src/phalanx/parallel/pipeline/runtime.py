"""Run this rank's actions of a pipeline schedule.

`Pipeline` is the runner of a step with pp, as `Accumulate` (accumulate.py) is without pp. It loops
over the lowered actions (lowering.py): forwards and backwards of microbatches in the rank's stages,
sends, receives and reductions. A tensor between two stages of one rank is passed without a copy.

One microbatch in two stages, 0 on rank a and 1 on rank b. A tensor between stages is in `values`
under the receive that it belongs to, and time runs down:

    rank a      takes                           stores
    0F0                                         kept[0, 0]  values[1RECV_F0]
    0SEND_F0    values[1RECV_F0]                sending[1RECV_F0]
    0SENT_F0    sending[1RECV_F0]
    0RECV_B0                                    values[0RECV_B0], pending
    0B0         kept[0, 0]  values[0RECV_B0]

    rank b
    1RECV_F0                                    values[1RECV_F0], pending
    1F0         values[1RECV_F0]                kept[1, 0]
    1B0         kept[1, 0]                      values[0RECV_B0]
    1SEND_B0    values[0RECV_B0]                sending[0RECV_B0]
    1SENT_B0    sending[0RECV_B0]

With both stages on one rank, 1F0 takes what 0F0 has stored, and 0B0 what 1B0 has stored.
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
    """The runner of a rank's pipeline stages.

    Attributes:
        stages: the stages of this rank.
        weights: stage of this rank -> its parameters.
        rank_of: stage -> rank.
        sizes: shapes and dtypes of the activations that ranks exchange.
    """

    def __init__(
        self,
        stages: Stages,
        comm: Comm,
        schedule_of: Callable[[int], Schedule],
        reducer: GradientReducer | None = None,
        replicas: Sequence[nn.Parameter] = (),
    ) -> None:
        """Prepare `stages`; `schedule_of` returns the schedule for a number of microbatches."""
        super().__init__(reducer, replicas)
        self.stages, self.comm = stages, comm
        self._schedule_of = schedule_of
        self._lists: dict[int, tuple[Action, ...]] = {}
        self.rank_of = schedule_of(1).rank_of
        self.sizes = Sizes(comm, are_fixed=stages.has_fixed_sizes)
        stages.prepare()
        # Read now, when all axes have split the model: a gathered fsdp group has other parameters.
        self.weights = {stage: stages.weights(stage) for stage in stages.local_stages}

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
    def infer(self, microbatch: Any, forward: Forward, phase: Phase = no_phase) -> Tensor | None:
        step = _Step(self, [microbatch], forward, lambda output: output, phase)
        for action in self._list(1):
            if action.op[-1] == "F":
                with named(f"pp {action}"):
                    step.run(action)
        _, output = step.kept.get((self.stages.num_stages - 1, 0), (None, None))
        return output

    def _list(self, num_microbatches: int) -> tuple[Action, ...]:
        """Return this rank's lowered actions for a step of `num_microbatches`; cached."""
        if num_microbatches not in self._lists:
            schedule = self._schedule_of(num_microbatches)
            self._lists[num_microbatches] = lower(schedule, self.comm.coord("pp"))
        return self._lists[num_microbatches]


@dataclass
class _Step:
    """The state of one step on this rank: the tensors of its microbatches.

    Attributes:
        values: receive -> the tensor or pending receive for a later compute or send; a tensor that
            stays on this rank is stored under the receive that would match its send.
        outlines: receive -> outline of the activation in `values`.
        kept: stage and microbatch -> input and output of a forward, until its backward.
        weight_work: stage and microbatch -> inputs of W that I has left, until W.
        sending: receive -> the pending sends that it matches, until SENT.
        unreduced: stages of this rank whose last backward of the step has not begun.
        last: parameters that the next backward reaches for the last time in the step.
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
        self.unreduced = set(self._stages.local_stages)

    def run(self, action: Action) -> None:
        """Run one action."""
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
        """Run the forward of a stage on a microbatch, and store its output."""
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
            # Without the graph: backward of the next stage may run on this rank too, and would else
            # enter this stage before its own B.
            self.values[other_end(send)] = output.detach()
            self.outlines[other_end(send)] = self._stages.outline
        self.kept[stage, number] = received, output

    def backward(self, action: Action) -> None:
        """Run the full backward (B) of a stage, or the pass for its input (I) or weights (W)."""
        op, stage, number = action
        at = stage, number
        trained = [weight for weight in self.runner.weights[stage] if weight.requires_grad]
        if self.runner.reducer is not None and op != "I":
            # I computes no gradient of a weight, so a reduction that is due waits for the W.
            self.runner.reducer.before_backward(self.last, self.runner.weights[stage])
            self.last = ()
        if op == "W":
            backward_weights(self.weight_work.pop(at), trained)
            return
        receive = receive_before(action, self._last_stage)
        gradient = None if receive is None else self.take(receive)
        received, output = self.kept.pop(at)
        if not output.requires_grad:  # a first stage whose parameters are all frozen
            self.weight_work[at] = ()
        elif op == "B":
            output.backward(gradient)
        else:
            leaf = received if received is not None and received.requires_grad else None
            self.weight_work[at] = backward_input(output, gradient, leaf, trained)
        send = send_after(action, self._last_stage)
        if send is not None and received is not None:
            if received.grad is None and received.requires_grad:
                raise StrategyError(
                    f"pp: stage {stage} computes no gradient of its input, as after a detach() or "
                    "under no_grad(), so the layers before this stage would not be trained; freeze "
                    "them by requires_grad_(False), or use dp or fsdp"
                )
            # Zeros if no earlier parameter is trained.
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self.values[other_end(send)] = gradient

    def take(self, receive: Action) -> Tensor:
        """Return the tensor of a receive; wait until it has arrived."""
        value = self.values.pop(receive)
        return value.wait() if isinstance(value, Pending) else value

    def send(self, action: Action) -> None:
        """Start to send a stage's activation, after its header, or a gradient."""
        receive, stage = other_end(action), other_stage(action)
        target, tensor = self.runner.rank_of[stage], self.values.pop(receive)
        assert isinstance(tensor, Tensor), "a sent tensor was made here"
        begun = self.sending[receive] = []
        if action.op == "SEND_F":
            of, outline = self.microbatches[action.microbatch], self.outlines.pop(receive)
            with self.phase("sizes"):
                for part in self.runner.sizes.announce(stage, of, tensor, outline):
                    begun.append(self.runner.comm.send_start(part, "pp", target))
        # Pending sends keep the tensors that are on their way: the next
        # forward may run before the peer has received, and the rank waits for the end at SENT.
        begun.append(self.runner.comm.send_start(tensor.contiguous(), "pp", target))

    def receive(self, action: Action) -> None:
        """Start to receive an activation, after its header if there is one, or a gradient."""
        source = self.runner.rank_of[other_stage(action)]
        if action.op == "RECV_B":
            _, output = self.kept[action.stage, action.microbatch]
            buffer = torch.empty_like(output, memory_format=torch.contiguous_format)
        else:
            of = self.microbatches[action.microbatch]
            buffer, self.outlines[action] = self.runner.sizes.expect(action.stage, of, source)
        self.values[action] = self.runner.comm.recv_start(buffer, "pp", source)

    def reduce(self, action: Action) -> None:
        """Make the next backward of a stage reduce its gradients, except of shared parameters.

        A parameter that another unreduced stage reads is reduced with that stage.
        """
        self.unreduced.remove(action.stage)
        #   stages 0 and 3 on this rank, both read the tied weight:
        #   ... REDUCE3 B3    last = weights of stage 3 without the tied one
        #   ... REDUCE0 B0    last = weights of stage 0 with the tied one
        later = {weight for stage in self.unreduced for weight in self.runner.weights[stage]}
        self.last = [weight for weight in self.runner.weights[action.stage] if weight not in later]
