"""Processor time of the guards of a loop of one's own: what looks for mistakes, not what trains.

    phalanx run benchmarks/any_model/guards.py --strategy dp2 --no-proof
    phalanx run benchmarks/any_model/guards.py --strategy fsdp2 --no-proof

102 Linear layers. The main thread's time counts, not the time on the clock. After 20 steps
weights are compared in each 50th alone, and the measured steps have their part of these.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.script.guards import DrawGuard, LossGuard, ModelGuard, Replicas

WARMUP, STEPS, WIDTH = 50, 150, 128

GUARDS: dict[type, tuple[str, ...]] = {
    LossGuard: ("check", "strangers"),  # `numbers` has the sum of the losses, which is the law
    ModelGuard: ("before",),
    Replicas: ("check_last_step", "words", "store_sums", "note_step"),
    DrawGuard: ("look", "mark"),
}


def main() -> None:
    """Print the time of a step, and of each guard within a step."""
    run = phalanx.init()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(102)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    rows = 64 * (WARMUP + STEPS)
    data = TensorDataset(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 64))
    spent = dict.fromkeys(GUARDS, 0.0)
    for guard, methods in GUARDS.items():
        for name in methods:
            setattr(guard, name, timed(getattr(guard, name), guard, spent))
    torch.set_num_threads(1)
    begin = 0.0
    for number, (x, y) in enumerate(loader):
        if number == WARMUP:
            begin = time.thread_time()
            spent.update(dict.fromkeys(spent, 0.0))
        run.backward(mean_of_rows=mse_loss(model(x), y), count=len(y))
        optimizer.step()
        optimizer.zero_grad()
    step = (time.thread_time() - begin) / STEPS
    each = {guard.__name__: seconds / STEPS for guard, seconds in spent.items()}
    total = sum(each.values())
    words = ", ".join(f"{name} {1e6 * s:.0f} us" for name, s in each.items())
    run.print(f"{run.strategy}: {1e3 * step:.1f} ms a step, guards {total / step:.1%}: {words}")


def timed(method: Any, guard: type, spent: dict[type, float]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        begin = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            spent[guard] += time.thread_time() - begin

    return call


if __name__ == "__main__":
    main()
