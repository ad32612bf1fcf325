"""How far a tensor may lie from the reference.

In float64 one limit holds for all. In narrower types the limit is a tensor's own: how far it moves
when each weight of the reference moves by the type's epsilon (TTrace, arXiv 2506.09280, section 5).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = ("float64", "float32", "bfloat16")
"""What `verify` can run in."""

EXACT = 1e-10
"""Largest relative error in float64: what is left is the order of sums."""

FACTOR = 16.0
"""How many times as far as under the perturbation a tensor may lie from the reference."""

NUM_EPSILONS = 32.0
"""Least limit in narrower types, in epsilons of the type relative to the largest element."""


def limit_of(reference: Tensor, moved: Tensor, dtype: torch.dtype, least: float = 0.0) -> float:
    """Return the largest absolute error that passes.

    Args:
        reference: what should be.
        moved: the same of the perturbed reference.
        dtype: of the arithmetic.
        least: smallest magnitude that the least limit is relative to.
    """
    if not reference.numel():
        return 0.0
    movement = float((moved.double() - reference.double()).abs().max())
    relative = EXACT if dtype == torch.float64 else NUM_EPSILONS * torch.finfo(dtype).eps
    least = relative * max(least, float(reference.double().abs().max()))
    return max(FACTOR * movement, least) if math.isfinite(movement) else least


def common_ratio(ours: Tensor, reference: Tensor) -> float | None:
    """Return r where `ours` is r times the reference in every element, within a millionth."""
    square = float((reference * reference).sum())
    if square == 0 or not math.isfinite(square):
        return None
    ratio = float((ours * reference).sum()) / square
    rest = float((ours - ratio * reference).abs().max())
    return ratio if rest <= 1e-6 * float(ours.abs().max()) else None
