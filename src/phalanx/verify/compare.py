"""Compare two records of a step, tensor by tensor, in the order in which the step makes them.

The error of a tensor is max |a - b| / max |b|, with b from the reference. Where max |b| is small
beside the largest gradient (or moment, or weight) of the whole model, that largest one times FLOOR
divides instead: some gradients are zero but for rounding, such as that of the bias of attention's
keys, which softmax cancels. What passes, says tolerance.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.verify.reference import StepRecord
from phalanx.verify.tolerance import EXACT, common_ratio, limit_of

FLOOR = {"gradient": 1e-4, "first moment": 1e-4, "second moment": 1e-8, "weight": 1e-1}
"""Smallest divisor of an error, as a share of the largest magnitude in the whole model."""


@dataclass(frozen=True)
class Difference:
    """One compared quantity of one step.

    Attributes:
        step: number of the step, from 0.
        quantity: "loss", "gradient", "norm", "first moment", "second moment" or "weight".
        name: name of the parameter, or p of the norm; empty for the loss.
        error: relative error, infinite where one side is not finite or missing.
        limit: the largest error that passes.
        problem: what is wrong if it is no matter of size: "missing", "not finite" and so on.
        ratio: the factor between the two sides where it is one for all elements, else None.
    """

    step: int
    quantity: str
    name: str
    error: float
    limit: float = EXACT
    problem: str = ""
    ratio: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit

    @property
    def what(self) -> str:
        """The quantity in words."""
        if self.quantity == "norm":
            return f"the {self.name}-norm of the gradient"
        return f"{self.quantity} of {self.name}" if self.name else f"the {self.quantity}"

    def __str__(self) -> str:
        error = self.problem or f"relative error {self.error:.1e}, limit {self.limit:.0e}"
        return f"step {self.step}, {self.what}: {error}"


def compare_step(
    step: int, ours: StepRecord, reference: StepRecord, moved: StepRecord | None = None
) -> list[Difference]:
    """Compare one step of a strategy with that of the reference, in the order of the step.

    Args:
        step: its number.
        ours: of the strategy.
        reference: what should be.
        moved: of the perturbed reference; None in float64.
    """
    dtype = next((weight.dtype for weight in reference.weights.values()), torch.float64)
    loss = None if moved is None else moved.loss
    rows = [compare_scalar(step, "loss", "", ours.loss, reference.loss, loss, dtype)]
    rows += _compare_tensors(step, "gradient", ours, reference, moved)
    for p, norm in reference.norms.items():
        other = None if moved is None else moved.norms[p]
        rows.append(compare_scalar(step, "norm", f"{p:g}", ours.norms[p], norm, other, dtype))
    for quantity in ("first moment", "second moment", "weight"):
        rows += _compare_tensors(step, quantity, ours, reference, moved)
    return rows


def compare_first_weights(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[Difference]:
    """Compare the weights before the first step."""
    return compare_named(0, "first weight", ours, reference)


def compare_scalar(
    step: int,
    quantity: str,
    name: str,
    ours: float,
    reference: float,
    moved: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Difference:
    """Compare a number."""
    left, right = (torch.tensor(value, dtype=torch.float64) for value in (ours, reference))
    other = None if moved is None else torch.tensor(moved, dtype=torch.float64)
    return _difference(step, quantity, name, left, right, other, 0.0, dtype)


_FIELDS = {
    "gradient": "gradients",
    "first moment": "first_moments",
    "second moment": "second_moments",
    "weight": "weights",
}


def _compare_tensors(
    step: int, quantity: str, ours: StepRecord, reference: StepRecord, moved: StepRecord | None
) -> list[Difference]:
    tensors: Mapping[str, Tensor] = getattr(reference, _FIELDS[quantity])
    others = None if moved is None else getattr(moved, _FIELDS[quantity])
    return compare_named(step, quantity, getattr(ours, _FIELDS[quantity]), tensors, others)


def compare_named(
    step: int,
    quantity: str,
    ours: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    moved: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """Compare by name, gradients in the order of backward: the last parameters first."""
    rows: list[Difference] = []
    largest = max((float(t.abs().max()) for t in reference.values() if t.numel()), default=0.0)
    names = list(reference)
    for name in reversed(names) if quantity == "gradient" else names:
        left, right = ours.get(name), reference[name]
        if left is None or left.shape != right.shape:
            problem = "it is missing" if left is None else f"its shape is {tuple(left.shape)}"
            rows.append(Difference(step, quantity, name, math.inf, problem=problem))
            continue
        other = None if moved is None else moved.get(name)
        least = FLOOR.get(quantity, 0.0) * largest
        rows.append(_difference(step, quantity, name, left, right, other, least, right.dtype))
    for name in ours:
        if name not in reference:
            problem = "one process has none"
            rows.append(Difference(step, quantity, name, math.inf, problem=problem))
    return rows


def _difference(
    step: int,
    quantity: str,
    name: str,
    ours: Tensor,
    reference: Tensor,
    moved: Tensor | None,
    least: float,
    dtype: torch.dtype,
) -> Difference:
    ours, reference = ours.double(), reference.double()
    if reference.numel() == 0:
        return Difference(step, quantity, name, 0.0)
    if not bool(ours.isfinite().all()) or not bool(reference.isfinite().all()):
        problem = _nonfinite(ours, reference)
        return Difference(step, quantity, name, math.inf, problem=problem)
    scale = max(float(reference.abs().max()), least) or 1.0
    error = float((ours - reference).abs().max()) / scale
    limit = EXACT
    if moved is not None:
        limit = limit_of(reference, moved, dtype, scale) / scale
    ratio = None if error <= limit else common_ratio(ours, reference)
    return Difference(step, quantity, name, error, limit, ratio=ratio)


def _nonfinite(ours: Tensor, reference: Tensor) -> str:
    """Say which of the two is not finite, and how."""

    def kind(tensor: Tensor) -> str:
        if bool(tensor.isnan().any()):
            return "NaN"
        return "infinite" if bool(tensor.isinf().any()) else "finite"

    if kind(reference) == "finite":
        return f"it is {kind(ours)}, in one process it is finite"
    if kind(ours) == "finite":
        return f"it is {kind(reference)} in one process and finite here"
    return f"it is {kind(ours)}, and so it is in one process: not a matter of the split"
