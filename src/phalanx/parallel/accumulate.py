"""How the microbatches of a step are scheduled: the base of runners, and one after the other.

A pipeline schedules them otherwise: pipeline/runtime.py.
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
"""Returns what the model makes of a microbatch; in training the sum of its losses, a 0-d tensor.

Of a stage of a pipeline that is not the last, it returns what the next one takes.
"""

Scale = Callable[[torch.Tensor], torch.Tensor]
"""Makes of such a sum the microbatch's part of the loss, where backward begins."""


class Runner(ABC):
    """Runs the model over this rank's microbatches.

    Attributes:
        reducer: sums the gradients over ranks; None where there is nothing to sum.
        replicas: parameters that are a copy of what a rank of another stage holds, and counts.
        microbatch: number, in the step, of the one that is at work.
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
        """Leave in each `.grad` the gradient of the whole global batch, reduced once.

        `phase` is called with "forward", "backward" and the phases of the reduction.
        """

    @abstractmethod
    def infer(self, microbatch: Any, forward: Forward) -> torch.Tensor | None:
        """Return what the model makes of a microbatch, without gradients.

        None on ranks that do not hold the last stage of a pipeline.
        """


class Accumulate(Runner):
    """The runner that finishes each microbatch before it begins the next."""

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
                if self.reducer is not None:
                    is_last = self.microbatch == len(microbatches) - 1
                    self.reducer.before_backward(self.reducer.parameters if is_last else ())
                loss.backward()
        if self.reducer is not None:
            self.reducer.finish(phase)

    @override
    def infer(self, microbatch: Any, forward: Forward) -> torch.Tensor:
        with torch.no_grad():
            return forward(microbatch)
