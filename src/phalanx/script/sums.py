"""A trainer's objective as the step takes it: sums of losses, in the precision of the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from phalanx.errors import ScriptError
from phalanx.models.attention import to_device
from phalanx.script.checks import check_count
from phalanx.script.deal import Spare
from phalanx.script.loss import check_sum
from phalanx.train.objective import Objective


class Sums(Objective):
    """An objective whose first losses are looked at: a mean would be off by its count.

    The loss of no rows is 0: as a mean, times their count, it would not be a number. What a stage
    of a pipeline gives the next, which some models return to the objective, is no loss.
    """

    def __init__(
        self, objective: Objective, *, has_stages: bool, autocast: torch.dtype | None, device: str
    ) -> None:
        """Compute in `autocast` what torch.autocast does in that data type; None: as the model."""
        self._objective = objective
        self._has_stages = has_stages
        self._autocast = autocast
        self._device = device
        self._is_checked = False
        self._metric_sums: Any = getattr(objective, "metric_sums", None)
        self.metric_sums = None if self._metric_sums is None else self._checked_sums

    @override
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> torch.Tensor:
        rows = microbatch.rows if isinstance(microbatch, Spare) else microbatch
        with self._precision():
            loss = self._objective.loss_sum(model, rows, step)
        if self._has_stages and loss.ndim > 0:
            return loss
        if not self._is_checked and torch.is_grad_enabled() and rows is microbatch:
            check_sum(loss, self._objective.num_valid(rows), "Objective.loss_sum")
            self._is_checked = True
        count = self.num_valid(microbatch)
        if not isinstance(count, torch.Tensor):  # filled in on the device: no copy is waited for
            count = loss.new_full((), count, dtype=torch.int64)
        return torch.where(to_device(count, loss.device) > 0, loss, 0.0)

    def _checked_sums(self, model: nn.Module, microbatch: Any) -> Mapping[str, Any]:
        """Return the sums of the objective's metrics, see `Objective`; of spare rows they are 0."""
        is_spare = isinstance(microbatch, Spare)
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
        if isinstance(microbatch, Spare):
            return 0
        count = self._objective.num_valid(microbatch)
        check_count(count)
        return count

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device, self._autocast)
