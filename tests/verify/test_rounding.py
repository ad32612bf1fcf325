"""How far rounding moves the gradients of a loop's step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.verify.rounding import RoundingProbe


class Pair(nn.ModuleDict):
    """A module whose parts the loop calls."""

    def __init__(self, spread: float) -> None:
        first = nn.Linear(8, 16)
        first.weight.data *= spread
        body = nn.Sequential(first, nn.BatchNorm1d(16, eps=1e-12), nn.Dropout(0.1))
        super().__init__({"body": body, "head": nn.Linear(16, 3)})


def test_the_limits_are_of_a_real_type() -> None:
    assert RoundingProbe(nn.Linear(2, 2, dtype=torch.complex64)).dtypes == {torch.float32}


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_batch_norm_that_amplifies_rounding_is_found(is_recomputed: bool) -> None:
    movements: list[dict[str, float]] = []
    for spread in (1.0, 1e-5):
        torch.manual_seed(0)
        model = Pair(spread)
        probe = RoundingProbe(model)
        for _ in range(2):
            x = torch.randn(16, 8)
            h = (
                checkpoint(model["body"], x, use_reentrant=False)
                if is_recomputed
                else model["body"](x)
            )
            nn.functional.cross_entropy(model["head"](h), torch.arange(16) % 3).backward()
            x.zero_()  # the probe has a copy
        state = {name: each.clone() for name, each in model.state_dict().items()}
        versions, draws = [p._version for p in model.parameters()], torch.get_rng_state()
        counts = {"body.2": 1}
        movements.append(probe.movement(torch.float32, counts, 1e-2))
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
        assert versions == [p._version for p in model.parameters()]
        assert torch.equal(draws, torch.get_rng_state()) and counts == {"body.2": 1}
        probe.clear()
        assert set(probe.movement(torch.float32, {}, 0.0).values()) == {0.0}
    plain, amplified = movements
    assert 1e-8 < plain["body.0.weight"] < 1e-5
    assert amplified["body.0.weight"] > 1e-3 > amplified["head.weight"]
