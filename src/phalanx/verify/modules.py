"""Small modules that `phalanx verify` runs beside the decoders: what users' own modules have."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.parallel.pipeline.cut import num_stages
from phalanx.strategy import Strategy
from phalanx.verify.record import Case
from phalanx.verify.settings import VerifyConfig

WIDTH = 6
"""Features of a row."""


class Twice(nn.Module):
    """Uses its weight twice, and drops in between; x[B, D] to a tensor like it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        """Map x twice by one weight."""
        return x + self.map(self.dropout(self.map(x).tanh()))


class Reused(nn.Module):
    """Blocks whose weight is used twice, between two maps; x[B, D] to y[B, 1]."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Twice() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run all of it."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Normed(nn.Module):
    """BatchNorm, whose statistics are of all rows; x[B, D] to y[B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run all of it."""
        return self.last(self.norm(self.first(x)).tanh())


class SquaredError:
    """Sum of the squares of what a module makes of rows less the sine of their sum."""

    def loss_sum(self, model: nn.Module, microbatch: Tensor, step: int) -> Tensor:
        """Return the sum over the rows."""
        del step
        return (model(microbatch) - microbatch.sum(-1, keepdim=True).sin()).square().sum()

    def num_valid(self, microbatch: Tensor) -> int:
        """Count the rows."""
        return len(microbatch)


def _reused(num_blocks: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Reused(num_blocks)


def _normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Normed()


def module_cases(
    strategy: Strategy, config: VerifyConfig, num_rows: Sequence[int], accumulation: int
) -> dict[str, Case]:
    """Return the modules that the strategy splits without roles, on batches of these rows.

    BatchNorm takes each step's rows at once, which a pipeline and an accumulation do not.
    """
    if not strategy.has_whole_samples or strategy.cut:
        return {}
    generator = torch.Generator().manual_seed(config.seed)
    batches = [
        torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for count in num_rows
    ]
    case = functools.partial(
        Case,
        objective=SquaredError(),
        batches=batches,
        dtype=config.dtype,
        optimizer=config.optimizer,
        device=config.device,
        dropout_seed=config.seed,
    )
    blocks = functools.partial(_reused, num_stages(strategy) + 1, config.seed)
    found = {"reused": case(blocks, accumulation=accumulation)}
    if strategy.pp.degree == 1:
        found["normed"] = case(functools.partial(_normed, config.seed), batch_norm="global")
    return found
