import copy
import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.strategy import Strategy
from phalanx.verify.compare import (
    Difference,
    StepwiseReference,
    compare_update,
    compare_values,
)
from phalanx.verify.locate import locate
from phalanx.verify.record import Case
from phalanx.verify.reference import MOMENTS, ReferenceRun, StepRecord, Training


class SumOfSquares:
    def loss_sum(self, model: nn.Module, microbatch: Tensor, step: int) -> Tensor:
        return model(microbatch).square().sum()

    def num_valid(self, microbatch: Tensor) -> int:
        return len(microbatch)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def passing(factor: float) -> list[bool]:
    """Return which gradients pass of 64 microbatches, times a factor, in bfloat16."""
    rows = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0)) + 1
    case = Case(build, SumOfSquares(), [rows], dtype="bfloat16")
    pieces, cpu = Training(torch.optim.AdamW, pieces=64), torch.device("cpu")
    ours: StepRecord = next(ReferenceRun(dataclasses.replace(case, training=pieces), cpu).steps())
    ours = {**ours, "gradient": {n: g * factor for n, g in ours["gradient"].items()}}
    whole = dataclasses.replace(case, training=Training(torch.optim.AdamW))
    found = StepwiseReference(whole, cpu).compare(0, ours)
    return [row.passes for row in found if row.quantity == "gradient"]


def test_sums_that_bfloat16_loses_are_no_fault_of_the_split() -> None:
    """One process adds 2,048 rows up in bfloat16, of which each microbatch has 32."""
    assert all(passing(1.0))


def test_a_gradient_of_twice_the_size_still_differs_in_bfloat16() -> None:
    assert not any(passing(2.0))


def test_terms_that_cancel_in_a_moment_set_its_limit() -> None:
    """A moment of -1/4 and a change of 1/4, each rounded, add up to nearly nothing in bfloat16."""
    begin: StepRecord = {"first moment": {"bias": torch.tensor([-0.25])}}
    right: StepRecord = {"first moment": {"bias": torch.tensor([0.01])}}
    for error, passes in ((0.005, True), (0.05, False)):
        ours: StepRecord = {"first moment": {"bias": torch.tensor([0.01 + error])}}
        (row,) = compare_update(0, ours, right, begin, torch.bfloat16)
        assert row.passes == passes


def test_an_update_leaves_the_state_it_began_from() -> None:
    run = ReferenceRun(Case(build, SumOfSquares(), [torch.ones(4, 16)] * 2), torch.device("cpu"))
    made = run.compute(0)
    begin: StepRecord = {**run.update(0, made), "buffer": {}, "gradient": made["gradient"]}
    begin = {**begin, "step counter": dict.fromkeys(begin["weight"], torch.tensor(1.0))}
    kept = copy.deepcopy(begin)
    run.begin_from(begin)
    run.take_gradients(begin["gradient"])
    run.update(1, made)
    assert all(not compare_values(0, what, begin[what], kept[what])[0].error for what in MOMENTS)
    assert not compare_values(0, "gradient", begin["gradient"], kept["gradient"])[0].error


def test_a_moment_that_differs_first_is_of_the_update_without_another_step() -> None:
    """Workers of servers run backward of sums, which no module of the reference does."""
    case, unused = Case(build, SumOfSquares(), [torch.ones(4, 16)]), cast(Any, None)
    moment = Difference(0, "first moment", "bias", 1.0)
    place = locate(case, Strategy.parse("dp2:ps"), unused, moment, unused)
    assert "the gradient of bias agrees, so the optimizer's update is wrong" in place.what
