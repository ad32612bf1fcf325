"""The gradients as the last backward of a step has left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef


class MadeGradients:
    """Knows them again, and whether something has written to them."""

    def __init__(self) -> None:
        self._made: list[tuple[TensorWeakRef, int]] = []

    def note(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients that a backward has just made."""
        self._made = [(TensorWeakRef(each), version_of(each)) for each in gradients]

    def others(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients that are none of those."""
        made = {id(gradient()) for gradient, _ in self._made}
        return [gradient for gradient in gradients if id(gradient) not in made]

    def num_changed(self, gradients: Sequence[Tensor]) -> int:
        """Return how many have been written, replaced, added or taken away since."""
        made = {id(gradient()): version for gradient, version in self._made}
        kept = sum(made.get(id(gradient)) == version_of(gradient) for gradient in gradients)
        return max(len(made), len(gradients)) - kept


def version_of(tensor: Tensor) -> int:
    """Return how many times a tensor, or this rank's shard by itself, has been written."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor._version + tensor.to_local()._version
    return tensor._version
