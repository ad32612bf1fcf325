"""One process, or the ranks of a job, as a plain script is given them.

What these do for a script is what a user changes in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phalanx


class Average:
    """An average of the weights by torch's own, and the model that has it for a while."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model = model
        by = None if decay is None else get_ema_multi_avg_fn(decay)
        self.average = AveragedModel(model, multi_avg_fn=by)

    def update(self) -> None:
        self.average.update_parameters(self.model)

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.average.module.state_dict())
        yield
        self.model.load_state_dict(kept)


class Plain:
    """A script on one process, in PyTorch alone.

    Attributes:
        printed: numbers that the script has printed.
        losses: the loss of each step.
    """

    def __init__(self) -> None:
        self.printed: list[float] = []
        self.losses: list[float] = []
        self.begin()

    def begin(self, accumulation: int = 1) -> None:
        """Begin the script, or a fold of it with another model."""
        self.accumulation = accumulation
        torch.manual_seed(11)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        return objects if len(objects) > 1 else next(iter(objects))

    def backward(self, loss_sum: Tensor, count: Any) -> Tensor:
        loss = loss_sum / count
        (loss / self.accumulation).backward()
        self.losses.append(float(loss.detach()))
        return loss.detach()

    def whole(self, loss: Tensor) -> Tensor:
        """Add the gradients of a loss over the whole batch."""
        loss.backward()
        self.losses.append(float(loss.detach()))
        return loss.detach()

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def sum(self, value: Tensor) -> Tensor:
        return value

    def gather(self, rows: Any) -> Any:
        return rows

    def draw(self, make: Callable[[int], Any], num_rows: int) -> Any:
        return make(num_rows)

    def average(self, model: nn.Module, decay: float | None) -> Any:
        return Average(model, decay)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        model.load_state_dict(state)

    def print(self, *numbers: float | Tensor) -> None:
        self.printed += [float(number) for number in numbers]


class OnRanks(Plain):
    """The same script on the ranks of a job."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        super().__init__()

    def begin(self, accumulation: int = 1) -> None:
        super().begin(accumulation)
        self.run = phalanx.init(self.strategy, accumulation=accumulation)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        return self.run.prepare(*objects, **options)

    def backward(self, loss_sum: Tensor, count: Any) -> Tensor:
        n = self.accumulation
        return self.run.backward(sum_of_rows=loss_sum / n, count=count) * n

    def whole(self, loss: Tensor) -> Tensor:
        return self.run.backward(loss)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return self.run.clip(max_norm)

    def sum(self, value: Tensor) -> Tensor:
        return self.run.sum(value)

    def gather(self, rows: Any) -> Any:
        return self.run.gather(rows)

    def draw(self, make: Callable[[int], Any], num_rows: int) -> Any:
        return self.run.draw(make)

    def average(self, model: nn.Module, decay: float | None) -> Any:
        return self.run.average(decay)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return self.run.state_dict()

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        self.run.load_state_dict(state)
