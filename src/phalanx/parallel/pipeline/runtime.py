"""Run the actions of a pipeline schedule on this rank.

The runner of a step over pipelines, as accumulate.py is without: forward and backward of each
microbatch, stage by stage, in the order of the schedule. A stage sends its output on as soon as it
has it, and waits for its input only where the schedule needs it.

A stage receives what another rank sends in the order in which that rank sends it, which the
schedule says. Both sides know the shape and the data type of each message, and it is contiguous on
both: an activation is announced by a header, and its gradient is like it. Where the shapes of a
microbatch decide those of its activations, a header announces the first of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Phase, no_phase
from phalanx.comm.pending import Pending
from phalanx.errors import StrategyError
from phalanx.parallel.accumulate import Forward, Runner, ShareOf
from phalanx.parallel.pipeline.schedule import Action, Schedule
from phalanx.parallel.pipeline.split_backward import (
    Groups,
    backward_input,
    backward_weights,
)
from phalanx.parallel.pipeline.stage import Outline, Stages
from phalanx.parallel.reduce import GradientReducer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What activations may be of; a header has the number."""

HEADER_SIZE = 3 + 64
"""Numbers of a header: data type, length of an outline that follows, dimensions, and sizes, of
which torch computes on 64 at most."""

HEADER_BYTES = HEADER_SIZE * torch.int64.itemsize


class Message(NamedTuple):
    """What one stage sends another of a microbatch.

    Attributes:
        is_gradient: of what the receiver sent before; else an activation.
        stage: of the receiver.
    """

    is_gradient: bool
    stage: int
    microbatch: int


def sent_after(action: Action, last_stage: int) -> Message | None:
    """Return what an action's stage sends when it has run, if anything."""
    op, stage, microbatch = action
    if op == "F" and stage < last_stage:
        return Message(False, stage + 1, microbatch)
    if op in ("B", "I") and stage > 0:
        return Message(True, stage - 1, microbatch)
    return None


class Sizes:
    """Shapes and data types of activations, which headers announce."""

    def __init__(self, comm: Comm, *, are_fixed: bool) -> None:
        """Announce each activation; if sizes `are_fixed`, the first of a microbatch's shapes."""
        self._comm = comm
        self._are_fixed = are_fixed
        self._known: dict[tuple[int, Any], tuple[torch.Size, torch.dtype]] = {}
        self._outlines: dict[int, Outline] = {}

    def announce(
        self, stage: int, microbatch: Any, tensor: Tensor, outline: Outline
    ) -> list[Tensor]:
        """Return what to send before an activation; nothing where the receiver knows its sizes.

        Args:
            stage: that is to receive the activation.
            microbatch: of which it is.
            tensor: the activation.
            outline: `Stages.outline` with it, which is sent if it is not the last one.

        Raises:
            StrategyError: the tensor is of a data type that stages do not send.
        """
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise StrategyError(
                f"pp: stage {stage} is to be sent a tensor of {tensor.dtype}; expected one of "
                f"{kinds}: choose another cut, or convert the tensor within a layer"
            )
        if self._are_fixed:
            key, found = _key(stage, microbatch), (tensor.shape, tensor.dtype)
            if key in self._known:
                assert found == self._known[key], "the shapes of a microbatch decide the sizes"
                return []
            self._known[key] = found
        is_new = self._outlines.get(stage, ()) != outline
        self._outlines[stage] = outline
        length = len(outline) if is_new else 0
        sizes = [DTYPES.index(tensor.dtype), length, tensor.ndim, *tensor.shape]
        parts = [sizes + [0] * (HEADER_SIZE - len(sizes)), *([outline] if is_new else [])]
        return [torch.tensor(part).to(self._comm.device) for part in parts]

    def expect(self, stage: int, microbatch: Any, source: int) -> tuple[Tensor, Outline]:
        """Return an empty tensor for what `stage` is to receive of the microbatch, and outline."""
        key = _key(stage, microbatch) if self._are_fixed else None
        if key is not None and key in self._known:
            shape, dtype = self._known[key]
            return torch.empty(shape, dtype=dtype, device=self._comm.device), ()
        kind, length, ndim, *sizes = self._receive(HEADER_SIZE, source)
        if length:
            self._outlines[stage] = self._receive(length, source)
        shape, dtype = torch.Size(sizes[:ndim]), DTYPES[kind]
        if key is not None:
            self._known[key] = shape, dtype
        buffer = torch.empty(shape, dtype=dtype, device=self._comm.device)
        return buffer, self._outlines.get(stage, ())

    def _receive(self, length: int, source: int) -> Outline:
        numbers = torch.empty(length, dtype=torch.int64, device=self._comm.device)
        return tuple(self._comm.recv_start(numbers, "pp", source).wait().tolist())


