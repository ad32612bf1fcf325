"""What stages of any module send is told before it runs, and is what the ledger counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.pipeline.borders import Borders
from phalanx.parallel.pipeline.links import chain_by, links_of
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import skeleton_of
from phalanx.strategy import Strategy
from phalanx.verify.harness import verify


class Squares:
    """Sum of the squares of the differences from targets."""

    def loss_sum(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum()

    def num_valid(self, batch: Any) -> int:
        return len(batch["x"])


def chain() -> nn.Sequential:
    """Layers whose outputs are of several widths."""
    torch.manual_seed(0)
    widths = [6, 10, 8, 3, 5, 2]
    maps = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(maps[0], nn.Tanh(), *maps[1:])


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def batches(*sizes: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {
            name: torch.randn(size, width, generator=draw, dtype=torch.float64)
            for name, width in (("x", 6), ("y", 2))
        }
        for size in sizes
    ]


@pytest.mark.parametrize(
    "text",
    ["pp2", pytest.param("pp2:zbv", marks=pytest.mark.slow),
     pytest.param("pp2,fsdp2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_what_stages_send_is_what_is_counted(text: str) -> None:
    # The last step has other rows than those before, and microbatches of two sizes.
    verdict = verify(chain, batches(16, 16, 14), text, Squares(), accumulation=4)
    assert verdict.is_equal, str(verdict)
    rows = {(row.phase, row.axis): row for row in verdict.sent if row.axis == "pp"}
    assert {phase for phase, _ in rows} >= {"forward", "sizes"}
    for row in rows.values():
        assert row.counted == row.predicted, str(row)


def test_sums_of_batch_norm_are_what_is_counted() -> None:
    verdict = verify(normed, batches(8, 8), "dp2", Squares(), batch_norm="global")
    assert verdict.is_equal, str(verdict)
    assert verdict.sent
    for row in verdict.sent:
        assert row.counted == row.predicted, str(row)


def test_a_module_that_reads_numbers_is_not_told() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    model = nn.Sequential(Reading(2, 2), nn.Linear(2, 2))
    plan = Plan(
        Strategy.parse("pp2"), model, run_on_shapes=lambda m, size: m(torch.ones(size[0], 2))
    )
    assert {entry.phase for entry in plan.traffic([(4, 1)] * 2)} == {"sizes"}
    cut = [range(1), range(1, 2)]
    made = chain_by(skeleton_of(model), links_of(model), cut)
    run: Any = lambda m, size: m(torch.ones(size[0], 2, device="meta"))  # noqa: E731
    assert Borders(model, made, run).after((4, 1)) is None
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    made = chain_by(skeleton_of(plain), links_of(plain), cut)
    (border,) = Borders(plain, made, run).after((4, 1)) or []
    assert border.nbytes == 4 * 3 * 4
