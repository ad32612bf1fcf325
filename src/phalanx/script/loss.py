"""Is this number the sum of the losses of a microbatch, with a graph to go back through?

A mean cannot be told from a sum by its value. It can by the last operation that made it: torch
keeps there how it reduced.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from phalanx.errors import ScriptError

_MEAN: Final = 1
"""What torch calls the reduction "mean" inside, as a number."""


def check_sum(loss_sum: Any, count: Any, where: str = "backward") -> None:
    """Refuse what `where` cannot take for a sum of losses over `count` samples or tokens.

    A mean that was made by a division is not known as one.

    Raises:
        ScriptError: says what is wrong with it.
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        shape = tuple(loss_sum.shape) if isinstance(loss_sum, torch.Tensor) else None
        what = f"a {type(loss_sum).__name__}" if shape is None else f"a tensor of shape {shape}"
        raise ScriptError(
            f"{where}: the loss is {what}; expected one number, the sum of the losses of this "
            "rank's samples"
        )
    if not loss_sum.requires_grad:
        raise ScriptError(
            f"{where}: the loss has no graph, so no parameter would get a gradient; compute it "
            "outside torch.no_grad(), without detach() or item(), from the output of the model"
        )
    number = float(count) if isinstance(count, int | float) else None
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise ScriptError(
                f"{where}: the count is a tensor of shape {tuple(count.shape)}; expected how many "
                "samples or tokens the loss is a sum over, one number"
            )
    elif number is None or not 0 <= number < math.inf:  # nan neither
        raise ScriptError(
            f"{where}: the count is {count!r}; expected how many samples or tokens the loss is a "
            "sum over, such as len(labels)"
        )
    if (made_by := _mean_of(loss_sum)) is not None and number != 1:
        raise ScriptError(
            f"{where}: the loss is a mean ({made_by}), and a mean of the ranks' means weighs "
            "samples unevenly; give the sum: reduction='sum', or the mean times its count, "
            "loss * len(labels)"
        )


def _mean_of(loss: torch.Tensor) -> str | None:
    """Return the operation that made `loss` if it took a mean over more than one number."""
    node: Any = loss.grad_fn
    name = type(node).__name__.removesuffix("Backward0")
    if name == "Mean":
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        return "mean()" if torch.Size(sizes).numel() != 1 else None
    is_mean = getattr(node, "_saved_reduction", None) == _MEAN
    return f"{name}, reduction='mean'" if is_mean else None
