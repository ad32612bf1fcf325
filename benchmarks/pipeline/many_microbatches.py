"""Time and memory of a step of a pipeline, at the first and the last of many microbatches.

python benchmarks/pipeline/many_microbatches.py [--steps 500] [--rounds 5] [--out FILE.json]

The trainer takes steps of four microbatches of a small chain with dropout, on two ranks of one
thread each. What a stage left behind at each forward would make the last steps slow, or large.
Beside each step, the same thread runs as much of plain PyTorch, a yardstick: other work on the
machine makes both slower. Strategies take turns; a figure is the median of a hundred steps, and of
all rounds.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
import phalanx
from common import spread, write_result

STRATEGIES = ("pp2", "pp2:interleaved/2", "pp2:zbv")
MICROBATCHES, ROWS, WIDTH, MANY = 4, 16, 32, 100
NAMES = ("ms by the clock", "ms of its thread", "yardsticks of its thread", "MiB held")


class Objective:
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        del step
        return nn.functional.mse_loss(model(microbatch[0]), microbatch[1], reduction="sum")

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch[0])


@dataclass(frozen=True)
class Clock:
    """Makes a rate that never changes, and notes when it is asked for it, which is once a step.

    Attributes:
        steps: of the run.
        folder: where each rank writes its notes at the last of them.
    """

    steps: int
    folder: Path

    def __call__(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        notes: list[Sequence[float]] = []
        model, x = build(), torch.ones(ROWS, WIDTH)

        def note(step: int) -> float:
            ended_s = time.perf_counter(), time.thread_time()
            for _ in range(MICROBATCHES):
                model(x).sum().backward()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held_mib = pages * os.sysconf("SC_PAGESIZE") / 2**20
            notes.append((*ended_s, held_mib, time.perf_counter(), time.thread_time()))
            if step == self.steps:
                (self.folder / f"{dist.get_rank()}.json").write_text(json.dumps(notes))
            return 1.0

        return LambdaLR(optimizer, note)


def build() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(256, WIDTH, generator=generator) for _ in range(2)))


def notes_of(strategy: str, steps: int) -> list[Sequence[float]]:
    """Train; return what rank 0 has noted at each step."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        trainer = phalanx.Trainer(
            build, Objective(), data(), scheduler=Clock(steps, here), steps=steps,
            batch_size=ROWS, accumulation=MICROBATCHES,
        )  # fmt: skip
        trainer.train(strategy, phalanx.Options(out=here / "run", threads=1))
        return json.loads((here / "0.json").read_text())


def figures(notes: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return the medians over the first steps and over the last, each with a name."""
    each: dict[str, list[float]] = {name: [] for name in NAMES}
    for before, after in itertools.pairwise(notes):
        clock_s, thread_s = after[0] - before[3], after[1] - before[4]
        found = 1e3 * clock_s, 1e3 * thread_s, thread_s / (after[4] - after[1]), after[2]
        for name, value in zip(NAMES, found, strict=True):
            each[name].append(value)
    return {
        name: [statistics.median(part) for part in (values[:MANY], values[-MANY:])]
        for name, values in each.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in STRATEGIES}
    for strategy in STRATEGIES * args.rounds:
        found[strategy].append(figures(notes_of(strategy, args.steps)))
        print(f"{strategy}: {found[strategy][-1]}", flush=True)
    print(
        f"| strategy | a step of rank 0 | first {MANY} | last {MANY} | last / first | min | max |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for strategy, rounds in found.items():
        for name in NAMES:
            pairs = [each[name] for each in rounds]
            first, last = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratios = spread([after / before for before, after in pairs], ".3f")
            print(f"| `{strategy}` | {name} | {first:.1f} | {last:.1f} | {ratios} |")
    write_result(args.out, {"steps": args.steps, "microbatches": MICROBATCHES, "rounds": found})


if __name__ == "__main__":
    main()
