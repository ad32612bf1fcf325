"""Averaged gradients are those of the whole batch, and ranks that began apart are named."""

from __future__ import annotations

import pytest
import torch
from loops import Numbers, Twice, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from phalanx.errors import ScriptError
from phalanx.launch.local import run_ranks


def trained(build: type[nn.Module], how: str, batch_size: int) -> dict[str, Tensor]:
    """Train on this rank's rows of each batch; averaging is all that is known of other ranks."""
    run = phalanx.init()
    torch.manual_seed(3)
    model = build().double()
    loader = run.prepare(DataLoader(Numbers(), batch_size, drop_last=how == "optimizer"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if how == "optimizer":
        optimizer = phalanx.DistributedOptimizer(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if how == "count":
            phalanx.average_gradients(model, len(y))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def of_one_process(build: type[nn.Module], batch_size: int, drop_last: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in DataLoader(Numbers(), batch_size, drop_last=drop_last):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("build", [perceptron, Twice])
@pytest.mark.parametrize(("how", "num_ranks"), [("optimizer", 2), ("count", 2), ("count", 3)])
def test_averaged_gradients_are_those_of_one_process(
    build: type[nn.Module], how: str, num_ranks: int
) -> None:
    expected = of_one_process(build, 8, how == "optimizer")
    for ours in run_ranks(trained, num_ranks, build, how, 8, threads=1):
        for name, weight in expected.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-12, atol=1e-13)


def words_of_other_weights() -> str:
    run = phalanx.init()
    torch.manual_seed(run.comm.coord("dp"))
    model = perceptron()
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ScriptError) as raised:
        phalanx.average_gradients(model)
    return str(raised.value)


def test_ranks_that_began_with_other_weights_are_named() -> None:
    for words in run_ranks(words_of_other_weights, 2, threads=1):
        assert words.startswith("average_gradients: rank 1 has other weights than rank 0")


def first_weights() -> Tensor:
    run = phalanx.init()
    torch.manual_seed(run.comm.coord("dp"))
    model = perceptron()
    phalanx.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    return next(model.parameters()).detach()


def test_an_optimizer_begins_with_the_weights_of_the_first_rank() -> None:
    ours, theirs = run_ranks(first_weights, 2, threads=1)
    assert torch.equal(ours, theirs)


def of_unlike_heads(num_outputs: int) -> dict[str, Tensor | None]:
    """Each rank uses a head of its own, and both the body."""
    run = phalanx.init()
    torch.manual_seed(0)
    heads = {"0": nn.Linear(3, 1), "1": nn.Linear(3, num_outputs)}
    model = nn.ModuleDict({"body": nn.Linear(2, 3), **heads})
    model[str(run.comm.coord("dp"))](model["body"](torch.ones(2, 2))).mean().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    phalanx.average_gradients(model)
    after = {name: p.grad for name, p in model.named_parameters()}
    return {f"{n} before": g for n, g in before.items()} | {
        f"{n} after": g for n, g in after.items()
    }


@pytest.mark.parametrize("num_outputs", [1, 4])
def test_ranks_may_use_unlike_parameters(num_outputs: int) -> None:
    ranks = run_ranks(of_unlike_heads, 2, num_outputs, threads=1)
    for name in ("body.weight", "0.weight", "1.weight", "1.bias"):
        own = [rank[f"{name} before"] for rank in ranks]
        mean = sum(gradient for gradient in own if gradient is not None) / 2
        for rank in ranks:
            torch.testing.assert_close(rank[f"{name} after"], mean)


def test_frozen_weights_are_compared_too() -> None:
    for words in run_ranks(words_of_other_frozen_weights, 2, threads=1):
        assert words.startswith("average_gradients: rank 1 has other weights than rank 0")


def words_of_other_frozen_weights() -> str:
    run = phalanx.init()
    torch.manual_seed(0)
    model = perceptron()
    model[0].weight.requires_grad_(False).add_(run.comm.coord("dp"))
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ScriptError) as raised:
        phalanx.average_gradients(model)
    return str(raised.value)
