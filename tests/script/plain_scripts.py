"""Training scripts as users write them, each once: `on` is one process, or the ranks of a job.

A script calls nothing of Phalanx. What `Plain` and `OnRanks` do for it is what a user changes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import phalanx


class Plain:
    """A script on one process, in PyTorch alone."""

    def __init__(self) -> None:
        self.printed: list[float] = []
        torch.manual_seed(11)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        return objects

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


Script = Callable[[Plain], None]


def rows_of(*sizes: int, num_rows: int = 37, classes: int = 5) -> TensorDataset:
    """Return numbers of a size, and a class for each row."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, *sizes, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (num_rows,), generator=generator))


def mlp(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers)).double()[:-1]


def sum_of_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Pair(nn.Module):
    """Two models that take turns."""

    def __init__(self, g: nn.Module, d: nn.Module) -> None:
        super().__init__()
        self.g, self.d = g, d

    def forward(self, which: str, x: Tensor) -> Tensor:
        return self.g(x) if which == "g" else self.d(x)


def epoch_means(on: Plain) -> None:
    model = mlp(6, 10, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        total = right = torch.tensor(0.0)
        for x, y in loader:
            logits = model(x)
            loss = on.backward(sum_of_losses(logits, y), len(y))
            step(optimizer)
            on.print(loss)
            total = total + sum_of_losses(logits.detach(), y)
            right = right + (logits.argmax(1) == y).sum()
        on.print(float(on.sum(total)) / 37, float(on.sum(right)) / 37)


def accuracy_of_the_step(on: Plain) -> None:
    """Measure between backward and step, with a graph."""
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for x, y in loader:
        loss = on.backward(sum_of_losses(model(x), y), len(y))
        right = (model(x).argmax(1) == y).sum()
        step(optimizer)
        on.print(loss, on.sum(right))


def wgan_gp(norm: Callable[[], nn.Module], on: Plain, **options: Any) -> None:
    d = nn.Sequential(nn.Linear(6, 10), norm(), nn.Tanh(), nn.Linear(10, 1))
    both = Pair(mlp(6, 10, 6), d).double()
    of_g = torch.optim.SGD(both.g.parameters(), 0.1)
    of_d = torch.optim.SGD(both.d.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 8)
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, loader, **options)
    for x, _ in loader:
        made = both("g", x.flip(1))
        between = (0.3 * x + 0.7 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(both("d", between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().sum()
        loss = both("d", made.detach()).sum() - both("d", x).sum() + 10 * penalty
        of_d.zero_grad()
        on.print(on.backward(loss, len(x)))
        of_d.step()
        of_g.zero_grad()
        on.print(on.backward(-both("d", made).sum(), len(x)))
        of_g.step()


def gan(on: Plain) -> None:
    """Freeze the discriminator while the generator learns."""
    both = Pair(mlp(3, 8, 6), mlp(6, 8, 1))
    of_g = torch.optim.Adam(both.g.parameters(), 0.02, betas=(0.5, 0.99))
    of_d = torch.optim.Adam(both.d.parameters(), 0.02, betas=(0.5, 0.99))
    both, of_g, of_d, loader = on.prepare(both, of_g, of_d, DataLoader(rows_of(6), 9, True))
    for _ in range(2):
        for x, _ in loader:
            made = both("g", x[:, :3])
            wrong = F.softplus(both("d", made.detach())) + F.softplus(-both("d", x))
            of_d.zero_grad()
            on.print(on.backward(wrong.sum(), len(x)))
            of_d.step()
            both.d.requires_grad_(False)
            of_g.zero_grad()
            on.print(on.backward(F.softplus(-both("d", made)).sum(), len(x)))
            of_g.step()
            both.d.requires_grad_(True)


def unfrozen_in_the_middle(on: Plain) -> None:
    model = mlp(6, 10, 8, 5)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, DataLoader(rows_of(6), 8))
    for epoch in range(3):
        model[0].requires_grad_(epoch > 0)
        for x, y in loader:
            optimizer.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            on.print(on.clip(model, 0.5))
            optimizer.step()


def inference_mode(on: Plain) -> None:
    """Measure before the first step and after each pass."""
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    held_back = DataLoader(rows_of(6, num_rows=11), 4)
    model, optimizer, loader, held_back = on.prepare(
        model, optimizer, DataLoader(rows_of(6), 8), held_back
    )
    for _ in range(3):
        model.eval()
        with torch.inference_mode():
            losses = [sum_of_losses(model(x), y) for x, y in held_back]
        on.print(float(on.sum(torch.stack(losses).sum())) / 11)
        model.train()
        for x, y in loader:
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            step(optimizer)


class Residual(nn.Module):
    """Blocks between a first and a last map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(mlp(8, 12, 8) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Branched(nn.Module):
    """Has a head for the rows of one class alone, so that some ranks do not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 10), nn.BatchNorm1d(10)
        self.second, self.norm_2 = nn.Linear(10, 10), nn.BatchNorm1d(10)
        self.last, self.head = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm_2(self.second(self.norm(self.first(x)).tanh())).tanh()
        logits = self.last(x)
        if (y == 0).any():
            logits = logits + torch.where((y == 0)[:, None], self.head(x), 0)
        return logits


def branches_with_batch_norm(on: Plain) -> None:
    model = Branched().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(rows_of(6), 7)
    model, optimizer, loader = on.prepare(model, optimizer, loader, batch_norm="global")
    for x, y in loader:
        on.print(on.backward(sum_of_losses(model(x, y), y), len(y)))
        step(optimizer)


SCRIPTS: dict[str, Script] = {
    "epoch means": epoch_means,
    "accuracy of the step": accuracy_of_the_step,
    "gradient penalty": functools.partial(wgan_gp, lambda: nn.LayerNorm(10)),
    "gradient penalty and batch norm": functools.partial(
        wgan_gp, lambda: nn.BatchNorm1d(10), batch_norm="global"
    ),
    "inference mode": inference_mode,
    "GAN": gan,
    "unfrozen in the middle": unfrozen_in_the_middle,
    "branches with batch norm": branches_with_batch_norm,
}
