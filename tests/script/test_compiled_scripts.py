"""torch.compile stays on in a prepared model, and computes the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import phalanx
from marks import by_hand
from phalanx.launch.local import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.map(x).tanh())


class Blocks(nn.Module):
    """Blocks with a dropout in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def numbers_and_graphs(strategy: str, build: Any, what: str) -> tuple[list[float], list[int]]:
    """Return the loss of each step and the compiled graphs that it ran.

    `what` is compiled: the model "before" or "after" it is prepared, its "blocks", or "nothing".
    """
    num_run = 0

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal num_run
            num_run += 1
            return graph(*args)

        return call

    run = phalanx.init(strategy)
    model, optimizer, loader, _ = loops.parts_of(loops.Case(build=build))
    if what == "before":
        model.compile(backend=counting)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    if what == "after":
        model = torch.compile(model, backend=counting)
    for block in model.blocks if what == "blocks" else ():
        block.compile(backend=counting)
    losses: list[float] = []
    graphs: list[int] = []
    for x, y in loader:
        before = num_run
        loss = run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        graphs.append(num_run - before)
    return losses, graphs


def all_of(strategy: str, build: Any, ways: list[str]) -> list[tuple[list[float], list[int]]]:
    return [numbers_and_graphs(strategy, build, way) for way in ("nothing", *ways)]


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "build", "ways"),
    [
        (1, "dp1", loops.perceptron, {"after": 1}),
        by_hand(2, "dp2", loops.perceptron, {"before": 1, "after": 1}),
        by_hand(2, "dp2", Blocks, {"before": 5, "after": 5, "blocks": 4}),
        by_hand(2, "fsdp2", Blocks, {"blocks": 4}),
    ],
)
def test_a_compiled_model_stays_compiled(
    num_ranks: int, strategy: str, build: Any, ways: dict[str, int]
) -> None:
    found = run_ranks(all_of, num_ranks, strategy, build, list(ways), threads=1)
    for (expected, none), *compiled in found:
        assert not any(none)
        for (losses, graphs), num_graphs in zip(compiled, ways.values(), strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)
            assert min(graphs) >= num_graphs
            assert len(set(graphs)) == 1
