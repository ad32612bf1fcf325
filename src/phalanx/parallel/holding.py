"""What one rank holds of the trained state: the answer of every `layout()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Holding:
    """Bytes that one rank holds while it computes the gradients of a step.

    Attributes:
        parameter_bytes: this rank's part of the parameters.
        gathered_bytes: parameters gathered from other ranks, at most at one time.
        gradient_bytes: gradients, from microbatch to microbatch.
        unreduced_bytes: peak bytes of not yet reduced gradients, on top of gradient_bytes.
        optimizer_bytes: the two moments of AdamW.
    """

    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    unreduced_bytes: int
    optimizer_bytes: int
