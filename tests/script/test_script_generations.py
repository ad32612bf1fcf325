"""A trainer's run and a loop of one's own on other ranks, in the generations of a launch."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from loops import Numbers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.cli.main import main
from phalanx.errors import Interrupted
from phalanx.launch import launched
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.launched import JobReport, Launched, read_report
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy, shrunk
from phalanx.train import pace
from small_run import losses

BATCH, STEPS, RANKS = 12, 8, (4, 3, 2, 4)
"""Each pass over 37 rows ends with a batch of one row."""


def generations(first: str, folder: Path) -> list[Launched]:
    """Return what ranks of RANKS learn from their agents, whose memory has no states."""
    later = [
        Launched(
            folder=str(folder),
            strategy=str(shrunk(Strategy.parse(first), ranks, None)),
            first=first,
            run=str(folder / "run"),
        )
        for ranks in RANKS
    ]
    return [Launched(folder=str(folder)), *later[1:]]


class FewRows(jobs.Classes):
    """Refuses a microbatch of more rows than a rank has in the first generation."""

    def __init__(self, most: int) -> None:
        self.most = most

    def loss_sum(self, model: Any, microbatch: Any, step: int) -> Any:
        assert len(microbatch[0]) <= self.most
        return super().loss_sum(model, microbatch, step)


class StopAfter(phalanx.Callback):
    """Asks the ranks of a generation to stop after a step."""

    def __init__(self, last: int, text: str) -> None:
        self.last, self.text = last, text

    def begin(self, model: Any) -> None:
        os.environ[launched.VARIABLE] = self.text
        pace.COMPARE_S = 0.0  # in each step

    def step(self, steps_done: int, result: Any) -> None:
        if steps_done == self.last:
            PULSE.stop_signal = signal.SIGTERM


@pytest.mark.parametrize("first", ["dp4", by_hand("fsdp4"), by_hand("pp2,dp2")])
def test_a_trainer_continues_on_fewer_and_more_ranks(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = dataclasses.replace(jobs.job(), batch_size=BATCH, validation=None)
    expected = trainer.train("dp1", phalanx.Options(out=tmp_path / "whole", threads=1)).losses
    options = phalanx.Options(out=tmp_path / "run", threads=1)
    most = -(-BATCH // trainer.accumulation // Strategy.parse(first).data_ranks)
    trainer = dataclasses.replace(trainer, objective=FewRows(most))
    for number, state in enumerate(generations(first, tmp_path)):
        monkeypatch.setenv(launched.VARIABLE, state.text())
        last = 1 + 2 * number if number < len(RANKS) - 1 else STEPS
        stop = StopAfter(last, state.text())
        try:
            dataclasses.replace(trainer, callbacks={"stop": stop}).train(first, options)
        except Interrupted:
            assert last < STEPS
        assert read_report(str(tmp_path)) == JobReport(
            strategy=state.strategy or first, run=str(options.out)
        )
    assert losses(options.out) == pytest.approx(expected, rel=1e-10)
    text = (options.out / "metrics.jsonl").read_text()
    configs = [json.loads(line) for line in text.splitlines() if '"config"' in line]
    assert [config["strategy"] for config in configs] == [
        state.strategy or first for state in generations(first, tmp_path)
    ]


def own_loop(
    strategy: str, text: str | None, last: int
) -> tuple[list[float], list[list[float]], str]:
    """Train as docs/your_model.md shows, and leave the loop after step `last`, as if stopped.

    Return the loss of each step, the first number of each of this rank's rows, and the strategy.
    """
    if text is not None:
        os.environ[launched.VARIABLE] = text
    run = phalanx.init(strategy)
    torch.manual_seed(3)
    model = jobs.perceptron_of_doubles()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers(), BATCH, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.resume("run")
    taken, rows = list[float](), list[list[float]]()
    for _ in range(loader.epoch, 2):
        for x, y in loader:
            rows.append(x[:, 0].tolist())
            taken.append(run.backward(cross_entropy(*run.gather(model(x), y))).item())
            optimizer.step()
            optimizer.zero_grad()
            if run.steps_done == last:
                run.save("run")
                return taken, rows, str(run.strategy)
    return taken, rows, str(run.strategy)


@pytest.mark.parametrize("first", [by_hand("fsdp4"), by_hand("dp4"), by_hand("dp2,fsdp2")])
def test_an_own_loop_continues_on_fewer_and_more_ranks(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((expected, order, _),) = run_ranks(own_loop, 1, "dp1", None, STEPS + 1, threads=1)
    taken, rows = list[float](), list[set[float]]()
    for number, state in enumerate(generations(first, tmp_path)):
        num_ranks = Strategy.parse(state.strategy or first).num_ranks
        found = run_ranks(own_loop, num_ranks, first, state.text(), 2 + 2 * number, threads=1)
        taken += found[0][0]
        rows += [{*chain(*parts)} for parts in zip(*(each for _, each, _ in found), strict=True)]
        assert found[0][2] == (state.strategy or first)
        assert read_report(str(tmp_path)) == JobReport(strategy=found[0][2], run=None)
    assert len(expected) == STEPS and not Path("run-2").exists()
    assert taken == pytest.approx(expected, rel=1e-10)
    assert rows == [{*step} for step in order]


def test_a_repeated_command_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"{Path(jobs.__file__)}:job"
    words = ["train", "--script", script, "--strategy", "dp1", "--threads", "1", "--json"]
    for steps in (1, 3):
        assert main([*words, "--resume", "auto", "--out", "run", "--steps", f"{steps}"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps_done"] == steps
    assert len(losses("run")) == 3
