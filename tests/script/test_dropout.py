"""Masks of dropout belong to the sample: any number of ranks drops what one process drops."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import loops
import pytest
import torch
from loops import Case
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.parallel.dropout import Masks, warn_of_first_draws


class Dropping(nn.Module):
    """Drops features of rows, and those of the positions of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(4, 5)
        self.of_rows, self.of_positions = nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x_BD = self.of_rows(self.first(x).tanh())
        return self.last(self.of_positions(x_BD.view(len(x), 3, 4)).sum(1))


class Shared(nn.Module):
    """Uses one dropout twice, and the whole twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 12), nn.Linear(12, 5), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x_BD = self.first(x).tanh()
        return self.last(self.drop(x_BD) + self.drop(x_BD))


class Drawing(nn.Module):
    """Draws in a way that nothing can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(x, 0.5, self.training))


CASES = [Case(build=Dropping, batch_size=9), Case(build=Shared, batch_size=9)]


def results(strategies: list[str]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing else draws
        return [loops.distributed(case, strategy) for strategy in strategies for case in CASES]


def test_any_ranks_drop_what_one_process_drops() -> None:
    expected = run_ranks(results, 1, ["dp1"], threads=1)[0]
    for strategies in (["dp2", "fsdp2"], ["dp3"]):
        for found in run_ranks(results, int(strategies[0][-1]), strategies, threads=1):
            for ours, theirs in zip(found, expected * len(strategies), strict=True):
                assert loops.largest_error(ours, theirs) < 1e-10
    without = loops.plain(Case(build=Dropping, batch_size=9))  # other masks, so other losses
    assert loops.largest_error(without, expected[0]) > 1e-3


def masks_of_two_uses() -> list[Tensor]:
    loop = loops.Distributed(CASES[1], "dp1")
    masks: list[Tensor] = []
    loop.model.drop.register_forward_hook(lambda _m, _x, y: masks.append(y == 0))
    x, _ = next(iter(loop.loader))
    loop.model(x)
    loop.model(x)
    return masks


def test_each_use_of_a_dropout_has_a_mask_of_its_own() -> None:
    masks = run_ranks(masks_of_two_uses, 1, threads=1)[0]
    assert len(masks) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


def test_nothing_is_kept_of_a_forward_outside_of_steps() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
    Masks(0, lambda: None).key(model)
    (uses,) = (each for each in model[1].forward.args if isinstance(each, tuple))
    for is_recomputed in (False, True):
        x = torch.randn(3, 6)
        y = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
        y.sum().backward()
    assert not uses.uses._now and not uses.uses._before


class Recomputed(nn.Module):
    """Uses a part with a dropout twice, which is perhaps recomputed in backward."""

    def __init__(self, is_recomputed: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.part, self.last = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), nn.Linear(6, 5)
        self.is_recomputed, self.use_reentrant = is_recomputed, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            if self.is_recomputed:
                x = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
            else:
                x = self.part(x)
        return self.last(x)


def losses_read_ahead(strategy: str, is_recomputed: bool, use_reentrant: bool) -> list[float]:
    build = functools.partial(Recomputed, is_recomputed, use_reentrant)
    loop = loops.Distributed(Case(build=build), strategy)
    batches = iter(loop.loader)
    losses: list[float] = []
    parts = [(loop.model(x), y) for x, y in itertools.islice(batches, 2)]
    for x, y in batches:  # read before the backward of those before it
        sums = [cross_entropy(logits, of, reduction="sum") for logits, of in parts]
        loss = loop.run.backward(
            sum_of_rows=torch.stack(sums).sum(), count=sum(len(of) for _, of in parts)
        )
        losses.append(float(loss))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        parts = [(loop.model(x), y)]
    return losses


def all_read_ahead(strategy: str) -> list[list[float]]:
    ways = [(False, False), (True, False), (True, True)]
    return [losses_read_ahead(strategy, *way) for way in ways]


# Reentrant checkpoints add to the gradient of what they use twice in one backward: no buckets.
@pytest.mark.parametrize("strategy", ["dp1", by_hand("dp2:naive")])
def test_what_is_recomputed_is_dropped_again_whatever_was_read_since(strategy: str) -> None:
    for expected, *found in run_ranks(all_read_ahead, int(strategy[2]), strategy, threads=1):
        assert len(expected) == 3
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-12)


def shares_of_zeros() -> list[float]:
    """Return the share of features that are dropped, at each dropout of a step."""
    loop = loops.Distributed(Case(build=Dropping), "dp1")
    shares: list[float] = []

    def note(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        shares.append(float((output[inputs[0] != 0] == 0).double().mean()))

    for name in ("of_rows", "of_positions"):
        loop.model.get_submodule(name).register_forward_hook(note)
    loop.train()
    assert len({round(share, 9) for share in shares[::2]}) > 1  # other masks in other steps
    return [sum(each) / len(each) for each in (shares[::2], shares[1::2])]


def test_as_many_are_dropped_as_asked_for() -> None:
    assert run_ranks(shares_of_zeros, 1)[0] == pytest.approx([0.3, 0.5], abs=0.05)


def warnings_of(build: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops.distributed(Case(build=build), "dp2")
    return [str(each.message) for each in caught]


def test_what_draws_otherwise_is_named_once() -> None:
    for words in run_ranks(warnings_of, 2, Drawing, threads=1):
        assert len(words) == 1
        assert "Drawing draws from each rank's own generator in training (" in words[0]
    assert run_ranks(warnings_of, 2, loops.perceptron, threads=1) == [[], []]


def output_of_a_copy() -> bool:
    loop = loops.Distributed(Case(build=loops.perceptron), "dp1")
    copied = copy.deepcopy(loop.model)
    x = torch.ones(2, 6, dtype=torch.float64)
    return torch.equal(loop.model(x), copied(x))


def test_a_prepared_model_can_be_copied() -> None:
    assert run_ranks(output_of_a_copy, 1) == [True]


class Interrupted(Drawing):
    """Its first forward is."""

    is_first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return super().forward(x)


def test_the_watch_of_a_forward_that_is_interrupted_ends_with_the_next() -> None:
    model = Interrupted()
    warn_of_first_draws(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 6))
    with pytest.warns(UserWarning, match="draws from each rank's own generator"):
        model(torch.ones(2, 6))
    assert not _get_current_dispatch_mode_stack()
