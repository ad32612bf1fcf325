"""Steps of a recommender over two servers, its table whole and by rows: python tables.py [ROWS]

One worker; the servers are threads of its process, and weights go over sockets, not shared memory.
Each sample looks 26 ids up, which follow Zipf's consistency. Both ways take their steps in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig
from phalanx.config.schema import ServerConfig
from phalanx.server.client import Client
from phalanx.server.consistency import Consistency
from phalanx.server.processes import local_roles
from phalanx.train.optimizer import build_optimizer
from phalanx.train.served_step import ClockedStep

WIDTH, SAMPLES, IDS, STEPS = 16, 512, 26, 15


class Recommender(nn.Module):
    """A click or none, of the mean of the rows that a sample looks up."""

    def __init__(self, num_rows: int, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(num_rows, WIDTH, mode="mean", sparse=sparse)
        self.top = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids))[:, 0]


class Clicks:
    """Logistic loss; a click is a first id that is even."""

    def loss_sum(self, model: nn.Module, ids: torch.Tensor, step: int) -> torch.Tensor:
        due = (ids[:, 0] % 2 == 0).float()
        return nn.functional.binary_cross_entropy_with_logits(model(ids), due, reduction="sum")

    def num_valid(self, ids: torch.Tensor) -> int:
        return len(ids)


def main(num_rows: int) -> None:
    """Print bytes and seconds of a step, median and range."""
    torch.manual_seed(1)
    config = OptimizerConfig(lr=0.1, weight_decay=0.0)
    ranks = torch.arange(1, num_rows + 1, dtype=torch.float64)
    batches = torch.multinomial(1 / ranks, STEPS * SAMPLES * IDS, replacement=True)
    batches = torch.randperm(num_rows)[batches].view(STEPS, SAMPLES, IDS)
    settings = {
        "whole": (False, ServerConfig(rule="sgd")),
        "by rows": (True, ServerConfig(rule="sgd", table_rule="sgd")),
    }
    with ExitStack() as stack:
        steps: dict[str, ClockedStep] = {}
        for name, (sparse, server) in settings.items():
            meeting = stack.enter_context(local_roles(2)).meeting
            model = Recommender(num_rows, sparse=sparse)
            given: Any = (model, build_optimizer(model, config), Clicks(), config)
            steps[name] = ClockedStep(*given, comm=SingleRankComm(), num_steps=STEPS)
            client = Client(meeting, 0, Consistency("ps", 1), (0, STEPS))
            client.is_shared = False
            steps[name].join(client, server, is_first=True)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, list[float]] = {name: [] for name in steps}
        begun = {n: (s.client.sent_bytes, s.client.received_bytes) for n, s in steps.items()}
        for batch in batches:
            for name, step in steps.items():
                begin_s = time.perf_counter()
                losses[name].append(step([batch]).loss)
                seconds[name].append(time.perf_counter() - begin_s)
        torch.testing.assert_close(losses["whole"], losses["by rows"], rtol=1e-5, atol=0)
        rows = sum(len(batch.unique()) for batch in batches) / STEPS
        print(f"{num_rows} rows of {WIDTH}, of which a step looks up {rows:.0f}")
        for name, step in steps.items():
            client, ms = step.client, sorted(1e3 * each for each in seconds[name])
            sent = (client.sent_bytes - begun[name][0]) / STEPS / 2**20
            received = (client.received_bytes - begun[name][1]) / STEPS / 2**20
            times = f"{statistics.median(ms):.0f} ({ms[0]:.0f} to {ms[-1]:.0f}) ms"
            print(f"{name}: {sent:.2f} MiB pushed, {received:.2f} pulled, {times} a step")
            client.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
