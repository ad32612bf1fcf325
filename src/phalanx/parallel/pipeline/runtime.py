"""Run the actions of a pipeline schedule on this rank.

The runner of a step over pipelines, as accumulate.py is without: forward and backward of each
microbatch, stage by stage, in the order of the schedule. A stage sends its output on as soon as it
has it, and waits for its input only where the schedule needs it.

A stage receives what another rank sends in the order in which that rank sends it, which the
schedule says. The first time a microbatch of some sizes passes, its activations are announced by a
header with their shape; afterwards both sides know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.comm.comm import Comm, Pending
from phalanx.comm.ledger import Phase, no_phase
from phalanx.parallel.accumulate import Forward, ShareOf
from phalanx.parallel.pipeline.schedule import Action, Schedule, build_schedule
from phalanx.parallel.pipeline.split_backward import (
    Groups,
    backward_input,
    backward_weights,
)
from phalanx.parallel.pipeline.stage import Stages
from phalanx.parallel.reduce import GradientReducer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What activations may be of; a header has the number."""

HEADER_SIZE = 8
"""Numbers of a header: data type, dimensions, sizes."""


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


class Pipeline:
    """The runner of the stages of one rank.

    Attributes:
        stages: of this rank.
    """

    def __init__(
        self,
        stages: Stages,
        comm: Comm,
        kind: str,
        chunks: int = 1,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.stages = stages
        self._comm = comm
        self._kind = kind
        self._chunks = chunks
        self._reducer = reducer
        self._known: dict[tuple[int, Any], tuple[torch.Size, torch.dtype]] = {}

    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        share_of: ShareOf,
        phase: Phase = no_phase,
    ) -> None:
        """Take this rank's actions of the schedule, see `Runner`.

        The microbatches are the same on all ranks of the pipeline.
        """
        p, m = self._comm.size("pp"), len(microbatches)
        schedule = build_schedule(self._kind, p, m, self._chunks)
        order = schedule.orders[self._comm.coord("pp")]
        step = _Step(schedule, self.stages, self._comm, self._known, microbatches)
        ends = {a.stage: at for at, a in enumerate(order) if a.op in ("B", "W")}
        for at, action in enumerate(order):
            if action.op == "F":
                with phase("forward"):
                    step.forward(action, forward, share_of)
                continue
            with phase("backward"):
                if self._reducer is not None:
                    self._reducer.before_backward(is_last=ends[action.stage] == at)
                step.backward(action)
        with phase("backward"):
            step.finish_sends()
        if self._reducer is not None:
            self._reducer.finish(phase)


@dataclass
class _Step:
    """The microbatches of one step on their way through this rank's stages."""

    schedule: Schedule
    stages: Stages
    comm: Comm
    known: dict[tuple[int, Any], tuple[torch.Size, torch.dtype]]
    microbatches: Sequence[Any]
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    arrived: dict[Message, Tensor | Pending] = field(default_factory=dict)
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
            received = self._receive(Message(False, stage, number), stage - 1).requires_grad_()
        with self.stages.running(stage, received):
            output = forward(self.microbatches[number])
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
            backward_weights(self.weight_work.pop(at), self.stages.weights(stage))
            return
        received, output = self.kept[at]
        gradient = None
        if stage < self._last:
            gradient = self._receive(Message(True, stage, number), stage + 1)
        del self.kept[at]
        if op == "B":
            output.backward(gradient)
        else:
            self.weight_work[at] = backward_input(
                output, gradient, received, self.stages.weights(stage)
            )
        if received is not None:
            assert received.grad is not None, "a stage depends on what it received"
            self._send(action, received.grad)

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
            return
        if not message.is_gradient:
            key = self._key(message)
            if key not in self.known:
                self.known[key] = tensor.shape, tensor.dtype
                sizes = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
                header = torch.tensor(sizes + [0] * (HEADER_SIZE - len(sizes)))
                self._start(header.to(tensor.device), message, target)
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
            return torch.empty_like(self.kept[message.stage, message.microbatch][1])
        key = self._key(message)
        if key not in self.known:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.comm.device)
            numbers = self.comm.recv_start(header, "pp", source).wait().tolist()
            shape = torch.Size(numbers[2 : 2 + numbers[1]])
            self.known[key] = shape, DTYPES[numbers[0]]
        shape, dtype = self.known[key]
        return torch.empty(shape, dtype=dtype, device=self.comm.device)

    def _key(self, message: Message) -> tuple[int, Any]:
        """Return what the sizes of an activation depend on."""
        microbatch = self.microbatches[message.microbatch]
        leaves = tree_leaves(vars(microbatch) if is_dataclass(microbatch) else microbatch)
        return message.stage, tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
