"""One process, or the ranks of a job, as a plain script is given them.

What these do for a script is what a user changes in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import phalanx


class Plain:
    """A script on one process, in PyTorch alone."""

    def __init__(self) -> None:
        self.printed: list[float] = []
        torch.manual_seed(11)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss_sum: Tensor, count: Any) -> Tensor:
        loss = loss_sum / count
        loss.backward()
        return loss.detach()

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def sum(self, value: Tensor) -> Tensor:
        return value

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def print(self, *numbers: float | Tensor) -> None:
        self.printed += [float(number) for number in numbers]


class OnRanks(Plain):
    """The same script on the ranks of a job."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.run = phalanx.init(strategy)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        return self.run.prepare(*objects, **options)

    def backward(self, loss_sum: Tensor, count: Any) -> Tensor:
        return self.run.backward(loss_sum, count)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return self.run.clip(max_norm)

    def sum(self, value: Tensor) -> Tensor:
        return self.run.sum(value)

    def gather(self, rows: Tensor) -> Tensor:
        return self.run.gather(rows)
