"""`phalanx verify STRATEGY`: prove that a strategy computes what one process computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table
from rich.text import Text

from phalanx.cli.config_view import show_config
from phalanx.cli.screen import print_json, screen
from phalanx.config import OptimizerConfig, ShapeConfig
from phalanx.config_check import check_range
from phalanx.config_load import load_config
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.verify.compare import Verdict


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Run a strategy on gloo ranks and on one process, and compare every number of every step."""

    strategy: Annotated[str, tyro.conf.Positional] = "dp2"
    """Such as dp2 or dp4:naive."""
    model: str = "demo"
    """Preset of the model's shape."""
    steps: int = 5
    """Optimizer steps to compare."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Data type of weights and arithmetic; float64 shows whether the strategy is exact."""
    global_size: int | None = None
    """Sequences in one step; 4 for each microbatch if unset."""
    accumulation: int = 1
    """Microbatches that each rank cuts its share into."""
    seq_len: int = 32
    """Tokens of a sequence."""
    seed: int = 0
    """Fixes weights and batches."""
    debug_comm: bool = False
    """Compare each collective of all ranks before it runs, and name the first two calls that do not
    match; slow."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""


def run(argv: list[str]) -> int:
    """Verify as the command line says; 1 if something differs."""
    loaded = load_config(argv, VerifyConfig, prog="phalanx verify")
    if loaded.show_config:
        show_config(loaded)
        return 0
    verdict = _verify(loaded.config)
    console = screen()
    console.print(f"{verdict.strategy} against one process: largest relative errors")
    console.print(_table(verdict, loaded.config.steps), _closing(verdict), sep="\n")
    if loaded.json:
        print_json(_document(verdict))
    return 0 if verdict.is_equal else 1


def _verify(config: VerifyConfig) -> Verdict:
    """Build the model and batches that the configuration names, and compare.

    Raises:
        ConfigError: a value is out of range.
    """
    from phalanx.measure.environment import check_memory_for
    from phalanx.models.registry import shape_of, with_sizes
    from phalanx.strategy import Strategy, require_built
    from phalanx.train.objective import NextToken
    from phalanx.verify.batches import decoder_batches, initial_decoder
    from phalanx.verify.harness import verify

    for name in ("steps", "accumulation", "seq_len", "global_size"):
        value: int | None = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    check_range("seed", config.seed)
    strategy = Strategy.parse(config.strategy)
    require_built(strategy)
    check_memory_for(strategy.num_ranks)
    shape = with_sizes(shape_of(config.model), config.shape)
    num_rows = config.global_size or 4 * strategy.data_ranks * config.accumulation
    return verify(
        functools.partial(initial_decoder, shape, config.seed),
        decoder_batches(
            shape, config.steps, num_rows, config.seq_len, strategy.data_ranks, config.seed
        ),
        strategy,
        NextToken(config.seed, shape.dropout),
        accumulation=config.accumulation,
        dtype=config.dtype,
        optimizer=OptimizerConfig(warmup_steps=0),
        debug_comm=config.debug_comm,
    )


def _table(verdict: Verdict, num_steps: int) -> Table:
    quantities = ("loss", "gradient", "norm", "weight")
    table = Table(box=None, pad_edge=False)
    for name in ("step", *quantities):
        table.add_column(name, justify="right")
    for step in range(num_steps):
        rows = [verdict.worst(step, quantity) for quantity in quantities]
        cells = [Text(f"{d.error:.1e}", "" if verdict.passes(d) else "bold red") for d in rows]
        table.add_row(Text(str(step)), *cells)
    return table


def _closing(verdict: Verdict) -> Text:
    return Text(str(verdict), style="green" if verdict.is_equal else "bold red")


def _document(verdict: Verdict) -> dict[str, Any]:
    first = verdict.first
    return {
        "strategy": verdict.strategy,
        "is_equal": verdict.is_equal,
        "tolerance": verdict.tolerance,
        "num_compared": len(verdict.differences),
        "largest_error": max(d.error for d in verdict.differences),
        "first_difference": None if first is None else str(first),
        "unequal_replicas": verdict.replicas,
    }
