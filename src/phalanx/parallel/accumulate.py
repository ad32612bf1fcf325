"""Forward and backward over the microbatches of a step, one after the other; gradients add up.

This is the runner of a step without pipelines. A runner leaves in each `.grad` the gradient of the
whole global batch; how the microbatches are scheduled, and when ranks reduce, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.ledger import Phase, no_phase
from phalanx.parallel.reduce import GradientReducer


@dataclass(frozen=True)
class Accumulate:
    """The runner that finishes each microbatch before it begins the next.

    Without a reducer, one rank computes all.
    """

    reducer: GradientReducer | None = None

    def __call__(
        self,
        microbatches: Sequence[Any],
        loss_of: Callable[[Any], torch.Tensor],
        phase: Phase = no_phase,
    ) -> None:
        """Call `loss_of` on each microbatch and backward on what it returns, and reduce.

        Gradients are reduced once, in and after the last backward.

        Args:
            microbatches: of this rank.
            loss_of: returns a microbatch's share of the loss, a 0-d tensor.
            phase: is told "forward", "backward" and the phases of the reduction.
        """
        for number, microbatch in enumerate(microbatches, start=1):
            with phase("forward"):
                loss = loss_of(microbatch)
            with phase("backward"):
                if self.reducer is not None:
                    self.reducer.before_backward(is_last=number == len(microbatches))
                loss.backward()
        if self.reducer is not None:
            self.reducer.finish(phase)
