"""A module that is no decoder is counted on the meta device, and planned by the same table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx.account.module import count_module
from phalanx.account.planned import PlannedStep
from phalanx.account.rank_memory import StageMemory, memory
from phalanx.cli.plan_script import plan_script
from phalanx.errors import ConfigError, StrategyError
from phalanx.planner.hardware import device
from phalanx.script.counting import module_of
from phalanx.script.trainer import trainer_of
from phalanx.strategy import Strategy

JOB = """
import functools
import phalanx, torch
from torch import nn
from torch.utils.data import TensorDataset


class Squared:
    def loss_sum(self, model, microbatch, step):
        x, y = microbatch
        return nn.functional.mse_loss(model(x), y, reduction="sum")

    def num_valid(self, microbatch):
        return len(microbatch[0])


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else self.layer(-x)


def build():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 65), nn.Linear(65, 1))


def job(build=build):
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    return phalanx.Trainer(build, Squared(), data, optimizer=sgd, batch_size=64, accumulation=2)


def wide(dtype=torch.float32, accumulation=1):
    def build():
        return nn.Sequential(*[nn.Linear(4096, 4096, dtype=dtype) for _ in range(4)])

    x = torch.empty(4096, 4096, dtype=dtype)
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    data = TensorDataset(x, x)
    return phalanx.Trainer(
        build, Squared(), data, optimizer=sgd, batch_size=4096, accumulation=accumulation
    )


def wide_bfloat16():
    return wide(torch.bfloat16)


def wide_float64():
    return wide(torch.float64)


def wide_accumulated():
    return wide(accumulation=2)


def wide_half_frozen():
    trainer = wide()

    def build():
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)])
        model[:2].requires_grad_(False)
        return model

    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    return phalanx.Trainer(build, Squared(), trainer.data, optimizer=adamw, batch_size=4096)


def asking():
    return job(Asks)


def failing():
    raise OSError("the disk is away")


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class Refusing(nn.Linear):
    def forward(self, x):
        raise Mute


def mute():
    raise Mute


def refusing():
    return job(lambda: Refusing(8, 1))


def empty():
    return job(nn.Identity)
