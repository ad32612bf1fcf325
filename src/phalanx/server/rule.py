"""How a server changes its weights by a gradient: the optimizers of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

Settings = dict[str, Any]

KEPT: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""What each keeps for an element."""


def optimizer_of(rule: Settings, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of a rule over flat weights; `decays` has the decay of each.

    A rule has its `name` and the numbers that it needs: `betas` and `eps` of adamw, `momentum`.
    """
    decays = rule.get("decays", [0.0] * len(weights))
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(flat, requires_grad=False)], "weight_decay": decay}
        for flat, decay in zip(weights, decays, strict=True)
    ]
    name = rule["name"]
    if name == "adamw":
        betas = (float(rule["betas"][0]), float(rule["betas"][1]))
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=rule["eps"], fused=True)
    momentum = 0.0 if name == "sgd" else float(rule["momentum"])
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=name == "nesterov")
