"""The data types of a module's run: torch.autocast around its forward, or a type for all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.config.schema import RunConfig
from phalanx.data.rows import map_tensors
from phalanx.errors import ConfigError
from phalanx.parallel.plan import Plan
from phalanx.train.precision import resolve


class ModulePrecision:
    """What `precision` and `compile` ask of a module of the user's.

    Attributes:
        autocast: data type of torch.autocast around each forward; None without.
        weights: data type of weights and inputs; None: as the module and its data have them.
    """

    def __init__(self, config: RunConfig) -> None:
        """Take the settings.

        Raises:
            ConfigError: float16 on a CPU.
        """
        self._config = config
        self.autocast: torch.dtype | None = None
        self.weights: torch.dtype | None = None
        if config.precision in ("bfloat16", "float16"):
            self.autocast = resolve(config.precision, config.device).compute
        elif config.precision != "auto":
            self.weights = resolve(config.precision, config.device).master

    def of_batch(self, batch: Any) -> Any:
        """Return a batch whose floating-point numbers are of the type of the weights."""
        if self.weights is None:
            return batch
        return map_tensors(batch, lambda t: t.to(self.weights) if t.is_floating_point() else t)

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return what scales the loss, for float16 alone."""
        return torch.amp.GradScaler("cuda") if self.autocast == torch.float16 else None

    def check(self, plan: Plan[nn.Module]) -> None:
        """Refuse what pipelines and layers that are split cannot do.

        Raises:
            ConfigError: blocks would be compiled that cannot be, or the loss scaled in stages that
                do not agree on the scale.
        """
        if self._config.compile and plan.uncompiled:
            raise ConfigError(
                f"compile is set, but blocks split by {plan.uncompiled} are not made to be "
                "compiled; leave compile out, or use dp or fsdp"
            )
        if self.autocast == torch.float16 and (num_stages := plan.strategy.pp.degree) > 1:
            raise ConfigError(
                f"precision is float16, whose loss is scaled, and the stages of pp{num_stages} "
                "would not agree on the scale; the nearest is bfloat16"
            )
