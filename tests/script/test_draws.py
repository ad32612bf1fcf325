"""What a loop draws by itself is named; what `run.draw` and the dropouts of a model draw is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from loops import Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import phalanx
from phalanx.launch.local import run_ranks

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
