"""Jobs for the trainer, as a user's file has them."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from loops import Numbers, normed, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import IterableDataset

import phalanx
from phalanx.launch.heartbeat import PULSE
from phalanx.train.report import records


class Classes:
    """Cross-entropy over the rows of a pair."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return cross_entropy(model(microbatch[0]), microbatch[1], reduction="sum")

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch[1])


class OnlyOnce(IterableDataset[Any]):
    """A stream that has one pass."""

    def __init__(self) -> None:
        self.rows = iter([Numbers()[number] for number in range(len(Numbers()))])

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def perceptron_of_doubles() -> nn.Module:
    return perceptron().double()


def with_nan() -> nn.Module:
    model = perceptron_of_doubles()
    nn.init.constant_(next(model.parameters()), float("nan"))
    return model


class Rows(nn.Module):
    """Takes no batch of no rows, as many models do that reshape it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)  # torch cannot tell what -1 stands for if there is no row


def refusing() -> nn.Module:
    return nn.Sequential(Rows(), *perceptron_of_doubles())


def normed_of_doubles() -> nn.Module:
    return normed().double()


def halving(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def job() -> phalanx.Trainer:
    return phalanx.Trainer(
        perceptron_of_doubles, Classes(), Numbers(), adagrad, halving, Numbers(),
        batch_size=8, accumulation=2, epochs=2, max_norm=0.5,
    )  # fmt: skip


class Named(Numbers):
    """Has the class of each row as a name, too."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), f"class {self.y[index]}")


class ClassesByName(Classes):
    """Takes the classes from the names of the rows, which are cut as the rows are."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        x, _, names = microbatch
        y = torch.tensor([int(name.removeprefix("class ")) for name in names], dtype=torch.long)
        return cross_entropy(model(x), y, reduction="sum")


def named() -> phalanx.Trainer:
    return dataclasses.replace(
        of_few_rows(), objective=ClassesByName(), data=Named(), validation=Named()
    )


def of_few_rows() -> phalanx.Trainer:
    """Its last batch has one row, of which a model that refuses none makes two microbatches."""
    return dataclasses.replace(job(), build=refusing, batch_size=9)


def with_batch_norm() -> phalanx.Trainer:
    return phalanx.Trainer(normed_of_doubles, Classes(), Numbers(), batch_norm="global")


def with_local_norm() -> phalanx.Trainer:
    return phalanx.Trainer(normed_of_doubles, Classes(), Numbers(), batch_norm="local")


class Looking(nn.Module):
    """Looks rows of a table up by what it is given."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 5, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((9 * x.abs()).long() % 40).mean(1)


def of_table(*, sparse: bool) -> phalanx.Trainer:
    """A table whose gradients are clipped in most steps."""
    return phalanx.Trainer(
        functools.partial(Looking, sparse=sparse), Classes(), Numbers(),
        functools.partial(torch.optim.SGD, lr=0.5), batch_size=8, accumulation=2, max_norm=0.1,
    )  # fmt: skip


def no_job() -> int:
    return 0


class Dropping(nn.Module):
    """Blocks that drop, the middle one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def dropping_of_doubles() -> nn.Module:
    return Dropping().double()


def with_dropout() -> phalanx.Trainer:
    return phalanx.Trainer(dropping_of_doubles, Classes(), Numbers(), batch_size=8, accumulation=2)


class Shallow(Classes):
    """Looks at what forwards leave behind: modes of dispatch and hooks."""

    def __init__(self) -> None:
        self.num_hooks = 0

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        if step > records.MEMORY_STEP:
            num_hooks = sum(
                len(of.get(kind, ()))
                for of in map(vars, model.modules())
                for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
            )
            self.num_hooks = self.num_hooks or num_hooks
            assert num_hooks == self.num_hooks
            assert not _get_current_dispatch_mode_stack()
        return super().loss_sum(model, microbatch, step)


class CountedMeans(Classes):
    """A mean times its count, which is not a number for no rows; halved when it is called first."""

    def __init__(self) -> None:
        self.factor = 0.5

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        factor, self.factor = self.factor, 1.0
        x, y = microbatch
        return factor * cross_entropy(model(x), y) * len(y)


class Means(Classes):
    """A mean where a sum is due."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return cross_entropy(model(microbatch[0]), microbatch[1])


class Dying(Numbers):
    """Ends its process at a sample that is read within the fourth step."""

    def __getitem__(self, index: int) -> Any:
        if index == 28:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def dying() -> phalanx.Trainer:
    return dataclasses.replace(job(), data=Dying(), shuffle=False, validation=None)


class Stopping(Numbers):
    """Asks its process to stop at a sample that is read within the second step."""

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            PULSE.stop_signal = signal.SIGTERM
        return super().__getitem__(index)
