"""The dtypes of a run: one for master weights, one for compute.

Master weights, gradients and optimizer state are float32 (float64 under float64). Under bfloat16
and float16, each layer casts its weights in its forward. float16 needs loss scaling, because small
gradients would underflow (Micikevicius et al., Mixed Precision Training, 2018, section 3.2), and is
for CUDA devices only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phalanx.config.schema import RunConfig
from phalanx.errors import ConfigError
from phalanx.measure.environment import has_fast_bfloat16
from phalanx.parallel.compression.chosen import check_compression
from phalanx.parallel.plan import Plan


@dataclass(frozen=True)
class Precision:
    """The resolved dtypes of a run.

    Attributes:
        master: dtype of weights, gradients and optimizer state.
        compute: dtype of the arithmetic.
        needs_scaler: whether the loss must be scaled.
    """

    master: torch.dtype
    compute: torch.dtype
    needs_scaler: bool = False

    @property
    def name(self) -> str:
        """Name of the compute dtype, as in the configuration."""
        return str(self.compute).removeprefix("torch.")


def resolve(name: str, device: str) -> Precision:
    """Return the dtypes for the setting `name` on `device` ("cpu" or "cuda").

    Raises:
        ConfigError: the setting is float16 and the device a CPU.
    """
    if name == "auto":
        name = "bfloat16" if has_fast_bfloat16(device) else "float32"
    if name == "float16" and device == "cpu":
        raise ConfigError(
            "precision is float16, which needs a CUDA device; on a CPU the nearest is bfloat16"
        )
    master = torch.float64 if name == "float64" else torch.float32
    return Precision(master, getattr(torch, name), needs_scaler=name == "float16")


def check_split(config: RunConfig, plan: Plan[Any]) -> None:
    """Check that compilation, loss scaling and gradient compression work with the strategy.

    Raises:
        ConfigError: one does not; the message names the nearest setting that the strategy allows.
    """
    if config.compile and plan.uncompilable_axes:
        raise ConfigError(
            f"compile is set, but blocks split by {plan.uncompilable_axes} cannot be "
            "compiled; leave compile out, or use dp or fsdp"
        )
    check_compression(config.compress, plan.strategy, config.precision)
    if config.precision == "float16" and (num_stages := plan.strategy.pp.degree) > 1:
        # A rank's GradScaler lowers its scale only when its own stage overflows.
        raise ConfigError(
            f"precision is float16, which needs one loss scale, but the stages of pp{num_stages} "
            "would not agree on the scale; the nearest is bfloat16"
        )
