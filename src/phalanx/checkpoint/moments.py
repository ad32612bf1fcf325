"""Check that a checkpoint's optimizer state fits the optimizer of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from phalanx.checkpoint.dry_step import dry_state
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import local_shard
from phalanx.errors import CheckpointError

SQUARES: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "row_var", "col_var")
"""State keys of torch's optimizers whose values are means of squares, hence at least 0.

Adagrad's `sum` is excluded, because a user's optimizer may have a `sum` below 0."""


class CombinedOptimizer:
    """Several optimizers with the attributes of one that checkpoints use."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Collect the present parameter groups and states of `parts`."""
        self.parts = parts
        self.param_groups = [group for each in parts for group in each.param_groups]
        self.state = {p: held for each in parts for p, held in each.state.items()}


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer


def check_state_keys(
    moments: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    optimizer: AnyOptimizer,
) -> None:
    """Raise CheckpointError if a parameter's saved state has other keys than `optimizer` stores."""
    found: dict[str, set[str]] = {}
    for stored_name in moments:
        name, key = parameter_and_key(stored_name)
        found.setdefault(name, set()).add(key)
    names = {parameter: name for name, parameter in trained.items()}
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for part, group in [(each, group) for each in parts for group in each.param_groups]:
        if (kept := dry_state(part, group)) is None:
            continue
        keys = {key for key, value in kept.items() if value is not None}
        for name in (names[parameter] for parameter in group["params"]):
            if (has := found.get(name)) is not None and has != keys:
                wrong = next(iter(sorted(has ^ keys)))
                lacks = "has a" if wrong in has else "lacks the"
                raise CheckpointError(
                    f"it is of another optimizer: its state of {name} {lacks} {brief(wrong)}, and "
                    f"this run's {type(part).__name__} keeps {', '.join(sorted(keys))}"
                )


def check_values(moments: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError on step counts and means of squares that no optimizer can have."""
    for stored_name, value in moments.items():
        name, key = parameter_and_key(stored_name)
        if key == "step":
            count = float(value)
            if not (0 <= count < 2**53 and count.is_integer()):
                raise CheckpointError(
                    f"its optimizer has taken {count:g} steps of {name}; expected a whole number "
                    "from 0 to 2**53 - 1"
                )
        elif key in SQUARES and (local_shard(value) < 0).any():
            raise CheckpointError(
                f"the {key} of {name} has elements below 0; expected means of squares"
            )


def parameter_and_key(stored_name: str) -> tuple[str, str]:
    """Return the parameter name and the key in `optimizer.<name>.<key>`."""
    name, _, key = stored_name.removeprefix("optimizer.").rpartition(".")
    return name, key