def _key(stage: int, microbatch: Any) -> tuple[int, Any]:
    """Return what the sizes of an activation depend on."""
    return stage, tuple(_shapes(microbatch))


def _shapes(value: Any) -> Iterator[torch.Size]:
    """Yield the shapes of the tensors in a value, in dataclasses too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf.shape
        elif is_dataclass(leaf):
            yield from _shapes(vars(leaf))


class Pipeline(Runner):
    """The runner of the stages of one rank.

    Attributes:
        stages: of this rank.
    """

    def __init__(
        self,
        stages: Stages,
        comm: Comm,
        schedule_of: Callable[[int], Schedule],
        reducer: GradientReducer | None = None,
        copies: Sequence[nn.Parameter] = (),
    ) -> None:
        """Run stages by the schedules that `schedule_of` has for a number of microbatches."""
        super().__init__(reducer, copies)
        self.stages = stages
        self._comm = comm
        self._schedule_of = schedule_of
        self._sizes = Sizes(comm, are_fixed=stages.has_fixed_sizes)
        stages.prepare()
        # Once all axes have split the model: what fsdp gathers has other parameters for a while.
        self._weights = {stage: stages.weights(stage) for stage in stages.here}

    @override
    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        share_of: ShareOf,
        phase: Phase = no_phase,
    ) -> None:
        schedule = self._schedule_of(len(microbatches))
        order = schedule.orders[self._comm.coord("pp")]
        step = _Step(
            schedule, self.stages, self._weights, self._comm, self._sizes, microbatches, phase
        )
        lasts = self._lasts(order)
        for at, action in enumerate(order):
            self.microbatch = action.microbatch
            if action.op == "F":
                with phase("forward"):
                    step.forward(action, forward, share_of)
                continue
            with phase("backward"):
                if self.reducer is not None and action.op != "I":
                    self.reducer.before_backward(lasts[at], self._weights[action.stage])
                step.backward(action)
        with phase("backward"):
            step.finish_sends()
        if self.reducer is not None:
            self.reducer.finish(phase)

    @override
    @torch.no_grad()
    def infer(self, microbatch: Any, forward: Forward) -> Tensor | None:
        schedule, here = self._schedule_of(1), self._comm.coord("pp")
        output: Tensor | None = None
        for stage in self.stages.here:
            received = None
            if stage > 0:
                source = schedule.rank_of[stage - 1]
                if source == here:
                    received = output
                else:
                    buffer, self.stages.outline = self._sizes.expect(stage, microbatch, source)
                    received = self._comm.recv_start(buffer, "pp", source).wait()
            output = self.stages.run(stage, received, lambda: forward(microbatch))
            if stage + 1 < self.stages.num_stages:
                target = schedule.rank_of[stage + 1]
                if target != here:
                    outline = self.stages.outline
                    parts = self._sizes.announce(stage + 1, microbatch, output, outline)
                    for part in (*parts, output):
                        self._comm.send_start(part.contiguous(), "pp", target).wait()
        return output if self.stages.num_stages - 1 in self.stages.here else None

    def _lasts(self, order: Sequence[Action]) -> list[list[nn.Parameter]]:
        """Return of each action the parameters that get no gradient after it."""
        ends = {action.stage: at for at, action in enumerate(order) if action.op in ("B", "W")}
        last_at: dict[nn.Parameter, int] = {}
        for stage, at in ends.items():
            for weight in self._weights[stage]:
                last_at[weight] = max(at, last_at.get(weight, at))
        lasts: list[list[nn.Parameter]] = [[] for _ in order]
        for weight, at in last_at.items():
            lasts[at].append(weight)
        return lasts


@dataclass
class _Step:
    """The microbatches of one step on their way through this rank's stages."""

    schedule: Schedule
    stages: Stages
    weights: Mapping[int, Sequence[nn.Parameter]]
    comm: Comm
    sizes: Sizes
    microbatches: Sequence[Any]
    phase: Phase
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    arrived: dict[Message, Tensor | Pending] = field(default_factory=dict)
    outlines: dict[Message, Outline] = field(default_factory=dict)
    weight_work: dict[tuple[int, int], Groups] = field(default_factory=dict)
    sent: dict[int, list[tuple[int, Pending]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        here, last = self.comm.coord("pp"), self.schedule.num_stages - 1
        self._last = last
        # Of every forward, and every backward or input half: where it stands in its rank's order.
        self._position = {
            (action.op != "F", action.stage, action.microbatch): position
            for order in self.schedule.orders
            for position, action in enumerate(order)
            if action.op != "W"
        }
        self._due: dict[int, Iterator[Message]] = {
            rank: iter(
                [
                    message
                    for action in order
                    if (message := sent_after(action, last))
                    and self.schedule.rank_of[message.stage] == here
                ]
            )
            for rank, order in enumerate(self.schedule.orders)
        }

    def forward(
        self,
        action: Action,
        forward: Forward,
        share_of: ShareOf,
    ) -> None:
        """Run a stage on a microbatch, and send what comes out."""
        _, stage, number = action
        received = None
        if stage > 0:
            message = Message(False, stage, number)
            received = self._receive(message, stage - 1)
            self.stages.outline = self.outlines.pop(message)
            received.requires_grad_(stage > self.stages.first_trained)
        microbatch = self.microbatches[number]
        output = self.stages.run(stage, received, lambda: forward(microbatch))
        if stage == self._last:
            output = share_of(output)
        else:
            self._send(action, output.detach())
        self.kept[stage, number] = received, output

    def backward(self, action: Action) -> None:
        """Run the backward of a stage or a pass of it, and send the gradient of its input."""
        op, stage, number = action
        at = stage, number
        if op == "W":
            backward_weights(self.weight_work.pop(at), self._trained(stage))
            return
        received, output = self.kept[at]
        gradient = None
        if stage < self._last:
            gradient = self._receive(Message(True, stage, number), stage + 1)
        del self.kept[at]
        if not output.requires_grad:  # a first stage that is not trained
            self.weight_work[at] = ()
        elif op == "B":
            output.backward(gradient)
        else:
            leaf = received if received is not None and received.requires_grad else None
            self.weight_work[at] = backward_input(output, gradient, leaf, self._trained(stage))
        if received is not None:
            self._send(action, _gradient_of(received, stage))

    def finish_sends(self) -> None:
        """Return when all that was sent has been received."""
        for pairs in self.sent.values():
            for _, pending in pairs:
                pending.wait()

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = sent_after(action, self._last)
        assert message is not None
        target = self.schedule.rank_of[message.stage]
        if target == self.comm.coord("pp"):
            self.arrived[message] = tensor
            if not message.is_gradient:
                self.outlines[message] = self.stages.outline
            return
        if not message.is_gradient:
            of, outline = self.microbatches[message.microbatch], self.stages.outline
            with self.phase("sizes"):
                for part in self.sizes.announce(message.stage, of, tensor, outline):
                    self._start(part, message, target)
        self._start(tensor.contiguous(), message, target)

    def _start(self, tensor: Tensor, message: Message, target: int) -> None:
        """Begin to send a part of a message, and hold it until it has been received."""
        pending = self.comm.send_start(tensor, "pp", target)
        self.sent.setdefault(target, []).append((self._position[message], pending))

    def _release(self, source: int, message: Message) -> None:
        """Release what a rank had received when it sent a message."""
        side = -1 if not message.is_gradient else 1
        came_from = self._position[message.is_gradient, message.stage + side, message.microbatch]
        held = self.sent.get(source, [])
        for position, pending in held:
            if position < came_from:
                pending.wait()  # at once
        self.sent[source] = [pair for pair in held if pair[0] >= came_from]

    def _receive(self, message: Message, stage: int) -> Tensor:
        """Return a message of another stage; those that its rank sends before are begun, too."""
        source = self.schedule.rank_of[stage]
        if source == self.comm.coord("pp"):
            found = self.arrived.pop(message)
            assert isinstance(found, Tensor)
            return found
        while message not in self.arrived:
            coming = next(self._due[source])
            self.arrived[coming] = self.comm.recv_start(
                self._buffer_for(coming, source), "pp", source
            )
        pending = self.arrived.pop(message)
        assert isinstance(pending, Pending)
        tensor = pending.wait()
        self._release(source, message)
        return tensor

    def _buffer_for(self, message: Message, source: int) -> Tensor:
        """Return an empty tensor for a message."""
        if message.is_gradient:
            of = self.kept[message.stage, message.microbatch][1]
            return torch.empty_like(of, memory_format=torch.contiguous_format)
        of = self.microbatches[message.microbatch]
        buffer, self.outlines[message] = self.sizes.expect(message.stage, of, source)
        return buffer

    def _trained(self, stage: int) -> list[nn.Parameter]:
        return [weight for weight in self.weights[stage] if weight.requires_grad]


def _gradient_of(received: Tensor, stage: int) -> Tensor:
    """Return the gradient of what a stage has received; zeros if nothing before it is trained."""
    if received.grad is None and received.requires_grad:
        raise StrategyError(
            f"pp: stage {stage} gives no gradient to what it receives, as behind a detach() or "
            "under no_grad(), so that the layers before it would not be trained; freeze them by "
            "requires_grad_(False), or use dp or fsdp"
        )
    return torch.zeros_like(received) if received.grad is None else received.grad