"""


class Sum:
    def loss_sum(self, model: nn.Module, microbatch: Tensor, step: int) -> Tensor:
        return model(microbatch).sum()


def test_links_have_the_flops_and_bytes_of_their_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 32))
    links = count_module(model, Sum(), torch.empty(10, 8, device="meta"), "a job")
    assert [link.modules for link in links] == [("0",), ("1",), ("2",)]
    first, second = 2 * 10 * 8 * 64, 2 * 10 * 64 * 32
    assert [link.flops for link in links] == [2 * first, 0, 3 * second]  # no gradient of the input
    assert sum(link.kept for link in links[:2]) == 4 * 10 * 64  # tanh keeps its result alone
    assert links[1].output == 4 * 10 * 64


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("planned") / "job_to_plan.py"
    Path(path).write_text(JOB)
    return str(path)


def held(script: str, name: str, on: str = "h100") -> StageMemory:
    """Return what a job holds on one device."""
    trainer = trainer_of(f"{script}:{name}")
    module = module_of(trainer, name)
    microbatch = trainer.batch_size // trainer.accumulation
    planned = PlannedStep(module, Strategy(), microbatch, trainer.accumulation)
    (found,) = memory(planned, device(on).kind)
    return found


def test_frozen_parameters_have_no_moments(script: str) -> None:
    of = held(script, "wide_half_frozen")
    assert of.optimizer == of.weights == 4 * 4 * (4096**2 + 4096)


def test_a_job_is_planned_as_a_preset_is(script: str) -> None:
    found = plan_script(f"{script}:job", "h100:4", "phalanx", None)
    names = [each.strategy for each in found["candidates"]]
    assert {"dp4", "fsdp4:zero1", "pp2,dp2"} <= set(names)
    times = [each.step_time_s for each in found["candidates"]]
    parameters = 8 * 64 + 64 + 64 * 65 + 65 + 66
    assert times == sorted(times) and found["question"]["parameters"] == parameters
    of_dp = next(each for each in found["candidates"] if each.strategy == "dp4")
    assert of_dp.memory["weights"] == 4 * found["question"]["parameters"]
    assert of_dp.memory["optimizer"] == 0, "SGD without momentum keeps nothing"
    assert (of_dp.microbatch, of_dp.accumulation) == (8, 2)


def test_a_named_strategy_says_where_it_cuts(script: str) -> None:
    found = plan_script(f"{script}:job", "h100:4", "phalanx", "pp2,dp2")
    assert [each.strategy for each in found["candidates"]] == ["pp2,dp2"]
    stages = [line for line in found["advice"] if line.startswith("stage")]
    assert len(stages) == 2 and stages[1].startswith("stage 1, rank 1 of pp: ")
    assert found["advice"][-1].startswith("slowest stage / mean: ")


def test_what_asks_for_numbers_is_refused_in_a_sentence(script: str) -> None:
    with pytest.raises(ConfigError, match=r"asking cannot be counted on the meta device.*item\(\)"):
        plan_script(f"{script}:asking", "h100:4", "phalanx", None)
    with pytest.raises(ConfigError, match=r"raised OSError: the disk is away \(.*plan\.py, line"):
        plan_script(f"{script}:failing", "h100:4", "phalanx", None)
    with pytest.raises(ConfigError, match=r"raised Mute: its text cannot be read \(.*plan\.py, li"):
        plan_script(f"{script}:mute", "h100:4", "phalanx", None)
    with pytest.raises(ConfigError, match=r"cannot be counted .*: Mute: its text cannot be read"):
        plan_script(f"{script}:refusing", "h100:4", "phalanx", None)
    with pytest.raises(ConfigError, match="Identity has no parameters, so nothing is trained"):
        plan_script(f"{script}:empty", "h100:4", "phalanx", None)
    with pytest.raises(StrategyError, match="a script starts no servers for dp:async"):
        plan_script(f"{script}:job", "h100:4", "phalanx", "dp4:async")
    with pytest.raises(ConfigError, match="the nearest batch is 72"):
        plan_script(f"{script}:job", "h100:64", "phalanx", "dp12,fsdp3")


def test_figures_are_plain_values(script: str) -> None:
    found = plan_script(f"{script}:job", "h100:2", "phalanx", None)
    assert all(dataclasses.asdict(each) for each in found["candidates"])


def test_the_peak_of_the_modules_data_type_is_the_bound(script: str) -> None:
    """An H100 has 989.4 TFLOP/s in 16 bits, 66.9 in 32 and in 64."""
    # 4 layers of 4096 x 4096, forward, and backward without the gradient of the first input.
    flops = (4 * 3 - 1) * 2 * 4096**3
    peaks = {"wide": 66.9e12, "wide_bfloat16": 989.4e12, "wide_float64": 66.9e12}
    for name, peak in peaks.items():
        found = plan_script(f"{script}:{name}", "h100:1", "phalanx", "dp1")
        (best,) = found["candidates"]
        assert best.t_theoretical_s == pytest.approx(flops / peak, rel=1e-3), name
        assert 1 < best.step_time_s / best.t_theoretical_s < 2.5, name


def test_a_data_type_without_a_peak_is_refused(script: str) -> None:
    for name, on, types in (
        ("wide_float64", "b200", "bfloat16 or float32"),
        ("wide", "tpu-v5p", "bfloat16"),
    ):
        with pytest.raises(ConfigError, match=f"of {on} in .* expected a model in {types}$"):
            plan_script(f"{script}:{name}", f"{on}:1", "phalanx", None)


def test_accumulated_gradients_are_there_when_activations_are_the_most(script: str) -> None:
    gradients = 4 * (4 * 4096 * 4096 + 4 * 4096)
    one, two = (held(script, name) for name in ("wide", "wide_accumulated"))
    assert (one.gradients, one.early_gradients) == (gradients, 0)
    assert (two.gradients, two.early_gradients) == (gradients, gradients)
    assert two.activations and two.at_peak()["gradients"] == gradients
    assert two.total == two.weights + gradients + two.activations + two.margin


def test_a_margin_belongs_to_gpus(script: str) -> None:
    assert held(script, "wide").margin > 1 << 30
    assert held(script, "wide", "tpu-v5p").margin == 0
