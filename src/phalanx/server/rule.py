"""The optimizers with which a server updates its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

Settings = dict[str, Any]

STATE_NAMES: Final = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
}
"""Name of an optimizer -> names of its state tensors, of one number per element (adagrad: row)."""


class RowAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad of an embedding table with sparse gradients: one sum of squares per row.

    sum_r += mean(g_r^2), then w_r -= lr g_r / (sqrt(sum_r) + eps), for each row r in the gradient
    (Duchi et al. 2011, row-wise as in FBGEMM's EXACT_ROWWISE_ADAGRAD).
    """

    def __init__(self, table: nn.Parameter, eps: float) -> None:
        super().__init__([table], {"lr": 0.0, "eps": eps})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the rows in the gradient, which is coalesced."""
        for group in self.param_groups:
            for table in group["params"]:
                state, grad = self.state[table], table.grad
                if not state:
                    state["sum"] = table.new_zeros(len(table))
                # One number for each row of the table [R, W], a W-th of Adagrad's state; of the
                # gradient there are the rows [n] that were looked up, and their values [n, W].
                rows, values = grad.indices()[0], grad.values()
                sums = state["sum"][rows] + values.square().mean(1)
                state["sum"][rows] = sums
                moved = values / (sums.sqrt() + group["eps"])[:, None]
                table.index_add_(0, rows, moved, alpha=-group["lr"])


class Optimizers:
    """The optimizers of a shard, one for each flat weight and each table."""

    def __init__(self, rule: Settings, flats: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        """Create an optimizer for each flat weight and each table, a matrix.

        A rule has the optimizer's `name` and hyperparameters: `decays`, one per flat weight,
        `betas` and `eps` of adamw, `momentum`. For tables it has the optimizer's name `tables` and
        `tables_rate`, the factor of their learning rate relative to the flat weights.
        """
        self._names = [rule["name"]] * len(flats) + [rule.get("tables")] * len(tables)
        decays = [*rule.get("decays", [0.0] * len(flats)), *(0.0 for _ in tables)]
        each = zip(self._names, [*flats, *tables], decays, strict=True)
        self._each = [_optimizer(name, weight, decay, rule) for name, weight, decay in each]
        own_rate = rule["tables_rate"] if tables else 1.0
        self._rates = [1.0] * len(flats) + [own_rate] * len(tables)

    def step(self, grads: Sequence[Tensor], rate: float) -> None:
        """Update each weight with its gradient, at learning rate `rate`."""
        for optimizer, own_rate, grad in zip(self._each, self._rates, grads, strict=True):
            (group,) = optimizer.param_groups
            group["lr"] = rate * own_rate
            group["params"][0].grad = grad
            optimizer.step()
            group["params"][0].grad = None

    def restore(self, kept: Sequence[Sequence[Tensor]], steps: float) -> None:
        """Restore optimizer state that `kept` returned, as of `steps` steps."""
        for optimizer, name, parts in zip(self._each, self._names, kept, strict=False):
            if parts:
                state = optimizer.state[optimizer.param_groups[0]["params"][0]]
                state.update({k: v.clone() for k, v in zip(STATE_NAMES[name], parts, strict=True)})
                if name == "adamw":
                    state["step"] = torch.tensor(steps)

    def kept(self) -> list[list[Tensor]]:
        """Return the state tensors of each weight, in order; an empty list before a first step."""
        pairs = zip(self._names, self._states(), strict=True)
        return [[state[key] for key in STATE_NAMES[name]] if state else [] for name, state in pairs]

    @property
    def steps(self) -> float:
        """Number of Adam steps taken; 0 for other optimizers."""
        return next((float(state["step"]) for state in self._states() if "step" in state), 0.0)

    def _states(self) -> list[Any]:
        return [next(iter(optimizer.state.values()), {}) for optimizer in self._each]


def _optimizer(name: str, weight: Tensor, decay: float, rule: Settings) -> torch.optim.Optimizer:
    """Return the optimizer of one weight."""
    parameter = nn.Parameter(weight, requires_grad=False)
    if name == "adamw":
        betas = (float(rule["betas"][0]), float(rule["betas"][1]))
        how: dict[str, Any] = {"betas": betas, "eps": rule["eps"], "fused": True}
        return torch.optim.AdamW([parameter], lr=0.0, weight_decay=decay, **how)
    if name == "adagrad":
        return RowAdagrad(parameter, rule["eps"])
    momentum = 0.0 if name == "sgd" else float(rule["momentum"])
    is_nesterov = name == "nesterov"
    return torch.optim.SGD([parameter], 0.0, momentum, weight_decay=decay, nesterov=is_nesterov)
