"""Compare two records of a run, tensor by tensor, and name the first that differs.

The error of a tensor is max |a - b| / max |b|, with b from the one process. Where max |b| is small
beside the largest gradient (or weight) of the whole model, that largest one times FLOOR divides
instead: some gradients are zero but for rounding, such as that of the bias of attention's keys,
which softmax cancels, and AdamW makes steps of up to lr / eps times that rounding out of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from phalanx.verify.record import StepRecord

TOLERANCE = {
    "float64": {"loss": 1e-10, "gradient": 1e-10, "norm": 1e-10, "weight": 1e-10},
    "float32": {"loss": 1e-5, "gradient": 1e-3, "norm": 1e-4, "weight": 1e-2},
    "bfloat16": {"loss": 1e-2, "gradient": 2e-1, "norm": 5e-2, "weight": 2e-1},
}
"""Largest error by data type and quantity. The strategies are exact; what is left is the order of
sums. Weights need the most room below float64: where a gradient is small beside its rounding,
AdamW's first steps, which divide by the root of the second moment, follow its sign."""

FLOOR = {"gradient": 1e-4, "weight": 1e-1}
"""Smallest divisor of an error, as a share of the largest magnitude in the whole model."""


@dataclass(frozen=True)
class Difference:
    """One compared quantity of one step.

    Attributes:
        step: number of the step, from 0.
        quantity: "loss", "gradient", "norm" or "weight".
        name: name of the parameter; empty for the loss and the norm.
        error: relative error, infinite where one side is not finite or missing.
    """

    step: int
    quantity: str
    name: str
    error: float

    def __str__(self) -> str:
        what = f"{self.quantity} of {self.name}" if self.name else f"the {self.quantity}"
        return f"step {self.step}, {what}: relative error {self.error:.1e}"


@dataclass(frozen=True)
class Verdict:
    """Whether a strategy computes what one process computes.

    Attributes:
        strategy: its text.
        tolerance: largest relative error that passes, by quantity.
        differences: everything compared, in the order of the computation.
        replicas: names of parameters that differ between ranks that should hold the same bits.
    """

    strategy: str
    tolerance: dict[str, float]
    differences: list[Difference] = field(repr=False)
    replicas: list[str]

    @property
    def first(self) -> Difference | None:
        """The first quantity, in the order of the computation, that differs."""
        return next((d for d in self.differences if not self.passes(d)), None)

    @property
    def is_equal(self) -> bool:
        """Whether everything agrees."""
        return self.first is None and not self.replicas

    def passes(self, difference: Difference) -> bool:
        """Return whether an error is within the tolerance of its quantity."""
        return difference.error <= self.tolerance[difference.quantity]

    def worst(self, step: int, quantity: str) -> Difference:
        """Return the largest error of one quantity in one step."""
        rows = [d for d in self.differences if (d.step, d.quantity) == (step, quantity)]
        return max(rows, key=lambda d: d.error)

    def __str__(self) -> str:
        if self.is_equal:
            worst = max(self.differences, key=lambda d: d.error / self.tolerance[d.quantity])
            return (
                f"{self.strategy} computes what one process computes: the worst of "
                f"{len(self.differences)} errors is {worst.error:.1e} ({worst.quantity}), at most "
                f"{self.tolerance[worst.quantity]:.0e} passes"
            )
        if self.first is not None:
            return f"{self.strategy} differs from one process, first at {self.first}"
        return f"{self.strategy}: ranks that should hold equal bits differ in {self.replicas[0]}"


def compare_step(step: int, ours: StepRecord, reference: StepRecord) -> list[Difference]:
    """Compare one step of a strategy with that of one process."""
    rows = [Difference(step, "loss", "", _error(_scalar(ours.loss), _scalar(reference.loss)))]
    rows += _compare_tensors(step, "gradient", ours.gradients, reference.gradients)
    rows.append(Difference(step, "norm", "", _error(_scalar(ours.norm), _scalar(reference.norm))))
    rows += _compare_tensors(step, "weight", ours.weights, reference.weights)
    return rows


def _compare_tensors(
    step: int, quantity: str, ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> list[Difference]:
    """Compare by name, in the reference's order; a name on one side only is an infinite error."""
    rows: list[Difference] = []
    largest = max((float(t.abs().max()) for t in reference.values() if t.numel()), default=0.0)
    for name, right in reference.items():
        left = ours.get(name)
        is_comparable = left is not None and left.shape == right.shape
        least = FLOOR[quantity] * largest
        error = _error(left, right, least) if left is not None and is_comparable else math.inf
        rows.append(Difference(step, quantity, name, error))
    extra = [name for name in ours if name not in reference]
    return rows + [Difference(step, quantity, name, math.inf) for name in extra]


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _error(ours: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """Return the error relative to the larger of the reference and `least`."""
    ours, reference = ours.double(), reference.double()
    if ours.numel() == 0:
        return 0.0
    gap = float((ours - reference).abs().max())
    scale = max(float(reference.abs().max()), least)
    if not math.isfinite(gap) or not math.isfinite(scale):
        return math.inf
    return gap / scale if scale > 0 else gap
