"""The MFU of a trainer is of the type that it computes in, and of the rows of each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from loops import Numbers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.script.session import train_module
from phalanx.strategy import Strategy
from phalanx.train.report import records

RATE = 1e13


class Autocast(nn.Module):
    """Parameters of float32, products of bfloat16 but for the last, small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 20))
        self.last = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x.float())
        return self.last(y.float())


class Ragged(Numbers):
    """Rows of unlike lengths."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x.repeat(1 + index % 30)[:, None], y


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows, labels = zip(*samples, strict=True)
    return pad_sequence(list(rows), batch_first=True), torch.stack(labels)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(1)


def of_brain() -> nn.Module:
    return jobs.perceptron_of_doubles().bfloat16()


class AsBrain(jobs.Classes):
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return super().loss_sum(model, (microbatch[0].bfloat16(), microbatch[1]), step)


TRAINERS: dict[str, dict[str, Any]] = {
    "doubles": {},
    "bfloat16": {"build": of_brain, "objective": AsBrain()},
    "autocast": {"build": Autocast},
    "ragged": {"build": Sums, "data": Ragged(), "collate": padded},
}
"""What differs from a perceptron of float64, which reads rows of one shape."""


def arithmetics(folder: Path, strategy: str) -> dict[str, tuple[list[str], phalanx.Summary]]:
    """Return of each trainer which products were measured on this rank, and the run."""
    found: dict[str, tuple[list[str], phalanx.Summary]] = {}
    for name, settings in TRAINERS.items():
        asked: list[str] = []
        records.quick_ceiling = lambda _, arithmetic, asked=asked: asked.append(arithmetic) or RATE
        given: dict[str, Any] = {
            "build": jobs.perceptron_of_doubles, "objective": jobs.Classes(), "data": Numbers(),
            "optimizer": jobs.adagrad, "batch_size": 8, "accumulation": 2, "steps": 5,
        }  # fmt: skip
        options = phalanx.Options(out=folder / name, threads=1)
        trainer = phalanx.Trainer(**given | settings)
        found[name] = asked, train_module(trainer, Strategy.parse(strategy), options)
    return found


def test_the_share_is_of_products_of_the_models_type_and_of_the_rows_of_the_step(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(arithmetics, 2, tmp_path, "dp2", threads=1)
    for found in ranks:
        assert {name: asked for name, (asked, _) in found.items()} == {
            "doubles": ["float64"],
            "bfloat16": ["bfloat16"],
            "autocast": ["bfloat16"],
            "ragged": ["float64"],
        }
        assert found["ragged"][1].mfu is None
        assert all(fitted.mfu for name, (_, fitted) in found.items() if name != "ragged")
    # The batches of 37 rows end with one of 5.
    shares = {name: [record["mfu"] for record in steps_of(tmp_path / name)] for name in TRAINERS}
    # Nothing is known from the first batch on whose longest row here is not that of the first.
    known = [share is not None for share in shares["ragged"]]
    assert known == sorted(known, reverse=True) and not known[-1]
    flops = 8 * 6 * (6 * 10 + 10 * 7 + 7 * 5) - 2 * 8 * 6 * 10  # the input takes no gradient
    for record, num_rows in zip(steps_of(tmp_path / "doubles"), (8, 8, 8, 8, 5), strict=True):
        step_s = record["tokens"] / record["tokens_per_s"]
        assert record["mfu"] == pytest.approx(flops * num_rows / 8 / step_s / (2 * RATE), rel=1e-6)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]
