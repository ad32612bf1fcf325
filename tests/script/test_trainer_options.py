"""What any run may be told holds for a module as for text: precision, saves, skipped steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from loops import Numbers, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.checkpoint import manifest
from phalanx.cli.main import main
from phalanx.errors import ConfigError, ScriptError, TrainingError


class Floats(Numbers):
    """Rows in the type of the weights of `perceptron`."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.x.float()


def job(**changes: Any) -> phalanx.Trainer:
    trainer = phalanx.Trainer(perceptron, jobs.Classes(), Floats(), batch_size=8, epochs=1)
    return dataclasses.replace(trainer, **changes)


def plain_losses(
    dtype: torch.dtype | None = None, weights: torch.dtype | None = None
) -> list[float]:
    """Return the losses of plain PyTorch, under torch.autocast of a type or in another type."""
    torch.manual_seed(0)
    model = perceptron().to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for x, y in DataLoader(Floats(), 8, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = cross_entropy(model(x.to(weights)), y, reduction="sum") / len(y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("strategy", ["dp2", by_hand("fsdp2"), by_hand("pp2")])
def test_a_precision_is_that_of_plain_pytorch(tmp_path: Path, strategy: str) -> None:
    for name, plain, limit in (
        ("auto", plain_losses(), 1e-5),
        ("bfloat16", plain_losses(torch.bfloat16), 2e-2),
        ("float64", plain_losses(weights=torch.float64), 1e-10),
    ):
        options = phalanx.Options(out=tmp_path / name, threads=1, precision=name)
        losses = job().train(strategy, options).losses
        assert losses == pytest.approx(plain, rel=limit), name
    narrow, wide = plain_losses(torch.bfloat16), plain_losses()
    assert narrow != pytest.approx(wide, rel=1e-5), "the types differ where they are compared"


def test_a_scaled_loss_is_for_gpus(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, device="cpu", precision="float16")
    with pytest.raises(ConfigError, match="on a CPU the nearest is bfloat16"):
        job().train("dp1", options)


@pytest.mark.slow  # it starts the compiler
def test_blocks_are_compiled(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path / "compiled", threads=1, compile=True)
    trainer = job(build=jobs.Dropping)
    losses = trainer.train("dp2", options).losses
    eager = dataclasses.replace(options, out=tmp_path / "eager", compile=False)
    assert losses == pytest.approx(trainer.train("dp2", eager).losses, rel=1e-4)


def steps_in(folder: Path) -> list[int]:
    return list(manifest.complete_checkpoints(folder))


def test_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, threads=1, save="every=1,keep=2")
    job().train("dp2", options)
    assert steps_in(tmp_path) == [4, 5]


def test_a_checkpoint_by_the_clock_is_replaced_by_the_next(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, threads=1, save="every=4,minutes=1e-9")
    job().train("dp1", options)
    assert steps_in(tmp_path) == [4, 5]


class Spiking(jobs.Classes):
    """Has no finite loss in the second step."""

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        loss = super().loss_sum(model, microbatch, step)
        return loss * float("nan") if step == 1 else loss


def test_a_loss_that_is_not_finite_ends_the_run_or_its_step_is_skipped(tmp_path: Path) -> None:
    trainer = job(objective=Spiking())
    options = phalanx.Options(out=tmp_path / "stops", threads=1)
    with pytest.raises(TrainingError, match="step 2: the loss is nan"):
        trainer.train("dp2", options)
    options = phalanx.Options(out=tmp_path / "skips", threads=1, nonfinite="skip")
    losses = trainer.train("dp2", options).losses
    assert [loss == loss for loss in losses] == [True, False, True, True, True]
    lines = map(json.loads, (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines())
    assert [each["skipped"] for each in lines if each["kind"] == "step"] == [
        *(False, True, False, False, False)
    ]


def test_gradients_are_compressed_as_asked(tmp_path: Path) -> None:
    exact = job(epochs=2).train("dp1", phalanx.Options(out=tmp_path / "exact", threads=1)).losses
    options = phalanx.Options(out=tmp_path / "int8", threads=1, compress="int8")
    with pytest.raises(ConfigError, match="compress is int8, but fsdp2 sums no gradients"):
        job().train("fsdp2", options)
    losses = job().train("dp2", options).losses
    resumed = job(epochs=2).train("dp2", dataclasses.replace(options, resume=True)).losses
    assert losses + resumed != exact
    assert losses + resumed == pytest.approx(exact, rel=1e-2)


def test_a_report_shows_where_time_bytes_and_memory_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"{Path(__file__).parent}/jobs.py:job"
    words = ["train", "--script", script, "--strategy", "dp2", "--out", str(tmp_path)]
    assert main([*words, "--threads", "1", "--report"]) == 0
    printed = capsys.readouterr().out
    for title in ("steps went", "What one rank sends in a step", "What rank 0 holds in a step"):
        assert title in printed
    assert max(map(len, printed.splitlines())) <= 200
    assert f"phalanx train --script {script} --resume {tmp_path} --steps 20" in printed


class Counting(nn.Tanh):
    """Counts its own calls in an extra state."""

    seen = 0

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def counting() -> nn.Module:
    first, *rest = perceptron().children()
    return nn.Sequential(first, Counting(), *rest)


def test_a_pipeline_refuses_an_extra_state_and_another_strategy_saves_it(tmp_path: Path) -> None:
    trainer, options = job(build=counting, steps=2), phalanx.Options(out=tmp_path, threads=1)
    with pytest.raises(ScriptError, match="pp: 1 has a get_extra_state"):
        trainer.train("pp2", dataclasses.replace(options, out=tmp_path / "pp"))
    done = trainer.train("dp2", options)
    about = json.loads((Path(done.checkpoint) / manifest.NAME).read_text())
    assert about["registered"]["extra_state"]["state"] == {"1": {"seen": 2}}


def test_arguments_of_another_kind_are_refused_in_a_sentence(tmp_path: Path) -> None:
    options = phalanx.Options(out=tmp_path, device="cpu")
    trainer: Any = job()
    for call, words in (
        (lambda: phalanx.Options(**{"out": ""}), "out is ''; expected a folder"),
        (lambda: dataclasses.replace(trainer, callbacks=[phalanx.Callback()]), "a dict by name"),
        (lambda: dataclasses.replace(trainer, log=3), "log is a int; expected a function"),
        (lambda: trainer.train("dp1", {"out": tmp_path}), "is a dict; expected a strategy"),
        (lambda: trainer.train(2, options), "2 is a int; expected a strategy"),
        (lambda: trainer.train(None, options), "None is a NoneType; expected a strategy"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
