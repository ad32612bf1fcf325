"""Training loops as users write them, in plain PyTorch and with Phalanx, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import phalanx

NUM_ROWS = 37
"""Of a data set: the batches of 8 end with one of 5, and those of 9 with one of 1."""


@dataclass
class Rows:
    """A batch that is a dataclass."""

    x: Tensor
    y: Tensor


class Numbers(Dataset[Any]):
    """Rows of numbers and a class for each; in the form of a pair, a dict or a dataclass."""

    def __init__(self, form: str = "pair") -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(NUM_ROWS, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(5, (NUM_ROWS,), generator=generator)
        self.form = form

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        return {"x": x, "y": y} if self.form != "pair" else (x, y)


def as_rows(samples: list[dict[str, Tensor]]) -> Rows:
    return Rows(*(torch.stack([sample[name] for sample in samples]) for name in ("x", "y")))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers()
        return iter([numbers[index] for index in range(NUM_ROWS)])


class Twice(nn.Module):
    """A module that is used twice, a part that is frozen, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 10)
        self.shared = nn.Linear(10, 10)
        self.unused = nn.Linear(3, 3)
        self.after = nn.Linear(10, 5)
        self.after.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return self.after(self.shared(self.shared(x).tanh()))


class Viewing(nn.Module):
    """A block that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.tanh()).t().t()


class Views(nn.Module):
    """Writes in place what its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing() for _ in range(4))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.last(x).t().t()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5))


def normed() -> nn.Module:
    # Without a bias, whose gradient would be rounding alone, which Adam makes large.
    first = nn.Linear(6, 10, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 5))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def of_groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclass
class Case:
    """A loop: what it trains, on what, and how."""

    build: Callable[[], nn.Module] = perceptron
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
    dataset: Callable[[], Any] = Numbers
    collate: Callable[[Any], Any] | None = None
    batch_size: int = 8
    shuffle: bool = True
    accumulation: int = 1
    max_norm: float | None = None
    schedules: bool = False
    num_epochs: int = 2
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def parts_of(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    """Return model, optimizer, loader and scheduler, with the same draws as in any script."""
    torch.manual_seed(11)
    model = case.build().double()
    optimizer = case.optimizer(model)
    shuffle = case.shuffle or None
    loader = DataLoader(case.dataset(), case.batch_size, shuffle, collate_fn=case.collate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if case.schedules else None
    return model, optimizer, loader, scheduler


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Rows):
        return batch.x, batch.y
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def plain(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step and the last weights and buffers of one process of PyTorch."""
    model, optimizer, loader, scheduler = parts_of(case)
    losses: list[float] = []
    for _ in range(case.num_epochs):
        batches = [pair_of(batch) for batch in loader]
        for at in range(0, len(batches), case.accumulation):
            step = batches[at : at + case.accumulation]
            optimizer.zero_grad()
            means: Any = [cross_entropy(model(x), y) / case.accumulation for x, y in step]
            loss = sum(means)
            loss.backward()
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


class Distributed:
    """The same loop with Phalanx, which may stop in the middle and go on."""

    def __init__(self, case: Case, strategy: str) -> None:
        self.case = case
        self.run = phalanx.init(strategy, accumulation=case.accumulation)
        model, optimizer, loader, scheduler = parts_of(case)
        self.model, self.optimizer, self.loader = self.run.prepare(
            model, optimizer, loader, **case.options
        )
        self.scheduler = None if scheduler is None else self.run.prepare(scheduler)
        self.losses: list[float] = []

    def train(self, num_steps: int | None = None) -> None:
        """Take all steps, or the next few."""
        run, case = self.run, self.case
        while self.loader.epoch < case.num_epochs:
            taken = 0
            for batch in self.loader:
                x, y = pair_of(batch)
                loss = cross_entropy(self.model(x), y, reduction="sum")
                run.backward(sum_of_rows=loss / case.accumulation, count=len(y))
                taken += 1
                if taken % case.accumulation and not self.loader.is_last:
                    continue
                taken = 0
                if case.max_norm is not None:
                    run.clip(case.max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.losses.append(float(self.run.loss_of_step))
                if len(self.losses) == num_steps:
                    return

    def weights(self) -> dict[str, Tensor]:
        """Return whole copies of the weights and buffers."""
        state = self.model.state_dict()
        return {n: getattr(v, "full_tensor", lambda v=v: v)().clone() for n, v in state.items()}


def distributed(case: Case, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return what `plain` does, by the ranks of a job."""
    loop = Distributed(case, strategy)
    loop.train()
    return loop.losses, loop.weights()


def largest_error(
    ours: tuple[list[float], dict[str, Tensor]], theirs: tuple[list[float], dict[str, Tensor]]
) -> float:
    """Return the largest relative difference of two loops."""
    assert len(ours[0]) == len(theirs[0])
    assert list(ours[1]) == list(theirs[1])
    pairs = [(torch.tensor(ours[0]).double(), torch.tensor(theirs[0]).double())]
    pairs += [(ours[1][name].double(), theirs[1][name].double()) for name in theirs[1]]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
