"""One training step: forward and backward over the microbatches, reduce, clip, update.

Loss law: each microbatch's sum of losses is divided by the number of valid tokens of the *global*
batch, which is all-reduced before the first backward. Gradients are then summed, never averaged, so
that the result equals one process's, for any accumulation, number of data ranks, and uneven or
empty ranks.

The host waits for the GPU once a step: when it reads the loss, the number of valid tokens and the
gradient norm in one transfer, to decide whether to update. Until then they stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from phalanx.comm.comm import Comm
from phalanx.comm.ledger import Phase
from phalanx.comm.ranges import named
from phalanx.config import OptimizerConfig
from phalanx.errors import TrainingError
from phalanx.measure.expert_load import Routing
from phalanx.measure.timer import Term
from phalanx.parallel.accumulate import Accumulate, Runner
from phalanx.train.balance import Balance
from phalanx.train.clip import gradient_norm, scale_to
from phalanx.train.objective import Objective
from phalanx.train.optimizer import learning_rate

TERMS: dict[str, Term] = {
    "count": "communication",
    "balance": "communication",
    "forward": "forward",
    "backward": "backward",
    "sizes": "communication",
    "agree": "communication",
    "reduce": "communication",
    "metrics": "communication",
    "clip": "optimizer",
    "optimizer": "optimizer",
}
"""Phase of the step -> term of the step ledger that its time counts toward."""

SINGLE = Accumulate()
"""The runner of a job of one rank, without a gradient reducer."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step, equal on every rank.

    Attributes:
        loss: sum over valid tokens / valid tokens of the global batch, in nats, and the auxiliary
            losses of experts.
        grad_norm: norm of the full gradient before clipping.
        learning_rate: learning rate of this step.
        num_valid_tokens: valid tokens in the global batch.
        is_skipped: whether the update was skipped, because the loss or gradient was not finite.
        routing: the load of each expert, in a step whose routing is recorded; else None.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_valid_tokens: int
    is_skipped: bool
    routing: Routing | None = None


