"""A training loop around a model of transformers on two processes, by one of three ways.

One line of JSON at the end: samples a second, of the median step. With --alternate, which phalanx
alone takes, its comparison of replicas is on in every other step, and the line has the seconds of
each step with and without it, by the clock and of the processor, and those of the comparison.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import phalanx
from phalanx.script import replicas
from phalanx.script.as_prepared import RecordedGradients


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


class Comparison:
    """The comparison of replicas, switched on and off, and the seconds of the processor it took.

    Attributes:
        is_on: whether ranks are compared.
        spent_s: seconds of this thread in it.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.spent_s = 0.0
        self._sent = torch.zeros(0)
        replicas.MAX_CHECK_FRACTION /= 2  # of the time of all steps, of which half have it

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Have it be on where `is_on`, inside."""
        of = replicas.Replicas
        parts = [(of, "judge", True), (of, "take", None), (of, "note_step", None)]
        parts += [(RecordedGradients, "num_changed", 0), (of, "words", None)]
        for kind, name, otherwise in parts:
            patch.object(kind, name, self._timed(getattr(kind, name), otherwise)).start()
        yield
        patch.stopall()

    def _timed(self, call: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if not self.is_on:
                return self._sent if call.__name__ == "words" else otherwise
            begin_s = time.thread_time()
            found = call(*args)
            self.spent_s += time.thread_time() - begin_s
            if call.__name__ == "words":
                self._sent = torch.zeros_like(found)
            return found

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["bert", "resnet50", "mlp"], required=True)
    parser.add_argument("--wrap", choices=["ddp", "accelerate", "phalanx"], required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--alternate", action="store_true")
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
    comparison = Comparison()
    if args.alternate:
        comparison.switched().__enter__()
    times_s: list[float] = []
    cpu_s: list[float] = []
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for number, (x, y) in enumerate(loader):
        comparison.is_on = number % 2 == 0
        if number == args.warmup:
            comparison.spent_s = 0.0
        loss = model(x, labels=y).loss
        backward(loss, len(y))
        optimizer.step()
        optimizer.zero_grad()
        now_s, now_cpu_s = time.perf_counter(), time.process_time()
        times_s.append(now_s - begin_s)
        cpu_s.append(now_cpu_s - begin_cpu_s)
        begin_s, begin_cpu_s = now_s, now_cpu_s
        if number + 1 == args.warmup + args.steps:
            break
    if dist.get_rank() == 0:
        rate = 2 * data.rows / statistics.median(times_s[args.warmup :])
        found: dict[str, Any] = {"tokens_per_s": rate, "loss": loss.item()}
        if args.alternate:
            found |= {"spent_s": comparison.spent_s}
            for name, first in (("on", 0), ("off", 1)):
                begin = args.warmup + (args.warmup + first) % 2
                found |= {f"{name}_s": times_s[begin::2], f"{name}_cpu_s": cpu_s[begin::2]}
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that has succeeded


if __name__ == "__main__":
    main()
