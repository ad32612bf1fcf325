"""A run that dies has a verdict, with the rank and the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.cli.verify import print_verdicts, show_verdicts
from phalanx.report.terminal import Terminal
from phalanx.verify.harness import verify


class Dies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise KeyError("angles")
        return x


def dying() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Sequential(Dies(), nn.Linear(3, 1)))


class Squares:
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return model(microbatch).square().sum()

    def num_valid(self, microbatch: Any) -> int:
        return len(microbatch)


def test_a_rank_that_dies_is_named_with_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = verify(dying, [torch.ones(8, 5)], "dp2", Squares())
    assert not verdict.is_equal
    assert verdict.place is not None
    assert (verdict.place.module, verdict.place.rank) == ("1.0", 1)
    words = "rank 1 fails in the forward of 1.0 of step 0: KeyError: 'angles'"
    assert words in str(verdict)
    assert "in forward\n    raise KeyError" in verdict.failure
    show_verdicts([verdict], Terminal())
    print_verdicts([verdict])
    printed = capsys.readouterr().out
    assert words in " ".join(printed.split()) and '"module": "1.0"' in printed
