"""One training step: forward and backward over the microbatches, reduce, clip, update.

Loss law: each microbatch's sum of losses is divided by the valid tokens of the *global* batch,
which the ranks count together before the first backward. Gradients are then summed, never averaged,
so that accumulation, data ranks, uneven and empty ranks all give what one process gives.

The host waits for a GPU once a step: when it reads the loss, the count of valid tokens and the norm
together, which decide whether the weights change. Until then they stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx.comm.join import device_of
from phalanx.comm.ledger import Phase
from phalanx.comm.primitives import sum_over_data
from phalanx.config import OptimizerConfig
from phalanx.errors import TrainingError
from phalanx.measure.timer import Phase as Term
from phalanx.parallel.reduce import GradientReducer
from phalanx.train.clip import gradient_norm, scale_to
from phalanx.train.objective import Objective
from phalanx.train.optimizer import learning_rate

TERMS: dict[str, Term] = {
    "count": "communication",
    "forward": "forward",
    "backward": "backward",
    "agree": "communication",
    "reduce": "communication",
    "metrics": "communication",
    "clip": "optimizer",
    "optimizer": "optimizer",
}
"""Phase of the step -> term of the step ledger it is booked under."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    Attributes:
        loss: sum over valid tokens / valid tokens of the global batch, in nats.
        grad_norm: norm of the whole gradient before clipping.
        learning_rate: of this step.
        num_valid_tokens: in the global batch.
        is_skipped: the weights were left alone, since the loss or the gradient was not finite.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_valid_tokens: int
    is_skipped: bool


class Trainer:
    """A model, its optimizer and its reducer, and the number of steps taken."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        config: OptimizerConfig,
        *,
        mesh: DeviceMesh,
        num_steps: int,
        reducer: GradientReducer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.mesh = mesh
        self.num_steps = num_steps
        self.reducer = reducer
        self.scaler = scaler
        self.nonfinite = nonfinite
        self.steps_done = 0
        self._watchers: list[Phase] = []

    @contextmanager
    def watched(self, watcher: Phase) -> Generator[None]:
        """Tell `watcher` the phases of the steps taken inside: `with watcher(name):` around each.

        The names are those of TERMS. Ledgers of bytes, memory and time are watchers.
        """
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Tell those who watch that what runs inside is the phase `name`."""
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher(name))
            yield

    def step(self, microbatches: Sequence[Any]) -> StepResult:
        """Take one step over this rank's microbatches of one global batch.

        Raises:
            TrainingError: the loss or the gradient is not finite and `nonfinite` is "stop".
        """
        return self.apply_gradients(*self.compute_gradients(microbatches))

    def compute_gradients(self, microbatches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave in each `.grad` the gradient of the global batch's loss.

        Returns:
            The loss, and the valid tokens of the global batch; numbers on this rank's device.
        """
        device = device_of(self.mesh)
        num_valid = torch.zeros((), dtype=torch.int64, device=device)
        for microbatch in microbatches:
            num_valid += self.objective.num_valid(microbatch)
        with self.phase("count"):
            sum_over_data(num_valid, self.mesh)
        divisor = num_valid.clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for index, microbatch in enumerate(microbatches):
            with self.phase("forward"):
                part = self.objective.loss_sum(self.model, microbatch, self.steps_done)
                loss_sum += part.detach()
            with self.phase("backward"):
                if self.reducer is not None:
                    self.reducer.before_backward(is_last=index == len(microbatches) - 1)
                scaled = part / divisor
                if self.scaler is not None:
                    scaled = self.scaler.scale(scaled)
                scaled.backward()
        if self.reducer is not None:
            self.reducer.finish(self.phase)
        with self.phase("metrics"):
            loss = sum_over_data(loss_sum, self.mesh) / divisor
        return loss, num_valid

    def apply_gradients(self, loss: torch.Tensor, num_valid: torch.Tensor) -> StepResult:
        """Clip, update the weights, and count the step.

        Args:
            loss: of the global batch.
            num_valid: valid tokens of the global batch.

        Raises:
            TrainingError: the loss or the gradient is not finite and `nonfinite` is "stop"; raised
                on all ranks alike, before the weights change.
        """
        rate = learning_rate(self.config, self.steps_done, self.num_steps)
        with self.phase("clip"):
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = gradient_norm(self.gradients(), self.config.clip_p)
            found = _read(loss, norm, num_valid, self._scale_of(loss))
        is_finite = math.isfinite(found.loss) and math.isfinite(found.norm)
        # A float16 gradient overflows now and then: the scaler skips the step and scales less.
        # Below a scale of 1 the scaler is not to blame.
        is_overflow = self.scaler is not None and found.scale >= 1
        is_excused = is_overflow and math.isfinite(found.loss)
        if not is_finite and self.nonfinite == "stop" and not is_excused:
            raise TrainingError(
                f"step {self.steps_done + 1}: the loss is {found.loss} and the norm of the "
                f"gradient {found.norm}; the weights are those of the step before. Lower "
                "optimizer.lr, or go on past such steps with --nonfinite skip"
            )
        with self.phase("optimizer"):
            self._update(rate, found.norm, is_finite)
        self.steps_done += 1
        return StepResult(found.loss, found.norm, rate, int(found.num_valid), not is_finite)

    def _scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the present scale, on the device: `get_scale` would wait for it."""
        one = torch.ones((), device=loss.device)
        return one if self.scaler is None else self.scaler.scale(one)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [grad for grad in grads if grad is not None]

    def _update(self, rate: float, norm: float, is_finite: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if is_finite:
            if 0 < self.config.clip_norm < norm:
                scale_to(self.gradients(), norm, self.config.clip_norm)
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()


class _Found(NamedTuple):
    """What the host reads of a step before the weights change."""

    loss: float
    norm: float
    num_valid: float
    scale: float


def _read(loss: torch.Tensor, *others: torch.Tensor) -> _Found:
    """Bring numbers to the host in one transfer, which waits for all that was launched before."""
    wide = [number.to(loss.device, torch.float64) for number in (loss, *others)]
    return _Found(*torch.stack(wide).tolist())
