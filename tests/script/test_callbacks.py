"""Metrics, the best checkpoint, an early end, callbacks, loggers: for a module and for text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from loops import Numbers
from torch import nn

import phalanx
from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.errors import ConfigError
from phalanx.train.evaluate import Evaluation
from phalanx.train.step import StepResult
from small_run import small_run


class Measured(jobs.Classes):
    """Counts the rows that are right, and the mean confidence of those."""

    def metric_sums(self, model: nn.Module, microbatch: Any) -> Mapping[str, Any]:
        scores = model(microbatch[0]).softmax(1)
        is_right = scores.argmax(1) == microbatch[1]
        confidence = scores.amax(1)[is_right].sum()
        return {"accuracy": is_right.sum(), "confidence": (confidence, is_right.sum())}


class Average(phalanx.Callback):
    """Adds up the losses, as an average of anything does."""

    def __init__(self) -> None:
        self.total, self.num_steps = 0.0, 0

    def step(self, steps_done: int, result: StepResult) -> None:
        self.total += result.loss
        self.num_steps = steps_done

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.num_steps = state["total"], state["num_steps"]


class EndsAt(phalanx.Callback):
    """Ends the run after a step or an evaluation; asked of one rank alone."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.at, self.rank = step, rank

    def step(self, steps_done: int, result: StepResult) -> bool:
        return steps_done == self.at and torch.distributed.get_rank() == self.rank


class WritesDown(phalanx.Callback):
    """Writes what it is told to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, model: nn.Module) -> None:
        self._write(f"begin {type(model).__name__}")

    def step(self, steps_done: int, result: StepResult) -> None:
        self._write(f"step {steps_done}")

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(f"evaluation {evaluation.step} {sorted(evaluation.metrics)}")

    def _write(self, line: str) -> None:
        if torch.distributed.get_rank() == 0:
            with self.file.open("a") as file:
                file.write(f"{line}\n")


@dataclasses.dataclass
class Logger:
    """Any other logger: a function of the kind and the values of a record."""

    file: Path

    def __call__(self, kind: str, values: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([kind, values.get("step"), values.get("loss")]) + "\n")


@pytest.mark.parametrize("strategy", ["dp2", "pp2", by_hand("fsdp2"), by_hand("pp2,dp2")])
def test_metrics_are_those_of_one_process(tmp_path: Path, strategy: str) -> None:
    """Ranks have unlike numbers of rows, and of right ones."""
    trainer = dataclasses.replace(jobs.of_few_rows(), objective=Measured(), epochs=1)
    found = trainer.train(strategy, phalanx.Options(out=tmp_path, threads=1)).evaluations
    torch.manual_seed(trainer.seed)
    model, data = jobs.perceptron_of_doubles(), Numbers()
    scores = model(data.x).softmax(1).detach()
    is_right = scores.argmax(1) == data.y
    expected = {
        "accuracy": float(is_right.double().mean()),
        "confidence": float(scores.amax(1)[is_right].mean()),
    }
    assert found[0].metrics == pytest.approx(expected, rel=1e-12)
    assert found[-1].metrics != found[0].metrics


def test_the_best_checkpoint_stays_and_patience_ends_the_run(tmp_path: Path) -> None:
    """Steps that climb: each loss is above the one before."""
    trainer = dataclasses.replace(jobs.job(), optimizer=climbing, scheduler=None, max_norm=None)
    options = phalanx.Options(
        out=tmp_path, threads=1, save="every=2,keep=1,best=max:loss", eval_every=1, patience=2,
    )  # fmt: skip
    summary = trainer.train("dp2", options)
    losses = [each.loss for each in summary.evaluations]
    assert losses == sorted(losses) and summary.steps_done == 10, "each is better by max"
    assert list(manifest.complete_checkpoints(tmp_path)) == [10]
    down = dataclasses.replace(options, out=tmp_path / "down", save="every=2,keep=1,best=min:loss")
    first = dataclasses.replace(trainer, steps=1).train("dp2", down)
    assert first.best is not None and "after step 0" in first.best
    resumed = trainer.train("dp2", dataclasses.replace(down, resume=True))
    assert resumed.steps_done == 2, "the second evaluation that is no better, over both runs"
    assert resumed.best is not None and "the run ended" in resumed.best


def climbing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, maximize=True)


def test_the_best_in_the_middle_outlives_later_ones(tmp_path: Path) -> None:
    trainer = dataclasses.replace(
        jobs.job(), optimizer=descending, scheduler=turning, max_norm=None, epochs=2
    )
    options = phalanx.Options(
        out=tmp_path, threads=1, save="every=4,keep=1,best=min:loss", eval_every=1
    )
    summary = trainer.train("dp1", options)
    losses = {each.step: each.loss for each in summary.evaluations}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 8, losses
    assert list(manifest.complete_checkpoints(tmp_path)) == [best, 10]


def descending(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def turning(optimizer: Any) -> Any:
    """Steps that become far too large after the third."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 200.0)


