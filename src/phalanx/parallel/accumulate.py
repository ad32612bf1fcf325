"""The base class of runners, and the runner that accumulates gradients over microbatches in order.

A pipeline has a different runner, which follows a schedule: pipeline/runtime.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from phalanx.comm.ledger import Phase, no_phase
from phalanx.comm.ranges import named
from phalanx.parallel.reduce import GradientReducer

Forward = Callable[[Any], torch.Tensor]
"""Returns the model's output for a microbatch; in training the sum of its losses, a 0-d tensor.

On a pipeline stage other than the last, it returns the activation for the next stage.
"""

Scale = Callable[[torch.Tensor], torch.Tensor]
"""Scales the loss sum of a microbatch to its part of the step's loss; backward starts from it."""


class Runner(ABC):
    """Runs forward and backward of this rank's microbatches.

    Attributes:
        reducer: reducer of the gradients; None if no gradients are summed over ranks.
        replicas: parameters that duplicate a parameter of another pipeline stage; the rank of that
            stage counts them in gradient norms, this rank does not.
        microbatch: number of the current microbatch in the step.
    """

    def __init__(
        self, reducer: GradientReducer | None = None, replicas: Sequence[nn.Parameter] = ()
    ) -> None:
        self.reducer = reducer
        self.replicas = frozenset(replicas)
        self.microbatch = 0

    @abstractmethod
    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        scale: Scale,
        phase: Phase = no_phase,
    ) -> None:
        """Compute the gradient of the global batch, reduced over ranks, into each `.grad`.

        `phase` is called with "forward", "backward" and the phases of the reduction.
        """

    def backward(self, loss: torch.Tensor, *, is_last: bool, retain_graph: bool = False) -> None:
        """Run the backward of a microbatch's part of the loss; `is_last` if it ends the step."""
        if self.reducer is not None:
            # Before the last backward dp only accumulates; fsdp reduces what its kind does not
            # accumulate in full.
            self.reducer.before_backward(self.reducer.parameters if is_last else ())
        loss.backward(retain_graph=retain_graph)

    @abstractmethod
    def infer(
        self, microbatch: Any, forward: Forward, phase: Phase = no_phase
    ) -> torch.Tensor | None:
        """Return the model's output for a microbatch, without gradients.

        `phase` is called with the phases inside a forward, such as the sizes of activations.
        The output is None on ranks that do not have the last stage of a pipeline.
        """


class Accumulate(Runner):
    """The runner that completes forward and backward of a microbatch before the next one starts."""

    @override
    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        scale: Scale,
        phase: Phase = no_phase,
    ) -> None:
        for self.microbatch, microbatch in enumerate(microbatches):
            name = f"microbatch {self.microbatch}"
            with named(name), phase("forward"):
                loss = scale(forward(microbatch))
            with named(name), phase("backward"):
                self.backward(loss, is_last=self.microbatch == len(microbatches) - 1)
        if self.reducer is not None:
            self.reducer.finish(phase)

    @override
    def infer(self, microbatch: Any, forward: Forward, phase: Phase = no_phase) -> torch.Tensor:
        with torch.no_grad():
            return forward(microbatch)
