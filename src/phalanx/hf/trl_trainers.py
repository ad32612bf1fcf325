"""TRL's trainers on many ranks."""

from __future__ import annotations

import trl

from phalanx.hf.rank_trainer import RankTrainer


class SFTTrainer(RankTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer` with the argument `strategy`, see `RankTrainer`."""


class DPOTrainer(RankTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer` with the argument `strategy`, see `RankTrainer`."""
