"""Processor time a step of a rank takes in a loop of one's own, and in the same loop under DDP.

    phalanx run benchmarks/any_model/watches.py --nproc 2 --no-proof
    torchrun --nproc-per-node 2 benchmarks/any_model/watches.py ddp

The model is small, so what a step costs beside arithmetic shows. The process's own time counts, of
all its threads, not the time on the clock.
"""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WARMUP, STEPS, ROUNDS = 100, 500, 5


def main() -> None:
    form = sys.argv[1] if len(sys.argv) > 1 else "whole"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    model: Any = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(32 * STEPS, 64), torch.randint(10, (32 * STEPS,)))
    loader: Any = DataLoader(data, 32, drop_last=True)
    run: Any = None
    if form == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, 16, sampler=torch.utils.data.DistributedSampler(data))
        is_first = torch.distributed.get_rank() == 0
    else:
        import phalanx

        run = phalanx.init()
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        is_first = run.is_first
        names = "mean_of_rows" in inspect.signature(run.backward).parameters
    torch.set_num_threads(1)
    found: list[float] = []
    for number in range(ROUNDS + 1):
        begin_s = time.process_time()
        for step, (x, y) in enumerate(loader):
            if number == 0 and step == WARMUP:
                break
            if form == "ddp":
                cross_entropy(model(x), y).backward()
            elif form == "whole":
                run.backward(cross_entropy(*run.gather(model(x), y)))
            elif names:
                run.backward(mean_of_rows=cross_entropy(model(x), y), count=len(y))
            else:  # before losses had names
                run.backward(cross_entropy(model(x), y) * len(y), len(y))
            optimizer.step()
            optimizer.zero_grad()
        found.append((time.process_time() - begin_s) / STEPS * 1e3)
    if is_first:
        least, *_, most = ordered = sorted(found[1:])
        print(f"{form}: median {ordered[len(ordered) // 2]:.3f} ms a step ({least:.3f}-{most:.3f})")


if __name__ == "__main__":
    main()
