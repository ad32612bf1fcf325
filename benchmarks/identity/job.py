"""Small jobs for the trainer: BatchNorm over all ranks, dropout, microbatches, uneven last batch.

phalanx train --script benchmarks/identity/job.py:job --strategy pp2
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

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


def data(num_samples: int = 128) -> TensorDataset:
    """Return samples: of 128 the last batch of 20, or of 12, has eight."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, 12, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 5, (num_samples,), generator=generator))


class CrossEntropy:
    """The sum of the losses of a microbatch, its number of samples, and the accuracy."""

    def loss_sum(self, model: nn.Module, microbatch: list[torch.Tensor], step: int) -> torch.Tensor:
        """Return the sum of the losses."""
        inputs, labels = microbatch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")

    def num_valid(self, microbatch: list[torch.Tensor]) -> int:
        """Return the number of samples."""
        return len(microbatch[1])


class WithAccuracy(CrossEntropy):
    """The same, and the accuracy of an evaluation."""

    def metric_sums(
        self, model: nn.Module, microbatch: list[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return how many samples are classified rightly."""
        inputs, labels = microbatch
        return {"accuracy": (model(inputs).argmax(1) == labels).sum()}


class Shrink(phalanx.Callback):
    """Shrinks the weights by a factor that depends on all losses and evaluations before.

    So the losses of a run show each call, and those of a resumed run the state.
    """

    def __init__(self) -> None:
        self.sum, self.recent = 0.0, torch.zeros(3)

    def begin(self, model: nn.Module) -> None:
        """Keep the model."""
        self.model = model

    @torch.no_grad()
    def step(self, steps_done: int, result: Any) -> None:
        """Count the loss, and shrink the weights."""
        self.sum += result.loss
        self.recent[steps_done % 3] = result.loss
        for parameter in self.model.parameters():
            parameter.mul_(1 - 1e-3 * self.sum - 1e-3 * float(self.recent.sum()))

    def evaluation(self, evaluation: Any) -> None:
        """Count the loss."""
        self.sum -= evaluation.loss

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"sum": self.sum, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        self.sum = state["sum"]
        self.recent.copy_(state["recent"])


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


def odd() -> phalanx.Trainer:
    """Return the job with a single sample in its last batch: most ranks have none."""
    return dataclasses.replace(job(), build=without_norms, data=data(121), batch_norm=None)


def without_norms() -> nn.Module:
    """Return the model without BatchNorm, which one sample would not suffice for."""
    return nn.Sequential(*(each for each in model() if not isinstance(each, nn.BatchNorm1d)))


def watched() -> phalanx.Trainer:
    """Return the job with a metric and a callback that has a state."""
    return dataclasses.replace(job(), objective=WithAccuracy(), callbacks={"shrink": Shrink()})
