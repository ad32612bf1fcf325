"""The one typed configuration: a TOML file, the command line and the API all make this value."""

from phalanx.config.law import BatchPlan, solve_batch
from phalanx.config.schema import (
    BatchConfig,
    CorpusConfig,
    OptimizerConfig,
    ShapeConfig,
    TrainConfig,
)

__all__ = [
    "BatchConfig",
    "BatchPlan",
    "CorpusConfig",
    "OptimizerConfig",
    "ShapeConfig",
    "TrainConfig",
    "solve_batch",
]
