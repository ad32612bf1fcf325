"""NCCL would run all that a loop of one's own, the trainer and `train` call; see tests/comm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import loops
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from nccl_rules import Broken
from nccl_trace import traced
from phalanx.launch.local import run_ranks
from phalanx.script import run as runs
from phalanx.script.session import train_module
from phalanx.strategy import Strategy
from phalanx.train.job.resolve import resolve
from phalanx.train.run import train_rank
from small_run import SHAPE, losses, small_run


class Partly(nn.Module):
    """Takes statistics over all ranks, and uses one of its layers on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.norm = nn.BatchNorm1d(10)
        self.extra = nn.Linear(10, 10)
        self.last = nn.Linear(10, 5)
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.last(
            self.extra(x.tanh()) + x if self.is_used or not self.training else x.tanh()
        )


class Loop:
    """A loop that calls all that a run has."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(3)
        model = Partly().double()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.run = phalanx.init(strategy, accumulation=2)
        self.model, self.optimizer, self.loader, self.held, self.scheduler = self.run.prepare(
            model, optimizer, DataLoader(loops.Numbers(), 8, shuffle=True),
            DataLoader(loops.Numbers(), 9), torch.optim.lr_scheduler.StepLR(optimizer, 2),
            batch_norm="global",
        )  # fmt: skip
        # Under fsdp all ranks gather what any of them uses.
        model.is_used = self.run.comm.size("fsdp") > 1 or self.run.is_first
        self.average = self.run.average(0.9)

    def train(self) -> None:
        """Make one pass over the data."""
        for number, (x, y) in enumerate(self.loader):
            self.run.backward(
                sum_of_rows=cross_entropy(self.model(x), y, reduction="sum"), count=len(y)
            )
            if not self.run.is_step_end:
                continue
            self.run.clip(0.5, p=2 if number % 4 == 1 else float("inf"))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update()
            assert not self.run.should_stop

    def evaluate(self) -> float:
        """Return the mean loss by means, sums and rows of all ranks."""
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad(), self.average.applied():
            for x, y in self.held:
                loss = cross_entropy(self.model(x), y, reduction="none")
                sums[0] += self.run.mean(loss.sum(), len(y)) * self.run.sum(len(y))
                sums[1] += self.run.gather({"loss": loss})["loss"].sum()
                sums[2] += self.run.sum(loss.sum())
        self.model.train()
        torch.testing.assert_close(sums[1:], sums[:1].expand(2), rtol=1e-12, atol=0)
        return float(sums[0])

    def contrast(self) -> None:
        """Take a step of a loss over the rows of the whole batch."""
        for x, _ in self.loader:
            rows = self.run.gather(self.model(x))
            self.run.backward((rows @ rows.T).logsumexp(1).mean())
            if self.run.is_step_end:
                break
        self.optimizer.step()
        self.optimizer.zero_grad()


def own_loop(strategy: str, following: str, folder: Path) -> tuple[float, float]:
    """Train, evaluate, save and load; resume under another strategy, and evaluate again."""
    loop = Loop(strategy)
    loop.train()
    loop.run.load_state_dict(loop.run.state_dict())
    found = loop.evaluate()
    saved = loop.run.save(folder)
    loop.contrast()
    again = Loop(following)
    assert again.run.resume(folder)
    result = found, again.evaluate()
    again.run.load_state_dict(saved)
    again.train()
    return result


@pytest.mark.parametrize(
    ("strategy", "following"),
    [("dp2", "fsdp2"), by_hand("fsdp2:zero1", "dp2:naive"), by_hand("dp2,fsdp2", "dp4")],
)
def test_own_loops(tmp_path: Path, strategy: str, following: str) -> None:
    num_ranks = Strategy.parse(strategy).num_ranks
    args = own_loop, strategy, following, tmp_path
    for before, after in run_ranks(traced, num_ranks, *args, threads=1):
        assert after == pytest.approx(before, rel=1e-10)


def number_of_the_host(_call: str, value: Any, _comm: Any) -> Tensor:
    return value.cpu()


def found_of_a_number_of_the_host() -> str:
    """Return the rule that `run.sum` breaks with a number of the host."""
    run = phalanx.init("dp2")
    runs.own_number = number_of_the_host
    try:
        traced(run.sum, torch.ones(2, device=run.device))
    except Broken as error:
        return str(error)
    return ""


def test_a_number_of_the_host_is_found() -> None:
    for found in run_ranks(found_of_a_number_of_the_host, 2, threads=1):
        assert found.startswith("NCCL takes no tensor of the host: all_reduce sum of float64[1x2]")


def fitted(strategies: Sequence[str], out: Path) -> list[list[float]]:
    """Return the losses of the trainer, which each strategy after the first resumes."""
    found: list[list[float]] = []
    for number, strategy in enumerate(strategies):
        trainer = dataclasses.replace(
            jobs.job(), build=jobs.dropping_of_doubles, steps=2 * number + 4
        )
        options = phalanx.Options(
            out=out, threads=1, eval_every=2, save="every=3", resume=number > 0
        )
        done = traced(train_module, trainer, Strategy.parse(strategy), options)
        found.append([*done.losses, *(loss for loss in [each.loss for each in done.evaluations])])
    return found


@pytest.mark.parametrize(
    "strategies",
    [
        ("pp2", "fsdp2"),
        by_hand(("dp2", "pp2:interleaved/2", "pp2:zbv", "fsdp2:zero1", "pp2:gpipe")),
        by_hand(("pp2,dp2", "fsdp4", "dp2,fsdp2", "pp2:zbv,fsdp2")),
    ],
    ids=",".join,
)
def test_the_trainer(tmp_path: Path, strategies: Sequence[str]) -> None:
    num_ranks = Strategy.parse(strategies[0]).num_ranks
    (expected,) = run_ranks(fitted_by_one, 1, strategies, tmp_path / "alone", threads=1)
    for found in run_ranks(fitted, num_ranks, strategies, tmp_path / "ranks", threads=1):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10)


def fitted_by_one(strategies: Sequence[str], out: Path) -> list[list[float]]:
    return fitted(["dp1"] * len(strategies), out)


@pytest.mark.parametrize(
    "strategies",
    [
        ("pp2",),
        by_hand(("cp2", "pp2")),
        by_hand(("tp2", "pp2:zbv", "cp2:ulysses", "fsdp2", "pp2:interleaved/2", "dp2")),
        by_hand(("fsdp2,cp2", "tp4:2d", "pp2,tp2", "dp2,tp2", "pp2,fsdp2", "dp2,cp2:ulysses")),
    ],
    ids=",".join,
)
def test_train(tmp_path: Path, strategies: Sequence[str]) -> None:
    """Each strategy after the first resumes from the checkpoint of the one before."""
    shape = dataclasses.replace(SHAPE, num_layers=4, num_kv_heads=None)
    config = small_run(tmp_path, 100, shape=shape, save="every=2", eval_every=3)
    for strategy in strategies:
        ranks = Strategy.parse(strategy).num_ranks
        steps = len(losses(tmp_path / "run")) + 2 if config.resume else 2
        config = dataclasses.replace(config, strategy=strategy, nproc=ranks, steps=steps)
        run_ranks(traced, ranks, train_rank, resolve(config), threads=1)
        config = dataclasses.replace(config, out=None, resume=str(tmp_path / "run"))
    assert len(losses(tmp_path / "run")) == 2 * len(strategies)
