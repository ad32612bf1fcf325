"""Phalanx: train a PyTorch model by any mix of the known ways to split the work, and prove it.

Importing this package is cheap: what needs torch is loaded when its name is first used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from phalanx.config import TrainConfig as TrainConfig
    from phalanx.strategy import Strategy as Strategy

__all__ = ["Strategy", "TrainConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("phalanx-train")
    homes = {"Strategy": "phalanx.strategy", "TrainConfig": "phalanx.config"}
    if name not in homes:
        raise AttributeError(f"module 'phalanx' has no attribute '{name}'")
    return getattr(import_module(homes[name]), name)
