"""Phalanx: train a PyTorch model under any mix of parallelism strategies, and verify the result.

Importing this package is cheap and changes nothing outside of it: modules are imported on first use
of their names.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from phalanx.config import TrainConfig as TrainConfig
    from phalanx.hugging_face.convert import decoder_of as decoder_of
    from phalanx.launch.local import run_ranks as run_ranks
    from phalanx.script.average import DistributedOptimizer as DistributedOptimizer
    from phalanx.script.average import average_gradients as average_gradients
    from phalanx.script.deepspeed import from_deepspeed as from_deepspeed
    from phalanx.script.init import init as init
    from phalanx.script.run import Run as Run
    from phalanx.script.trainer import Options as Options
    from phalanx.script.trainer import Trainer as Trainer
    from phalanx.strategy import Strategy as Strategy
    from phalanx.train.callback import Callback as Callback
    from phalanx.train.optimizer import Muon as Muon
    from phalanx.train.optimizer import muon_groups as muon_groups
    from phalanx.train.report.summary import Summary as Summary
    from phalanx.train.run import train as train_decoder
    from phalanx.verify.harness import verify as verify_strategy

__all__ = [
    "Callback",
    "DistributedOptimizer",
    "Muon",
    "Options",
    "Run",
    "Strategy",
    "Summary",
    "TrainConfig",
    "Trainer",
    "__version__",
    "average_gradients",
    "decoder_of",
    "from_deepspeed",
    "init",
    "muon_groups",
    "run_ranks",
    "train_decoder",
    "verify_strategy",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("phalanx-train")
    # The functions cannot be named phalanx.train and phalanx.verify: these names belong to the
    # subpackages, and importing a module of a subpackage sets the subpackage as an attribute here.
    homes = {
        "Callback": ("phalanx.train.callback", "Callback"),
        "Strategy": ("phalanx.strategy", "Strategy"),
        "Muon": ("phalanx.train.optimizer", "Muon"),
        "muon_groups": ("phalanx.train.optimizer", "muon_groups"),
        "Summary": ("phalanx.train.report.summary", "Summary"),
        "TrainConfig": ("phalanx.config", "TrainConfig"),
        "DistributedOptimizer": ("phalanx.script.average", "DistributedOptimizer"),
        "average_gradients": ("phalanx.script.average", "average_gradients"),
        "decoder_of": ("phalanx.hugging_face.convert", "decoder_of"),
        "from_deepspeed": ("phalanx.script.deepspeed", "from_deepspeed"),
        "Run": ("phalanx.script.run", "Run"),
        "Options": ("phalanx.script.trainer", "Options"),
        "Trainer": ("phalanx.script.trainer", "Trainer"),
        "init": ("phalanx.script.init", "init"),
        "run_ranks": ("phalanx.launch.local", "run_ranks"),
        "train_decoder": ("phalanx.train.run", "train"),
        "verify_strategy": ("phalanx.verify.harness", "verify"),
    }
    if name not in homes:
        raise AttributeError(f"module 'phalanx' has no attribute '{name}'")
    module, attribute = homes[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
