"""What a loop draws by itself is named; what `run.draw` and the dropouts of a model draw is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from loops import Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.script.guards.random_draws import DrawGuard
from phalanx.script.guards.replicas import NUM_ALWAYS_CHECKED

Draw = Callable[[phalanx.Run, nn.Module, Tensor], Any]

NAMED: list[Draw] = [
    lambda run, model, x: torch.randn_like(x),
    lambda run, model, x: torch.distributions.Categorical(logits=x).sample(),
    lambda run, model, x: torch.randperm(len(x)),
]
QUIET: list[Draw] = [
    lambda run, model, x: run.draw(torch.randperm),
    lambda run, model, x: torch.rand(len(x), generator=torch.Generator()),
    lambda run, model, x: model(x),
    lambda run, model, x: copy.deepcopy(model)(x),
]


def loop(draw: Draw, is_after: bool) -> int:
    """Draw before or after each backward, and return how many warnings there are."""
    run = phalanx.init("dp2")
    layers = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), 8, True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in loader:
            loss = cross_entropy(model(x), y, reduction="sum")
            for now in (False, True):
                if now == is_after:
                    draw(run, model, x)
                if not now:
                    run.backward(sum_of_rows=loss, count=len(y))
            optimizer.step()
            optimizer.zero_grad()
    return sum("run.draw(lambda rows" in str(each.message) for each in caught)


def numbers_of_warnings() -> list[list[int]]:
    return [[loop(draw, after) for draw in NAMED + QUIET] for after in (False, True)]


def test_what_a_loop_draws_by_itself_is_named_once() -> None:
    first, other = run_ranks(numbers_of_warnings, 2, threads=1)
    assert first == [[1] * len(NAMED) + [0] * len(QUIET)] * 2
    assert other == [[0] * len(NAMED + QUIET)] * 2


LENGTH = 5


def losses_of_chosen_samples(strategy: str | None) -> list[float]:
    """Train in the form of nanoGPT: each step draws where its samples begin in one long text."""
    run = None if strategy is None else phalanx.init(strategy)
    torch.manual_seed(0)
    tokens = torch.arange(200) * 7 % 13
    model = nn.Sequential(nn.Embedding(13, 8), nn.Tanh(), nn.Linear(8, 13)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if run is not None:
        model, optimizer = run.prepare(model, optimizer)
    losses: list[float] = []

    def starts(rows: int) -> Tensor:
        return torch.randint(len(tokens) - LENGTH, (rows,))

    for _ in range(3):
        at = starts(7) if run is None else run.draw(starts, rows=7)
        x, y = (torch.stack([tokens[i + k : i + k + LENGTH] for i in at]) for k in (0, 1))
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        if run is None:
            (loss / y.numel()).backward()
            losses.append(loss.item() / y.numel())
        else:
            assert (run.rank, run.size) == (run.comm.coord("dp"), 2)
            losses.append(float(run.backward(sum_of_rows=loss, count=y.numel())))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_samples_that_a_loop_chooses_are_those_of_one_process() -> None:
    expected = losses_of_chosen_samples(None)
    for losses in run_ranks(losses_of_chosen_samples, 2, "dp2"):
        assert losses == pytest.approx(expected, rel=1e-12)


def losses_of_actions(strategy: str | None) -> list[float]:
    """Train in the form of a policy gradient: all ranks draw equal whole batches and actions."""
    run = None if strategy is None else phalanx.init(strategy)
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(policy.parameters(), 0.5)
    if run is not None:
        policy, optimizer = run.prepare(policy, optimizer)
    losses: list[float] = []
    for _ in range(3):
        x = torch.randn(7, 4, dtype=torch.float64)
        order = torch.randperm(7)
        own = order if run is None else order.tensor_split(run.size)[run.rank]
        logits = policy(x[own]) if run is None else run.gather(policy(x[own]))
        drawn = torch.distributions.Categorical(logits=logits)
        loss = -(drawn.log_prob(drawn.sample()) * x[order, 0]).mean()
        loss.backward() if run is None else run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_whole_batches_that_all_ranks_draw_are_those_of_one_process() -> None:
    expected = losses_of_actions(None)
    for losses in run_ranks(losses_of_actions, 2, "fsdp2"):
        assert losses == pytest.approx(expected, rel=1e-12)


class OfTwoRanks:
    """What DrawGuard asks of a communicator, on the first of two data ranks."""

    device = torch.device("cpu")

    def size(self, name: str) -> int:
        return 2

    def coord(self, name: str) -> int:
        return 0


def test_draws_of_an_evaluation_after_the_first_steps_raise_no_alarm(
    recwarn: pytest.WarningsRecorder,
) -> None:
    watch = DrawGuard(cast(Any, OfTwoRanks()), lambda: 0)
    for _ in range(2 * NUM_ALWAYS_CHECKED + 4):  # batches of an evaluation, without a backward
        watch.mark()
        torch.rand(1)
    watch.look()
    assert not recwarn.list
    watch = DrawGuard(cast(Any, OfTwoRanks()), lambda: 0)
    watch.mark()
    torch.rand(1)
    with pytest.warns(UserWarning, match="drawn from this rank's own generator"):
        watch.look()
