"""The trainers of transformers and TRL on many ranks, with the numbers of one process.

    from phalanx.hf import Trainer                     in place of transformers.Trainer

    Trainer(model, args, train_dataset=data, strategy="fsdp2").train()

Modules are imported on first use of their names, so that importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.hf.rank_trainer import RankTrainer as RankTrainer
    from phalanx.hf.rank_trainer import Trainer as Trainer
    from phalanx.hf.trl_trainers import DPOTrainer as DPOTrainer
    from phalanx.hf.trl_trainers import SFTTrainer as SFTTrainer

__all__ = ["DPOTrainer", "RankTrainer", "SFTTrainer", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.hf' has no attribute '{name}'")
    home = "trl_trainers" if name in ("DPOTrainer", "SFTTrainer") else "rank_trainer"
    return getattr(import_module(f"phalanx.hf.{home}"), name)
