"""Find which state an optimizer stores for a parameter, by a step on a dummy parameter."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

DRY_SHAPE: Final = (3, 2)
"""Shape of the dummy parameter of `dry_state`; factored state of it has a different shape."""


def dry_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state an optimizer stores after one step on a dummy parameter of `group`.

    The dummy parameter has DRY_SHAPE. The optimizer, its parameters and its state do not change.

    Returns:
        The state by key; None if the step fails, for example because the optimizer needs sparse
        gradients, or has attributes that `Optimizer.__getstate__` drops from a copy.
    """
    like = next(iter(group["params"]), torch.zeros(()))
    parameter = nn.Parameter(torch.zeros(DRY_SHAPE, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    dry = copy.copy(optimizer)
    dry.state = defaultdict(dict)
    dry.param_groups = [{**group, "params": [parameter]}]
    try:
        dry.step()
    except Exception:  # a user's optimizer may raise anything on an unknown parameter
        return None
    return dict(dry.state[parameter])
