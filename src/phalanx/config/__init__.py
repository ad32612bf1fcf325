"""The one typed configuration: a TOML file, the command line and the API all make this value."""

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
