"""Averaged gradients are those of the whole batch, and ranks that began apart are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from loops import Numbers, Twice, perceptron
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.errors import ScriptError
from phalanx.launch.local import run_ranks
from phalanx.script.weight_average import WeightAverage


class Looked(nn.Module):
    """Looks rows up, by a gradient that is sparse, and scales by a number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table((x[:, 0] * 4).long().clamp(-4, 4) + 4)) * self.scale.exp()


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


@pytest.mark.parametrize("build", [perceptron, Twice, Looked])
@pytest.mark.parametrize(
    ("how", "num_ranks"), [("optimizer", 2), by_hand("count", 2), ("count", 3)]
)
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
        assert words.startswith("average_gradients: rank 1 has different weights than rank 0")


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
        assert words.startswith("average_gradients: rank 1 has different weights than rank 0")


def words_of_other_frozen_weights() -> str:
    run = phalanx.init()
    torch.manual_seed(0)
    model = perceptron()
    model[0].weight.requires_grad_(False).add_(run.comm.coord("dp"))
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ScriptError) as raised:
        phalanx.average_gradients(model)
    return str(raised.value)


def with_a_closure(kind: str, is_distributed: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Train by closures on half of each batch a rank, or on the whole by one process."""
    torch.manual_seed(3)
    model = perceptron().double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "L-BFGS":
        optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3)
    if kind == "line search":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    rank, num_ranks = 0, 1
    if is_distributed:
        optimizer = phalanx.DistributedOptimizer(optimizer)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for x, y in DataLoader(Numbers(), 8, drop_last=True):
        rows = slice(rank, None, num_ranks)

        def closure(x: Tensor = x[rows], y: Tensor = y[rows]) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("kind", ["SGD", "L-BFGS", "line search"])
def test_a_closure_is_followed_by_the_average(kind: str) -> None:
    expected, losses = with_a_closure(kind, is_distributed=False)
    for ours, found in run_ranks(with_a_closure, 2, kind, True, threads=1):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, weight in expected.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-10)


def scaled(mean_of: str) -> tuple[list[float], str]:
    """Return the scales after steps in which the gradients of one rank overflow, and an error."""
    rank = phalanx.init().comm.coord("dp")
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if mean_of == "optimizer":
        optimizer = phalanx.DistributedOptimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales: list[float] = []
    try:
        for number in range(4):
            optimizer.zero_grad()
            factor = 1e308 if number == 1 + rank else 1.0
            scaler.scale((factor * model(torch.ones(3, 2).double())).mean()).backward()
            if mean_of == "gradients":
                phalanx.average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    except ScriptError as error:
        return scales, str(error)
    return scales, ""


def test_a_scaler_skips_the_same_steps_or_is_refused() -> None:
    for found in run_ranks(scaled, 2, "gradients", threads=1):
        assert found == ([64, 32, 16, 16], "")
    for _, words in run_ranks(scaled, 2, "optimizer", threads=1):
        assert words.startswith("DistributedOptimizer: a GradScaler calls this step")


def words_of_apart(how: str) -> str:
    rank = phalanx.init().comm.coord("dp")
    torch.manual_seed(0)
    model = perceptron()
    other = nn.Linear(6, 5)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if how == "rate":
        optimizer = phalanx.DistributedOptimizer(optimizer)
    try:
        for _ in range(5):
            used = other if how == "models" and rank else model
            optimizer.zero_grad()
            used(torch.ones(1, 6)).sum().backward()
            if how != "rate":
                phalanx.average_gradients(used)
            if how == "rate" and rank:
                optimizer.param_groups[0]["lr"] = 0.2
            if how == "clip" and rank:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    except ScriptError as error:
        return str(error)
    return "passed"


@pytest.mark.parametrize(("how", "start"), [
    ("models", "average_gradients: rank 1 averages 2 parameters of 35 elements ((5, 6), (5,), ...)"
     " and rank 0 6 parameters of 187 elements"),
    ("rate", "DistributedOptimizer: lr of group 0 of SGD is 0.1 on rank 0 and 0.2 on rank 1"),
    ("clip", "average_gradients: 0.weight differs: its elements add up to"),
])  # fmt: skip
def test_ranks_that_average_apart_are_named(how: str, start: str) -> None:
    for words in run_ranks(words_of_apart, 2, how, threads=1):
        assert words.startswith(start)


def test_an_average_of_a_model_without_weights_to_train_only_counts() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    average = WeightAverage(model, dict(model.named_parameters()), 0.9)
    average.update()
    average.update()
    assert average.num_updates == 2
