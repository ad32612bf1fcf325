"""The typed configuration of a run, built from TOML files, the command line or the API."""

from phalanx.config.schema import (
    BatchConfig,
    CorpusConfig,
    OptimizerConfig,
    ShapeConfig,
    TrainConfig,
)
from phalanx.config.validate import BatchPlan, solve_batch

__all__ = [
    "BatchConfig",
    "BatchPlan",
    "CorpusConfig",
    "OptimizerConfig",
    "ShapeConfig",
    "TrainConfig",
    "solve_batch",
]
