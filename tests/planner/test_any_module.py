"""A module that is no decoder is counted on the meta device, and planned by the same table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx.account.module import count_module
from phalanx.cli.plan_script import plan_script
from phalanx.errors import ConfigError, StrategyError

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


def asking():
    return job(Asks)


def failing():
    raise OSError("the disk is away")


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


def test_a_job_is_planned_as_a_preset_is(script: str) -> None:
    found = plan_script(f"{script}:job", "h100:4", "phalanx", None)
    names = [each.strategy for each in found["candidates"]]
    assert {"dp4", "fsdp4", "pp2,dp2"} <= set(names)
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
    with pytest.raises(ConfigError, match="Identity has no parameters, so nothing is trained"):
        plan_script(f"{script}:empty", "h100:4", "phalanx", None)
    with pytest.raises(StrategyError, match="a script starts no servers for dp:async"):
        plan_script(f"{script}:job", "h100:4", "phalanx", "dp4:async")
    with pytest.raises(ConfigError, match="the nearest batch is 72"):
        plan_script(f"{script}:job", "h100:64", "phalanx", "dp12,fsdp3")


def test_figures_are_plain_values(script: str) -> None:
    found = plan_script(f"{script}:job", "h100:2", "phalanx", None)
    assert all(dataclasses.asdict(each) for each in found["candidates"])
