"""Links are timed one by one, and the best cut is that of their times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.pipeline import measured
from phalanx.parallel.pipeline.cut import ranges_of
from phalanx.parallel.pipeline.links import chain_by, links_of
from phalanx.parallel.pipeline.measured import link_times, with_best_cut
from phalanx.parallel.pipeline.modules import ModuleStages
from phalanx.parallel.skeleton import skeleton_of
from phalanx.strategy import Strategy


class Clock:
    """Goes on when a layer runs, and not by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(nn.Linear):
    """Takes `cost_s` forward and twice as long backward."""

    def __init__(self, cost_s: float, clock: Clock) -> None:
        super().__init__(3, 3)
        self.cost_s, self.clock = cost_s, clock

    def _take(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def forward(self, x: Tensor) -> Tensor:
        self._take(self.cost_s)
        output = super().forward(x)
        output.register_hook(lambda _: self._take(2 * self.cost_s))
        return output


def chain(costs: list[float], clock: Clock) -> nn.Module:
    return nn.Sequential(*(Slow(cost_s, clock) for cost_s in costs))


def of_one_link(model: nn.Module) -> ModuleStages:
    links = links_of(model)
    chain = chain_by(skeleton_of(model), links, ranges_of([1] * len(links)))
    return ModuleStages(model, chain, range(len(links)))


def test_each_link_has_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measured, "_now_s", clock)
    costs = [1.0, 5.0, 2.0]
    model = chain(costs, clock)
    times = link_times(of_one_link(model), lambda: model(torch.ones(2, 3)).sum(), 3)
    assert times == [pytest.approx((cost, 2 * cost)) for cost in costs]


def test_a_layer_that_needs_no_gradient_is_timed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    times = link_times(of_one_link(model), lambda: model(torch.ones(5, 2, 2)).sum(), 1)
    assert len(times) == 4 and all(forward_s > 0 for forward_s, _ in times)


@pytest.mark.parametrize(
    ("costs", "text", "expected"),
    [
        ([1, 1, 1, 1], "pp2", "2+2"),
        ([3, 1, 1, 1], "pp2", "1+3"),  # by parameters it is 2+2
        ([1, 1, 9, 1, 1, 1], "pp3,dp2", "2+1+3"),
        ([1, 1, 2, 2, 1, 1], "pp2:zbv", "2+1+1+2"),
    ],
)
def test_the_cut_follows_the_times(costs: list[float], text: str, expected: str) -> None:
    best = with_best_cut(Strategy.parse(text), costs)
    assert str(best) == f"{text},cut:{expected}"
