"""The same network for the trainer, which runs pipelines too.

phalanx train --script examples/resnet/job.py:job --strategy pp2
phalanx verify --script examples/resnet/job.py:whole pp2:naive
"""

import functools

import phalanx
import torch
from plain import RESNET_50, SMALL, build, load
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Digits:
    def loss_sum(self, model: nn.Module, microbatch: list[Tensor], step: int) -> Tensor:
        images, digits = microbatch
        return nn.functional.cross_entropy(model(images).logits, digits, reduction="sum")

    def num_valid(self, microbatch: list[Tensor]) -> int:
        return len(microbatch[1])


def job(
    sizes: dict = RESNET_50, num_rows: int = 256, size: int = 64, accumulation: int = 4
) -> phalanx.Trainer:
    """Each step has four microbatches: two stages compute side by side."""
    data = TensorDataset(*load(num_rows, size))
    return phalanx.Trainer(
        functools.partial(build, sizes),
        Digits(),
        data,
        optimizer=functools.partial(torch.optim.Adam, lr=3e-4),
        validation=data,
        batch_size=32,
        accumulation=accumulation,
        shuffle=False,
        batch_norm="global",
    )


def whole() -> phalanx.Trainer:
    """Each step has one: BatchNorm sees the rows that it sees in plain PyTorch."""
    return job(accumulation=1)


def small() -> phalanx.Trainer:
    return job(SMALL, num_rows=150, size=32)
