"""AdamW with weight decay for matrices only, and a cosine learning rate after a linear warm-up.

AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. Cosine: Loshchilov and
Hutter, SGDR, 2017, without restarts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.config import OptimizerConfig


class AdamW(torch.optim.AdamW):
    """AdamW on local shards: the update is elementwise, and gradients are sharded as parameters.

    With DTensors, PyTorch's first step would infer the sharding of each operation, which takes a
    tenth of a second for a small model on three mesh axes. The moments are stored as DTensors.
    """

    # Private; `step` gets its tensors from it. tests/parallel/test_sharded.py pins its behavior.
    def _init_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """Return a fused AdamW over the trainable parameters of `model`.

    Vectors (norms and biases) have no weight decay. A tied parameter appears once.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
    return AdamW(
        groups or [{"params": trained}],  # a pipeline stage may be frozen
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (the first is 0) of `num_steps`.

    The rate rises linearly over the warm-up steps, is `config.lr` at their end, and falls by half a
    cosine to `config.min_lr_ratio * config.lr` at the last step.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(200, num_steps // 10)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
