"""Which BatchNorm takes what statistics; tests/script and tests/examples compare the numbers."""

from __future__ import annotations

import pytest
from torch import nn

from phalanx.comm.comm import Counting
from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel import recompute
from phalanx.parallel.batch_norm import batch_norms, settle_batch_norms
from phalanx.strategy import Recompute

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_every_kind_of_torch_is_found() -> None:
    """By a private base class, of which torch has no public name."""
    model = nn.Sequential(*(kind(3) for kind in KINDS), nn.GroupNorm(3, 3), nn.InstanceNorm2d(3))
    assert [type(norm) for _, norm in batch_norms(model)] == list(KINDS)


@pytest.mark.parametrize(("axes", "words"), [
    ({"dp": 2}, "BatchNorm1d '1' takes mean and variance over the rows of a batch, which 2 ranks"),
    ({"pp": 2, "fsdp": 3}, "which 3 ranks share; say batch_norm='global'"),
    ({"pp": 2}, "and a pipeline computes it in microbatches; say batch_norm='global'"),
])  # fmt: skip
def test_statistics_of_some_rows_are_asked_for(axes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle_batch_norms(normed(), Counting(axes), None)
    settle_batch_norms(normed(), Counting(axes), "local")


def test_what_is_frozen_or_whole_is_left_alone() -> None:
    model = normed()
    settle_batch_norms(model, Counting({"tp": 2}), None)
    model[1].eval()
    settle_batch_norms(model, Counting({"pp": 2, "dp": 2}), None)
    assert "forward" not in vars(model[1])


def test_one_without_running_statistics_is_never_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False).eval())
    with pytest.raises(ConfigError, match="BatchNorm1d '1'"):
        settle_batch_norms(model, Counting({"dp": 2}), None)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(normed() for _ in range(2))


def test_statistics_that_would_move_twice_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"'blocks\.0\.1' is in training.*move twice"):
        recompute.check(Blocks(), Recompute("full"))
    model = Blocks()
    for block in model.blocks:
        block[1].eval()
    assert recompute.check(model, Recompute("full")) == 1
