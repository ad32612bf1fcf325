"""What plain scripts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from plain_adapters import Plain
from plain_models import rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

Script = Callable[[Plain], None]


def sum_of_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def perceptron_loop(
    on: Plain,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loader: Any = None,
    num_epochs: int = 2,
    max_norm: float | None = None,
    **options: Any,
) -> None:
    """Train a classifier, and print each loss."""
    if loader is None:
        loader = DataLoader(rows_of(6), 9, shuffle=True)
    model, optimizer, loader = on.prepare(model, optimizer, loader, **options)
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            on.print(on.backward(sum_of_losses(model(x), y), len(y)))
            if max_norm is not None:
                on.print(on.clip(model, max_norm))
            optimizer.step()
