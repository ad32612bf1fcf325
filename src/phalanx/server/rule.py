"""How a server changes its weights by a gradient: the optimizers of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

Settings = dict[str, Any]

NAMES: Final = ("sgd", "momentum", "nesterov", "adamw", "adagrad")

KEPT: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
}
"""What each keeps for an element; adagrad for a row."""


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum of squares a row, the mean over the row, as embeddings are trained.

    (Duchi et al., Adaptive subgradient methods, 2011; row-wise as in Naumov et al., Deep learning
    recommendation model, 2019.) A row whose gradient is zero stays as it is.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10, width: int = 1) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "width": width})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Change the rows of flat parameters, whose length `width` divides."""
        del closure
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                rows, grad = flat.view(-1, group["width"]), flat.grad.view(-1, group["width"])
                state = self.state[flat]
                if not state:
                    state["sum"] = torch.zeros(len(rows), dtype=flat.dtype)
                state["sum"] += grad.square().mean(1)
                rate = group["lr"] / (state["sum"].sqrt() + group["eps"])
                rows.sub_(grad * rate[:, None])


def optimizer_of(rule: Settings, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of a rule over flat weights; `decays` has the decay of each.

    A rule has its `name` and the numbers that it needs: `betas` and `eps` of adamw, `momentum`,
    `width` and `eps` of adagrad.
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
    if name == "adagrad":
        for group in groups:
            del group["weight_decay"]
        return RowWiseAdagrad(groups, eps=rule["eps"], width=rule["width"])
    momentum = 0.0 if name == "sgd" else float(rule["momentum"])
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=name == "nesterov")
