"""Which BatchNorm takes what statistics; tests/script and tests/examples compare the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel import recompute
from phalanx.parallel.batch_norm import BatchNormSplit, batch_norms, require_statistics
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.strategy import Recompute, Strategy

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_every_kind_of_torch_is_found() -> None:
    """By a private base class, of which torch has no public name."""
    model = nn.Sequential(*(kind(3) for kind in KINDS), nn.GroupNorm(3, 3), nn.InstanceNorm2d(3))
    assert [type(norm) for _, norm in batch_norms(model)] == list(KINDS)


@pytest.mark.parametrize(("text", "words"), [
    ("dp2", "BatchNorm1d '1' takes mean and variance over the rows of a batch, and the"),
    ("pp2,fsdp3", "is split over 3 ranks; set batch_norm='global'"),
    ("pp2", "and a pipeline splits the batch into microbatches; set batch_norm='global'"),
])  # fmt: skip
def test_statistics_of_some_rows_are_asked_for(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_statistics(normed(), Strategy.parse(text), None)
    require_statistics(normed(), Strategy.parse(text), "local")
    statistics: Any = "mine"
    with pytest.raises(ConfigError, match="batch_norm is 'mine'; expected 'global' or 'local'"):
        Plan(Strategy.parse(text), normed(), batch_norm=statistics)


def test_what_is_frozen_or_whole_is_left_alone() -> None:
    model = normed()
    require_statistics(model, Strategy.parse("tp2"), None)
    model[1].eval()
    require_statistics(model, Strategy.parse("pp2,dp2"), None)
    assert not BatchNormSplit.applies_to(target_of(model))
    model[1].train()
    assert BatchNormSplit.applies_to(target_of(model))


def target_of(model: nn.Module) -> Target:
    return Target(Strategy.parse("dp2"), skeleton_of(model), batch_norm="global")


def test_one_without_running_statistics_is_never_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False).eval())
    with pytest.raises(ConfigError, match="BatchNorm1d '1'"):
        require_statistics(model, Strategy.parse("dp2"), None)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(normed() for _ in range(2))


def test_statistics_that_would_move_twice_are_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"'blocks\.0\.1' is in training.*update its running statistics twice"
    ):
        recompute.check(Blocks(), Recompute("full"))
    model = Blocks()
    for block in model.blocks:
        block[1].eval()
    assert recompute.check(model, Recompute("full")) == 1
