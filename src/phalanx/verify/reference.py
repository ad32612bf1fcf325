"""The reference: a training step in plain PyTorch, which shares no code with `train.step`.

One process takes each global batch whole. The loss law, the norm, clipping and the schedule are
written anew, AdamW is torch's own, and a decoder is `PlainDecoder`. So a fault that a strategy and
one process of our trainer have in common is found too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.comm.ledger import Phase, no_phase
from phalanx.config import OptimizerConfig
from phalanx.verify.batches import cast_batch

if TYPE_CHECKING:
    from phalanx.verify.record import Case

NORMS = (1.0, 2.0, math.inf)
"""The p of the norms that are compared, whichever of them clips."""


@dataclass(frozen=True)
class StepRecord:
    """One step, in full tensors.

    Attributes:
        loss: of the global batch.
        norms: p -> norm of the gradient before clipping.
        gradients: before clipping; those that there are.
        first_moments: of AdamW, after the step.
        second_moments: of AdamW, after the step.
        weights: after the step.
    """

    loss: float
    norms: Mapping[float, float]
    gradients: Mapping[str, Tensor]
    first_moments: Mapping[str, Tensor]
    second_moments: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


class ReferenceRun:
    """The reference, step by step.

    Attributes:
        model: in the case's data type.
    """

    def __init__(self, case: Case, device: torch.device, *, perturbation: int = 0) -> None:
        """Build the model.

        Args:
            case: what is run; its own model and objective unless it names a reference.
            device: where to compute.
            perturbation: above 0, the seed by which each weight moves by at most the data type's
                epsilon, relative to itself.
        """
        self._case = case
        self._device = device
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        build, self._objective = case.reference or (case.build, case.objective)
        self.model = build().to(device, self._dtype).train()
        if perturbation:
            _perturb(self.model, perturbation)
        self._optimizer = _adamw(self.model, case.optimizer)

    def steps(self, phase: Phase = no_phase) -> Iterator[StepRecord]:
        """Take the steps one by one; `phase` is told of each forward, as the trainer does."""
        for step, batch in enumerate(self._case.batches):
            yield self._step(step, batch, phase)

    def _step(self, step: int, batch: Any, phase: Phase) -> StepRecord:
        moved = cast_batch(batch, self._dtype, self._device)
        num_valid = int(self._objective.num_valid(moved))
        self.model.zero_grad(set_to_none=True)
        with phase("forward"):
            loss_sum = self._objective.loss_sum(self.model, moved, step)
        loss = loss_sum / max(1, num_valid)
        loss.backward()
        value = float(loss.detach())
        found = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        gradients = {name: _copy(grad) for name, grad in found}
        norms = {p: norm_of([grad for _, grad in found], p) for p in NORMS}
        if math.isfinite(value) and math.isfinite(norms[2.0]):
            self._update(step, norms)
        state = {
            name: self._optimizer.state.get(parameter, {})
            for name, parameter in self.model.named_parameters()
        }
        return StepRecord(
            loss=value,
            norms=norms,
            gradients=gradients,
            first_moments={n: _copy(s["exp_avg"]) for n, s in state.items() if s},
            second_moments={n: _copy(s["exp_avg_sq"]) for n, s in state.items() if s},
            weights={n: _copy(p) for n, p in self.model.named_parameters()},
        )

    def _update(self, step: int, norms: Mapping[float, float]) -> None:
        settings, num_steps = self._case.optimizer, len(self._case.batches)
        norm = norms[settings.clip_p]
        if settings.clip_norm > 0 and norm > settings.clip_norm:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= settings.clip_norm / (norm + 1e-6)
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(settings, step, num_steps)
        self._optimizer.step()


def norm_of(tensors: list[Tensor], p: float) -> float:
    """Return the p-norm of all tensors taken as one vector, in float64."""
    if math.isinf(p):
        return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
    return float(sum(float(t.double().abs().pow(p).sum()) for t in tensors)) ** (1 / p)


def rate_at(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate: a line up over the warm-up, then half a cosine down."""
    warmup = settings.warmup_steps
    warmup = min(200, num_steps // 10) if warmup is None else warmup
    if step < warmup:
        return settings.lr / (warmup + 1) * (step + 1)
    share = (step - warmup) / max(1, num_steps - 1 - warmup)
    lowest = settings.lr * settings.min_lr_ratio
    return lowest + (settings.lr - lowest) * math.cos(math.pi / 2 * min(1.0, share)) ** 2


def _adamw(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
        fused=False,
    )


def _perturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            signs = signs.to(parameter.device, parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
