"""A training loop around a model of transformers on two processes, by one of three ways.

One line of JSON at the end: samples a second, of the median step.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import phalanx


class Images(Dataset):
    """Images of 64 x 64 points, in ten classes."""

    rows = 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 64, 64, generator=generator), index % 10

    def __len__(self) -> int:
        return 100_000


class Numbers(Dataset):
    """Rows of 512 numbers, in ten classes."""

    rows = 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(512, generator=torch.Generator().manual_seed(index)), index % 10

    def __len__(self) -> int:
        return 100_000


class Perceptron(nn.Module):
    """Eight layers of a million parameters each."""

    def __init__(self) -> None:
        super().__init__()
        layers = [each for _ in range(7) for each in (nn.Linear(1024, 1024), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), *layers, nn.Linear(1024, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return argparse.Namespace(loss=nn.functional.cross_entropy(self.layers(x), labels))


class Texts(Dataset):
    """Rows of 64 tokens, in ten classes."""

    rows = 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(30_000, (64,), generator=generator), index % 10

    def __len__(self) -> int:
        return 100_000


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return Perceptron()
    if name == "bert":
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(num_labels=10))
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["bert", "resnet50", "mlp"], required=True)
    parser.add_argument("--wrap", choices=["ddp", "accelerate", "phalanx"], required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = {"bert": Texts, "resnet50": Images, "mlp": Numbers}[args.model]()
    backward = None
    if args.wrap == "phalanx":
        run = phalanx.init("dp2")
        torch.set_num_threads(1)
        model = build(args.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        # As with the two others, each rank's BatchNorm takes its own rows.
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(data, 2 * data.rows), batch_norm="local"
        )

        def backward(loss: torch.Tensor, count: int) -> None:
            run.backward(mean_of_rows=loss, count=count)
    elif args.wrap == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        torch.set_num_threads(1)
        model = build(args.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(data, data.rows)
        )

        def backward(loss: torch.Tensor, _count: int) -> None:
            accelerator.backward(loss)
    else:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(build(args.model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = DataLoader(data, data.rows, sampler=DistributedSampler(data, shuffle=False))

        def backward(loss: torch.Tensor, _count: int) -> None:
            loss.backward()

    model.train()
    times_s: list[float] = []
    begin_s = time.perf_counter()
    for number, (x, y) in enumerate(loader):
        loss = model(x, labels=y).loss
        backward(loss, len(y))
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.perf_counter()
        times_s.append(now_s - begin_s)
        begin_s = now_s
        if number + 1 == args.warmup + args.steps:
            break
    if dist.get_rank() == 0:
        rate = 2 * data.rows / statistics.median(times_s[args.warmup :])
        found: dict[str, Any] = {"tokens_per_s": rate, "loss": loss.item()}
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that has succeeded


if __name__ == "__main__":
    main()