def test_a_measure_that_no_evaluation_has_is_named(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, threads=1, save="best=max:accuracy")
    with pytest.raises(ConfigError, match="an evaluation measures loss; expected one of these"):
        jobs.job().train("dp1", options)
    with pytest.raises(ConfigError, match="expected min: or max: and a measure"):
        phalanx.Options(out=tmp_path / "again", threads=1, save="best=accuracy")


def test_a_callback_is_saved_with_the_run_and_resumed(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path / "whole", threads=1)
    trainer = dataclasses.replace(jobs.job(), callbacks={"average": Average()})
    trainer.train("dp2", options)
    parts = dataclasses.replace(options, out=tmp_path / "parts")
    dataclasses.replace(trainer, steps=4).train("dp2", parts)
    trainer.train("fsdp2", dataclasses.replace(parts, resume=True))
    states = [
        manifest.read(manifest.find(tmp_path / name)).registered["average"]["state"]
        for name in ("whole", "parts")
    ]
    assert states[1]["num_steps"] == states[0]["num_steps"] == 10
    assert states[1]["total"] == pytest.approx(states[0]["total"], rel=1e-10)


def test_one_rank_may_end_the_run(tmp_path: Path) -> None:
    trainer = dataclasses.replace(jobs.job(), callbacks={"end": EndsAt(3, rank=1)})
    summary = trainer.train("dp2", phalanx.Options(out=tmp_path, threads=1))
    assert (summary.steps_done, summary.evaluations[-1].step) == (3, 3)
    assert list(manifest.complete_checkpoints(tmp_path)) == [3]


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"subclass of phalanx\.Callback"):
        dataclasses.replace(jobs.job(), callbacks={"end": print})  # type: ignore[dict-item]


RECORD = """
import pathlib

def record(kind, values):
    with (pathlib.Path(__file__).parent / "kinds").open("a") as file:
        print(kind, file=file)
"""


def test_text_has_them_too(tmp_path: Path) -> None:
    (tmp_path / "kinds_of_records.py").write_text(RECORD)
    config = small_run(
        tmp_path, strategy="dp2", steps=3, eval_every=1, save="best=min:bits_per_byte", patience=50,
        log_to=f"{tmp_path}/kinds_of_records.py:record",
    )  # fmt: skip
    told, logged = tmp_path / "told", tmp_path / "logged"
    callbacks = {"told": WritesDown(told), "average": Average()}
    summary = phalanx.train_decoder(config, callbacks=callbacks, log=Logger(logged))
    assert told.read_text().splitlines() == [
        "begin Decoder",
        "evaluation 0 ['bits_per_byte']",
        *(f"{what} {step}{more}" for step in (1, 2, 3)
          for what, more in (("step", ""), ("evaluation", " ['bits_per_byte']"))),
    ]  # fmt: skip
    records = [json.loads(line) for line in logged.read_text().splitlines()]
    steps = [record for record in records if record[0] == "step"]
    assert [loss for _, _, loss in steps] == summary.losses
    kinds = {record[0] for record in records}
    assert kinds >= {"environment", "config", "step", "evaluation", "memory", "summary"}
    assert (tmp_path / "kinds").read_text().split() == [record[0] for record in records]
    assert summary.best is not None and summary.best.startswith("min:bits_per_byte")
    out = Path(str(config.out))
    average = manifest.read(manifest.find(out)).registered["average"]["state"]
    assert average["total"] == pytest.approx(sum(summary.losses), rel=1e-12)
    longer = dataclasses.replace(config, resume=str(out), steps=4)
    phalanx.train_decoder(longer, callbacks=callbacks)
    assert manifest.read(manifest.find(out)).registered["average"]["state"]["num_steps"] == 4
