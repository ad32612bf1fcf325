"""The reference beside the ranks: which steps it takes, and how far a rank may lie from it.

In float64 the reference goes its own way, and one limit holds for all steps.

In a narrower type two runs part by rounding alone: Adam's first step moves each weight by the rate
in the direction of its gradient's sign, however small the gradient, so one sign that turns is twice
the rate. There each step of the reference begins with the weights, buffers and moments that the
ranks began it with, and its update takes the gradients that the ranks made. Loss, buffers and
gradients may lie as far as those of several perturbed references do, see compare.py; the update has
the same inputs on both sides, so that it agrees within a few epsilons.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.verify.compare import Difference, compare_step, compare_update, compare_values
from phalanx.verify.record import Case
from phalanx.verify.reference import ReferenceRun, StepRecord

PERTURBATIONS = (1, 2, 3)
"""Seeds of the perturbed references."""


class Beside:
    """The reference of a case, step by step beside the ranks.

    Attributes:
        begin: what the step under way began with; None where the reference goes its own way.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self._dtype = case.torch_dtype
        self._run = ReferenceRun(case, device)
        self._steps = self._run.steps()
        self._next = self._run.state()
        self.begin: StepRecord | None = None

    def compare_first(self, weights: StepRecord) -> list[Difference]:
        """Compare the first weights of the ranks."""
        return compare_values(0, "first weight", weights["weight"], self._next["weight"])

    def compare(self, step: int, ours: StepRecord) -> list[Difference]:
        """Compare what the ranks computed in a step."""
        if self._dtype == torch.float64:
            return compare_step(step, ours, next(self._steps))
        self.begin, self._next = self._next, ours
        made = self._computed(step)
        moved = [self._computed(step, seed) for seed in PERTURBATIONS]
        found = compare_step(step, ours, made, moved, self._dtype)
        self._run.begin_from(self.begin)
        self._run.take_gradients(ours["gradient"])
        return found + compare_update(step, ours, self._run.update(step, ours), self._dtype)

    def evaluated(self) -> tuple[Tensor, list[Tensor]]:
        """Return what the last batch gives in `eval()`, and what it gives perturbed."""
        if self._dtype == torch.float64:
            return self._run.evaluate(), []
        self.begin = self._next
        made: list[Tensor] = []
        for seed in (0, *PERTURBATIONS):
            self._run.begin_from(self.begin, seed)
            made.append(self._run.evaluate())
        return made[0], made[1:]

    def _computed(self, step: int, perturbation: int = 0) -> StepRecord:
        assert self.begin is not None
        self._run.begin_from(self.begin, perturbation)
        return self._run.compute(step)


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is farthest beyond its limit."""
    return max(differences, key=lambda each: each.error / each.limit if each.limit else each.error)
