"""What an optimizer keeps of a parameter, found out by a step of one that is of no model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

DRY_SHAPE: Final = (3, 2)
"""Shape of the parameter that `dry_state` steps; a factored state of it has another."""


def dry_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what an optimizer keeps of a parameter of DRY_SHAPE in a group, after a step.

    The optimizer, its parameters and its own state stay as they are.

    Returns:
        The state by name; None if the optimizer cannot take such a step, as one that needs sparse
        gradients, or that keeps more than torch's own do.
    """
    like = next(iter(group["params"]), torch.zeros(()))
    parameter = nn.Parameter(torch.zeros(DRY_SHAPE, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    dry = copy.copy(optimizer)
    dry.state = defaultdict(dict)
    dry.param_groups = [{**group, "params": [parameter]}]
    try:
        dry.step()
    except Exception:  # whatever a user's optimizer does with a parameter that it does not know
        return None
    return dict(dry.state[parameter])
