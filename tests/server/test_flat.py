"""Parameters in flat memory, and what their optimizer keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.server.flat import FlatParameters


@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_a_parameter_without_moments_has_zeros(rule: str) -> None:
    """As after a resume of a run in which it was a table."""
    model = nn.ParameterList([torch.ones(2, 3), torch.ones(4), torch.ones(5)]).double()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, fused=True),
        "momentum": lambda: torch.optim.SGD(groups, momentum=0.9),
    }[rule]()
    flat = FlatParameters(optimizer, rule)
    assert flat.moments() == ([], 0.0)
    optimizer.state[parameters[0]] = {}
    for parameter in parameters[1:]:
        parameter.grad = torch.full_like(parameter, 2.0)
    for _ in range(3):
        optimizer.step()
    kept, steps = flat.moments()
    assert steps == (3.0 if rule == "adamw" else 0.0)
    name = flat.names[0]
    due = [torch.cat([torch.zeros(6).double(), optimizer.state[parameters[1]][name]])]
    due.append(optimizer.state[parameters[2]][name])
    assert len(kept) == 2 and all(
        torch.equal(each[0], d) for each, d in zip(kept, due, strict=True)
    )
