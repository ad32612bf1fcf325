"""The one process of a comparison computes gradients by autograd, whatever `run.backward` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mutants import Patch, planted
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.script import init
from phalanx.script.loop_step import LoopStep
from phalanx.strategy import Strategy
from phalanx.verify.plain_loop import PlainLoop

X, Y = torch.linspace(-1, 1, 7 * 6).view(7, 6).double().sin(), torch.linspace(0, 2, 7).double()
Loss = Callable[[Tensor, Tensor], dict[str, Any]]
LOSSES: dict[str, Loss] = {
    "sum": lambda z, y: {"sum_of_rows": mse_loss(z, y, reduction="sum"), "count": len(y)},
    "mean": lambda z, y: {"mean_of_rows": mse_loss(z, y), "count": len(y)},
    "weights": lambda z, y: {"loss": (z - y) ** 2, "weights": 1 + y},
    "batch": lambda z, y: {"loss": mse_loss(z, y)},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()


def _half_a_gradient(right: Any) -> Any:
    def wrong(self: Any) -> None:
        right(self)
        for gradient in self.gradients():
            gradient /= 2

    return wrong


def steps_on_one_process() -> list[list[Tensor]]:
    """Return each loss's gradients of the steps, of which each but the last has two batches."""
    found: list[list[Tensor]] = []
    fault: Patch = (LoopStep, "close", _half_a_gradient)
    init.OVERRIDES.append((Strategy(), PlainLoop))
    with planted(fault):
        for each in LOSSES.values():
            found.append([*_gradients(each)])
    init.OVERRIDES.pop()
    return found


def _gradients(loss_of: Loss) -> Iterator[Tensor]:
    run = phalanx.init(accumulation=2)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    loader = DataLoader(TensorDataset(X, Y), 3)  # the last batch has one row
    net, optimizer, loader = run.prepare(net, optimizer, loader)
    for x, y in loader:
        run.backward(**loss_of(net(x), y))
        if run.is_step_end:
            yield net[0].weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_autograd(name: str, one_process: list[list[Tensor]]) -> None:
    steps = zip(one_process[[*LOSSES].index(name)], ([0, 3], [6]), strict=True)
    for gradient, starts in steps:
        net = model()
        for at in starts:
            z, y = net(X[at : at + 3]), Y[at : at + 3]
            rows = (z - y) ** 2
            loss = (rows * (1 + y)).sum() / (1 + y).sum() if name == "weights" else rows.mean()
            loss.backward()
        torch.testing.assert_close(
            gradient, net[0].get_parameter("weight").grad, rtol=1e-12, atol=0
        )


def whys_of_loops() -> list[str | None]:
    """Take a step of a graph that has gradients again, and of one that has them once."""
    found: list[str | None] = []
    for reentrant in (False, True):
        loops: list[PlainLoop] = []
        init.OVERRIDES.append((Strategy(), lambda run, loops=loops: loops.append(PlainLoop(run))))
        run = phalanx.init()
        net = model()
        loader = DataLoader(TensorDataset(X, Y), 7)
        sgd = torch.optim.SGD(net.parameters(), 0.0)
        net, _, loader = run.prepare(net, sgd, loader)
        for x, y in loader:
            z = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
            run.backward(mse_loss(z, y))
        init.OVERRIDES.pop()
        found.append(loops[0].why)
    return found


def test_a_graph_without_gradients_by_autograd_is_named() -> None:
    plain, reentrant = run_ranks(whys_of_loops, 1)[0]
    assert plain is None
    assert reentrant is not None and "reentrant checkpoint" in reentrant


@pytest.fixture(scope="module")
def one_process() -> list[list[Tensor]]:
    (found,) = run_ranks(steps_on_one_process, 1)
    return found
