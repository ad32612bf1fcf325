"""The losses that `run.backward` takes, and the wrapper of a trainer's objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
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


def check_loss(loss: Any, where: str, what: str = "one number") -> Tensor:
    """Refuse a loss without a graph, or that is not `what`; `where` names the call."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else None
        given = f"a {type(loss).__name__}" if shape is None else f"a tensor of shape {shape}"
        raise ScriptError(f"{where}: the loss is {given}; expected {what}")
    if isinstance(loss, DTensor):
        raise ScriptError(
            f"{where}: the loss has a term computed from parameters, which are shards of this rank "
            "under this strategy; leave the term out, and after run.backward add its gradient, for "
            "L1 within torch.no_grad() as p.grad.add_(p.sign(), alpha=0.01); or use dp"
        )
    if not loss.requires_grad and has_empty_batch():
        raise ScriptError(
            f"{where}: the batch of this rank has no rows, because the global batch has fewer rows "
            "than there are ranks, and the loss of 0 rows has no graph; give the DataLoader "
            "drop_last=True, or compute the loss from the model's output for 0 rows"
        )
    if not loss.requires_grad:
        raise ScriptError(
            f"{where}: the loss has no graph, so no parameter would get a gradient; compute it "
            "outside torch.no_grad(), without detach() or item(), from the output of the model"
        )
    return loss if loss.ndim == 0 else loss.reshape(())


FORMS: Final = (
    "write the loss of the whole batch, as on one process: out, y = run.gather(model(x), y), then "
    "run.backward(criterion(out, y)); or name what a loss of this rank's rows is: "
    "run.backward(mean_of_rows=loss, count=len(y)), run.backward(sum_of_rows=loss, count=len(y))"
)
"""The forms of `run.backward`."""


@dataclass(frozen=True)
class RowsLoss:
    """A loss of a rank's own rows.

    Attributes:
        sum: sum over the rows; 0-d, with its graph.
        count: number of rows or tokens, or the sum of their weights.
    """

    sum: Tensor
    count: float | Tensor


def loss_of_call(
    loss: Any, former: Sequence[Any], weights: Any, mean_of_rows: Any, sum_of_rows: Any, count: Any
) -> Tensor | RowsLoss:
    """Return the whole-batch loss or the loss of own rows that a call of `run.backward` gives.

    Raises:
        ScriptError: the arguments are of none of the forms, or the loss has no graph.
    """
    rows = mean_of_rows if sum_of_rows is None else sum_of_rows
    num_losses = sum(each is not None for each in (loss, mean_of_rows, sum_of_rows))
    if former or num_losses != 1 or (count is None) != (rows is None):
        raise ScriptError(f"backward: expected one loss, and a count with a loss of rows; {FORMS}")
    if rows is not None:
        if weights is not None:
            raise ScriptError(
                f"backward: weights belong to unreduced losses, not to a sum; {FORMS}"
            )
        total, number = check_loss(rows, "backward"), _checked_count(count)
        return RowsLoss(total * number if sum_of_rows is None else total, number)
    if not isinstance(loss, Tensor) or (loss.ndim == 0 and weights is None):
        return check_loss(loss, "backward", f"one number, or the losses of rows or tokens; {FORMS}")
    if loss.ndim == 0 or (weights is not None and getattr(weights, "shape", None) != loss.shape):
        raise ScriptError(
            f"backward: the losses have the shape {tuple(loss.shape)} and the weights "
            f"{tuple(getattr(weights, 'shape', ()))}; expected a weight for each loss of a row or "
            "token, of the same shape"
        )
    weights = torch.ones_like(loss) if weights is None else weights
    # A loss of weight 0, as of a padded token, may be NaN.
    kept = torch.where(weights != 0, loss * weights, 0.0)
    return RowsLoss(check_loss(kept.sum(), "backward"), weights.detach().sum(dtype=torch.float64))


def _checked_count(count: Any) -> float | Tensor:
    """Return a count as a number; tensors are compared with 0 in the exchange between ranks."""
    if isinstance(count, Tensor) and count.numel() == 1:
        return count.detach().reshape(())
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or not 0 <= count < 2.0**63:  # also refuses nan
        shown = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else count
        raise ScriptError(
            f"backward: the count is {shown}; expected how many rows or tokens the loss is over, "
            "such as len(labels)"
        )
    return float(count)


def _check_sum(loss_sum: Any, count: Any, where: str) -> None:
    """Refuse a trainer's loss that is a mean; a mean by a division is not detected."""
    loss = check_loss(loss_sum, where, "one number, the sum of the losses of these samples")
    node: Any = loss.grad_fn
    name, mean = type(node).__name__.removesuffix("Backward0"), ""
    if getattr(node, "_saved_reduction", None) == _MEAN:
        mean = f"{name}, reduction='mean'"
    elif name == "Mean" and torch.Size(getattr(node, "_saved_self_sym_sizes", ())).numel() != 1:
        mean = "mean()"
    if mean and count != 1:
        raise ScriptError(
            f"{where}: the loss is a mean ({mean}), and a mean of the ranks' means weighs "
            "samples unevenly; give the sum: reduction='sum', or the mean times its count, "
            "loss * len(labels)"
        )


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
            _check_sum(loss, self._objective.num_valid(rows), "Objective.loss_sum")
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
