"""The loss sum of a microbatch: detect means, and wrap a trainer's objective.

The value of a loss does not show whether it is a mean. Its autograd node does, because torch stores
the reduction there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.script.checks import check_count
from phalanx.script.deal import PlaceholderMicrobatch
from phalanx.script.loader import has_empty_batch
from phalanx.train.objective import Objective

_MEAN: Final = 1
"""Torch's internal number of the reduction "mean"."""


def check_sum(loss_sum: Any, count: Any, where: str = "backward") -> None:
    """Refuse a loss that is not a sum over `count` samples or tokens; `where` names the call.

    A mean that was computed by a division is not detected.
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        shape = tuple(loss_sum.shape) if isinstance(loss_sum, torch.Tensor) else None
        what = f"a {type(loss_sum).__name__}" if shape is None else f"a tensor of shape {shape}"
        raise ScriptError(
            f"{where}: the loss is {what}; expected one number, the sum of the losses of this "
            "rank's samples"
        )
    if isinstance(loss_sum, DTensor):
        raise ScriptError(
            f"{where}: the loss has a term computed from parameters, which are shards of this rank "
            "under this strategy; leave the term out, and add its gradient to each p.grad after "
            "run.backward, for L1 as p.grad.add_(p.sign(), alpha=0.01); or use dp"
        )
    if not loss_sum.requires_grad and has_empty_batch():
        raise ScriptError(
            f"{where}: the batch of this rank has no rows, because the global batch has fewer rows "
            "than there are ranks, and the loss of 0 rows has no graph; give the DataLoader "
            "drop_last=True, or compute the loss from the model's output for 0 rows"
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
    elif number is None or not 0 <= number < math.inf:  # also refuses nan
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
    """Return the operation that made `loss` if it is a mean, but not `mean()` of one number."""
    node: Any = loss.grad_fn
    name = type(node).__name__.removesuffix("Backward0")
    if name == "Mean":
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        return "mean()" if torch.Size(sizes).numel() != 1 else None
    is_mean = getattr(node, "_saved_reduction", None) == _MEAN
    return f"{name}, reduction='mean'" if is_mean else None


class CheckedObjective(Objective):
    """Wrapper of a trainer's objective that checks its results and applies autocast.

    The first training loss is checked to be a sum, because a mean would be wrong by a factor of its
    count. The loss of 0 rows is 0, because a mean over 0 rows times 0 is NaN. The activations of a
    pipeline stage, which some models return to the objective, are passed on unchanged.
    """

    def __init__(
        self, objective: Objective, *, has_stages: bool, autocast: torch.dtype | None, device: str
    ) -> None:
        """Wrap `objective`; `autocast` is the dtype for torch.autocast, None to leave it off."""
        self._objective = objective
        self._has_stages = has_stages
        self._autocast = autocast
        self._device = device
        self._is_checked = False
        self._metric_sums: Any = getattr(objective, "metric_sums", None)
        self.metric_sums = None if self._metric_sums is None else self._checked_sums

    @override
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> torch.Tensor:
        rows = microbatch.rows if isinstance(microbatch, PlaceholderMicrobatch) else microbatch
        with self._precision():
            loss = self._objective.loss_sum(model, rows, step)
        if self._has_stages and loss.ndim > 0:
            return loss
        if not self._is_checked and torch.is_grad_enabled() and rows is microbatch:
            check_sum(loss, self._objective.num_valid(rows), "Objective.loss_sum")
            self._is_checked = True
        count = self.num_valid(microbatch)
        if not isinstance(count, torch.Tensor):  # filled on the device, which needs no copy
            count = loss.new_full((), count, dtype=torch.int64)
        return torch.where(to_device(count, loss.device) > 0, loss, 0.0)

    def _checked_sums(self, model: nn.Module, microbatch: Any) -> Mapping[str, Any]:
        """Return the sums of the objective's metrics, see `Objective`; 0 for a placeholder."""
        is_spare = isinstance(microbatch, PlaceholderMicrobatch)
        with self._precision():
            found = self._metric_sums(model, microbatch.rows if is_spare else microbatch)
        if not isinstance(found, Mapping):
            raise ScriptError(
                f"Objective.metric_sums returns a {type(found).__name__}; expected sums by names, "
                "such as {'accuracy': (labels == y).sum()}"
            )
        pairs = cast("Mapping[str, Any]", found).items()
        return {name: (0, 0) for name, _ in pairs} if is_spare else dict(pairs)

    @override
    def num_valid(self, microbatch: Any) -> int | torch.Tensor:
        if isinstance(microbatch, PlaceholderMicrobatch):
            return 0
        count = self._objective.num_valid(microbatch)
        check_count(count)
        return count

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device, self._autocast)