class Step:
    """A model's training step, callable: batch -> loss -> gradients -> clip -> update.

    Attributes:
        steps_done: steps taken.
        scaler: gradient scaler; a disabled one does nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        config: OptimizerConfig,
        *,
        comm: Comm,
        num_steps: int | None,
        run: Runner = SINGLE,
        scaler: torch.amp.GradScaler | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
    ) -> None:
        """Store the arguments; without `num_steps`, the optimizer's own learning rates are used."""
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.config = config
        self.comm = comm
        self.num_steps = num_steps
        self.run = run
        self.scaler = scaler or torch.amp.GradScaler(comm.device.type, enabled=False)
        self.nonfinite = nonfinite
        self.balance = Balance(model, comm)
        self.steps_done = 0
        self._watchers: list[Phase] = []

    def __call__(self, microbatches: Sequence[Any]) -> StepResult:
        """Take one step over this rank's microbatches of one global batch.

        Raises:
            TrainingError: the loss or the gradient is not finite and `nonfinite` is "stop".
        """
        return self.apply_gradients(*self.compute_gradients(microbatches))

    def compute_gradients(self, microbatches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Set each `.grad` to the gradient of the global batch's loss.

        Returns:
            The loss and the number of valid tokens of the global batch, 0-d tensors on this rank's
            device.
        """
        device = self.comm.device
        num_valid = torch.zeros((), dtype=torch.int64, device=device)
        for microbatch in microbatches:
            num_valid += self.objective.num_valid(microbatch)
        with self.phase("count"):
            self.comm.all_reduce(num_valid, "data")
        divisor = num_valid.clamp(min=1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)

        def forward(microbatch: Any) -> torch.Tensor:
            with self.balance.counting():
                return self.objective.loss_sum(self.model, microbatch, self.steps_done)

        def balance(phase: str = "balance") -> None:
            with self.phase(phase):
                self.balance.reduce(self.scaler.scale(torch.ones_like(loss_sum)))

        def scale(summed: torch.Tensor) -> torch.Tensor:
            loss_sum.add_(summed.detach())
            if self.balance.has_losses:
                balance()
            return self.scaler.scale(summed / divisor)

        self.optimizer.zero_grad(set_to_none=True)
        self.balance.begin()
        if self.balance.needs_first_pass(len(microbatches)):
            for self.run.microbatch, microbatch in enumerate(microbatches):
                with self.phase("forward"):
                    self.run.infer(microbatch, forward, self.phase)
            if self.run.reducer is not None:
                self.run.reducer.reset_step()
            balance()
        # Forward, backward and gradient reduction: parallel/accumulate.py, pipeline/runtime.py.
        self.run(microbatches, forward, scale, self.phase)
        if self.balance.needs_counts:
            balance()
        elif self.balance.is_recorded:
            balance("metrics")
        self.balance.end()
        with self.phase("metrics"):
            loss = self.comm.all_reduce(loss_sum, "loss") / divisor
        if self.balance.has_losses:
            loss = loss + self.balance.loss()
        return loss, num_valid

    def apply_gradients(self, loss: torch.Tensor, num_valid: torch.Tensor) -> StepResult:
        """Clip, update the weights, and count the step, given what `compute_gradients` returned.

        Raises:
            TrainingError: the loss or the gradient is not finite and `nonfinite` is "stop"; raised
                on every rank, before the weights change.
        """
        with self.phase("clip"):
            self.scaler.unscale_(self.optimizer)
            norm = self.norm(self.config.clip_p)
            # Read the scale by scaling 1: `get_scale` would synchronize once more.
            scale = self.scaler.scale(torch.ones_like(loss))
            values, recorded = _read(loss, norm, num_valid, scale, *self.balance.recorded())
        is_finite = math.isfinite(values.loss) and math.isfinite(values.norm)
        if not is_finite and self.run.reducer is not None:
            self.run.reducer.reset_error_feedback()
        # If only the float16 loss scale made the gradient overflow, the scaler skips the step and
        # lowers the scale. With a scale below 1, or a loss that is not finite, the scale is not the
        # cause.
        is_overflow = self.scaler.is_enabled() and values.scale >= 1 and math.isfinite(values.loss)
        if not is_finite and self.nonfinite == "stop" and not is_overflow:
            raise TrainingError(
                f"step {self.steps_done + 1}: the loss is {values.loss} and the norm of the "
                f"gradient {values.norm}; this step has not changed the weights. Lower the "
                "learning rate, or skip such steps: phalanx train --nonfinite skip"
            )
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"])
        if self.num_steps is not None:
            rate = learning_rate(self.config, self.steps_done, self.num_steps)
        with self.phase("optimizer"):
            for group in groups if self.num_steps is not None else ():
                group["lr"] = rate * group.get("lr_ratio", 1.0)
            self.update(values.norm if is_finite else None)
            self.scaler.update()
        self.steps_done += 1
        return StepResult(
            values.loss,
            values.norm,
            rate,
            int(values.num_valid),
            not is_finite,
            self.balance.routing(recorded),
        )

    def update(self, norm: float | None) -> None:
        """Clip the gradient, whose norm is `norm`, and step; do nothing if `norm` is None."""
        if norm is not None:
            if 0 < self.config.clip_norm < norm:
                scale_to(self.gradients(), norm, self.config.clip_norm)
            self.optimizer.step()
            self.balance.update_biases()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters that have one."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [grad for grad in grads if grad is not None]

    def norm(self, p: float) -> torch.Tensor:
        """Return the p-norm of the full gradient; every rank calls this together."""
        counted = [q.grad for q in self.model.parameters() if q not in self.run.replicas]
        return gradient_norm([grad for grad in counted if grad is not None], self.comm, p)

    @contextmanager
    def watched(self, watcher: Phase) -> Generator[None]:
        """Wrap each phase of the steps taken inside in `with watcher(name):`.

        The names are the keys of TERMS. The ledgers of bytes, memory and time are watchers.
        """
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Enter the watchers, and a profiler range, for the phase `name` that runs inside."""
        with named(name), ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher(name))
            yield


class _HostValues(NamedTuple):
    """The values of a step that the host reads before the weights change."""

    loss: float
    norm: float
    num_valid: float
    scale: float


def _read(loss: torch.Tensor, *others: torch.Tensor) -> tuple[_HostValues, list[float]]:
    """Copy tensors to the host in one transfer, which waits for all kernels launched before.

    The first four are 0-d; what further ones hold is returned after their values.
    """
    wide = [each.to(loss.device, torch.float64).flatten() for each in (loss, *others)]
    numbers = torch.cat(wide).tolist()
    return _HostValues(*numbers[:4]), numbers[4:]
