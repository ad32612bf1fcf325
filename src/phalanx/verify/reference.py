"""The reference: a training step in plain PyTorch, which shares no code with `train.step`.

One process takes each global batch at once. The loss law, the norm, clipping and the schedule are
written anew, AdamW is torch's own, and a decoder is `PlainDecoder`. So a fault that a strategy and
one process of our trainer have in common is found too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.comm.ledger import Phase, no_phase
from phalanx.config import OptimizerConfig
from phalanx.data.rows import cast_batch, count_rows
from phalanx.parallel.dropout import Place, key_dropouts

if TYPE_CHECKING:
    from phalanx.verify.record import Case

NORMS = (1.0, 2.0, math.inf)
"""The p of the norms that are compared, whichever of them clips."""


MOMENTS = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}
"""AdamW's moments, and what torch calls them."""

Values = Mapping[str, Tensor | float]
"""A quantity of one step, by the names of the parameters; of norms by p, of the loss by ""."""

StepRecord = Mapping[str, Values]
"""What one step computed: `loss`, `gradient` and `norm` before clipping, both moments and `weight`.

Tensors are full and on the CPU; quantities stand in the order in which a step makes them.
"""


class ReferenceRun:
    """The reference, step by step."""

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
        self.model = in_training(build()).to(device, self._dtype)
        if perturbation:
            _perturb(self.model, perturbation)
        self._optimizer = _adamw(self.model, case.optimizer)
        self._place = Place(0, torch.empty(0), {})
        if case.dropout_seed is not None:
            key_dropouts(self.model, case.dropout_seed, lambda: self._place)

    def steps(self, phase: Phase = no_phase) -> Iterator[StepRecord]:
        """Take the steps one by one; `phase` is told of each forward, as the trainer does."""
        for step, batch in enumerate(self._case.batches):
            yield self._step(step, batch, phase)

    def _step(self, step: int, batch: Any, phase: Phase) -> StepRecord:
        moved = cast_batch(batch, self._dtype, self._device)
        num_valid = int(self._objective.num_valid(moved))
        self.model.zero_grad(set_to_none=True)
        self._place = Place(step, torch.arange(count_rows(batch)), {})
        with phase("forward"):
            loss_sum = self._objective.loss_sum(self.model, moved, step)
        loss = loss_sum / max(1, num_valid)
        loss.backward()
        value = float(loss.detach())
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        record: dict[str, Values] = {
            "loss": {"": value},
            "gradient": _copied(gradients),
            "norm": {f"{p:g}": norm_of(list(gradients.values()), p) for p in NORMS},
        }
        if math.isfinite(value) and math.isfinite(record["norm"]["2"]):
            self._update(step, float(record["norm"][f"{self._case.optimizer.clip_p:g}"]))
        states = {n: self._optimizer.state.get(p, {}) for n, p in self.model.named_parameters()}
        for quantity, key in MOMENTS.items():
            record[quantity] = _copied({n: state[key] for n, state in states.items() if state})
        record["weight"] = _copied(dict(self.model.named_parameters()))
        return record

    def _update(self, step: int, norm: float) -> None:
        settings, num_steps = self._case.optimizer, len(self._case.batches)
        if settings.clip_norm > 0 and norm > settings.clip_norm:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= settings.clip_norm / (norm + 1e-6)
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(settings, step, num_steps)
        self._optimizer.step()


def in_training(model: nn.Module) -> nn.Module:
    """Return the model in training mode; one that is already, with the modes of its modules."""
    return model if model.training else model.train()


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
