"""Forward and backward over the microbatches of a step, one after the other; gradients add up.

This is the runner of a step without pipelines; pipeline/runtime.py has the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.ledger import Phase, no_phase
from phalanx.parallel.reduce import GradientReducer

Forward = Callable[[Any], torch.Tensor]
"""Returns the sum of a microbatch's losses, a 0-d tensor.

Of a stage of a pipeline that is not the last, it returns what the next one takes.
"""

ShareOf = Callable[[torch.Tensor], torch.Tensor]
"""Makes of such a sum the microbatch's share of the loss, where backward begins."""

Runner = Callable[[Sequence[Any], Forward, ShareOf, Phase], None]
"""Leaves in each `.grad` the gradient of the whole global batch, reduced once.

How this rank's microbatches are scheduled, and when ranks reduce, is its own affair. The phase is
told "forward", "backward" and the phases of the reduction.
"""


@dataclass(frozen=True)
class Accumulate:
    """The runner that finishes each microbatch before it begins the next.

    Without a reducer, one rank computes all.
    """

    reducer: GradientReducer | None = None

    def __call__(
        self,
        microbatches: Sequence[Any],
        forward: Forward,
        share_of: ShareOf,
        phase: Phase = no_phase,
    ) -> None:
        """Run them one after the other; the last backward reduces."""
        for number, microbatch in enumerate(microbatches, start=1):
            with phase("forward"):
                loss = share_of(forward(microbatch))
            with phase("backward"):
                if self.reducer is not None:
                    self.reducer.before_backward(is_last=number == len(microbatches))
                loss.backward()
        if self.reducer is not None:
            self.reducer.finish(phase)
