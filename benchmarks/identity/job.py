"""A small job for the trainer: BatchNorm over all ranks, dropout, microbatches, uneven last batch.

phalanx train --script benchmarks/identity/job.py:job --strategy pp2
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx


def model() -> nn.Module:
    """Return two blocks of a linear layer, BatchNorm and dropout, and a classifier."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(24, 5),
    )  # fmt: skip


def data() -> TensorDataset:
    """Return 128 samples: the last batch of 20, or of 12, has eight."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(128, 12, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 5, (128,), generator=generator))


class CrossEntropy:
    """The sum of the losses of a microbatch, and its number of samples."""

    def loss_sum(self, model: nn.Module, microbatch: list[torch.Tensor], step: int) -> torch.Tensor:
        """Return the sum of the losses."""
        inputs, labels = microbatch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")

    def num_valid(self, microbatch: list[torch.Tensor]) -> int:
        """Return the number of samples."""
        return len(microbatch[1])


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a rate that falls by a tenth every third step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)


def job() -> phalanx.Trainer:
    """Return the job: 20 samples a batch in four microbatches a rank, evaluated on its own data."""
    return phalanx.Trainer(
        model, CrossEntropy(), data(), optimizer, scheduler,
        validation=data(), batch_size=20, accumulation=4, steps=10, max_norm=1.0,
        batch_norm="global",
    )  # fmt: skip
