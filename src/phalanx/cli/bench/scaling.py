"""`phalanx bench scaling`: the same global batch on more and more ranks, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.bench.common import ResultConfig, document_of, folder_of, write
from phalanx.cli.screen import print_json
from phalanx.config import ShapeConfig
from phalanx.config.fields import Positional, Range
from phalanx.errors import ConfigError
from phalanx.launch.local import num_cores
from phalanx.measure.utilization import percent
from phalanx.models.registry import shape_of, with_sizes
from phalanx.train.scaling import ScalingCase, ScalingPoint, measure_scaling


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(ResultConfig):
    """Measure the speed-up of strategies over one rank: the same global batch, in turns."""

    strategies: Annotated[tuple[str, ...], Positional("[STRATEGY ...]")] = (
        "dp2", "dp4", "fsdp2", "fsdp4", "tp2", "tp4",
    )  # fmt: skip
    """Strategies to measure beside one rank."""
    threads: Annotated[int | None, Range(1)] = None
    """CPU threads of each rank, whatever their number is; 1 if unset."""
    model: str = "demo"
    """Preset of the model's shape."""
    global_size: Annotated[int, Range(1)] = 8
    """Sequences in one step, whatever the number of ranks is."""
    seq_len: Annotated[int, Range(1)] = 256
    """Tokens of a sequence."""
    precision: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Data type of the arithmetic; auto: bfloat16 where the device has it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; a rank is a GPU, or `threads` threads of the CPU, 1 if unset."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to time in each round, after two that warm up."""
    rounds: Annotated[int, Range(1)] = 3
    """Rounds; each runs every strategy once."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Sizes that replace the preset's."""


def run(config: ScalingConfig, console: Console) -> int:
    """Measure, and print a table."""
    threads = 1 if config.threads is None else config.threads
    folder = folder_of(config.out)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = with_sizes(shape_of(config.model), config.shape)
    if config.seq_len > shape.max_seq_len:
        raise ConfigError(
            f"seq_len is {config.seq_len}, but the model's positions end at {shape.max_seq_len}; "
            f"the nearest is {shape.max_seq_len}"
        )
    case = ScalingCase(
        shape=shape,
        global_size=config.global_size,
        seq_len=config.seq_len,
        precision=config.precision,
        device=device,
        threads=threads,
        steps=config.steps,
        rounds=config.rounds,
    )
    points = measure_scaling(config.strategies, case, lambda words: console.print(Text(words)))
    num_tokens = case.global_size * case.seq_len
    console.print(_table(points, num_tokens))
    for line in _remarks(points, case):
        console.print(Text(line))
    result: dict[str, object] = {
        "device": device,
        "precision": case.precision,
        "model": config.model,
        "global_size": case.global_size,
        "seq_len": case.seq_len,
        "threads_per_rank": threads,
        "steps": case.steps,
        "points": [
            {**point.as_dict(), "tokens_per_s": num_tokens * point.batches_per_s}
            for point in points
        ],
    }
    document = document_of("scaling", result)
    if folder is not None:
        write(folder / f"scaling-{device}.json", document, console)
    if config.json:
        print_json(document)
    return 0


def _table(points: Sequence[ScalingPoint], num_tokens: int) -> Table:
    table = Table()
    table.add_column("strategy")
    for name in ("ranks", "ms a step", "tokens/s", "batches/s", "speed-up", "min - max"):
        table.add_column(name, justify="right")
    table.add_column("efficiency", justify="right")
    for point in points:
        is_known = point.speed_up is not None
        table.add_row(
            point.strategy,
            str(point.num_ranks),
            f"{1e3 / point.batches_per_s:.1f}",
            f"{num_tokens * point.batches_per_s:,.0f}",
            f"{point.batches_per_s:.3g}",
            f"{point.speed_up:.2f}" if is_known else "-",
            f"{min(point.speed_ups):.2f} - {max(point.speed_ups):.2f}" if is_known else "-",
            percent(point.efficiency) if is_known else "-",
        )
    return table


def _remarks(points: Sequence[ScalingPoint], case: ScalingCase) -> list[str]:
    lines = [
        f"the median of {case.rounds} rounds, global batch {case.global_size} x {case.seq_len} "
        "tokens; a speed-up is that of each round over one rank in the same round"
    ]
    if case.device == "cpu":
        ranks = num_cores() // case.threads
        lines.append(
            f"a rank is {case.threads} of {num_cores()} cores: more than {max(1, ranks)} ranks "
            "share them"
        )
    doubted = [point.strategy for point in points if point.speed_up is None]
    if doubted:
        lines.append(
            f"no speed-up of {', '.join(doubted)}: it came out above the number of ranks, so other "
            "work disturbed this machine; measure again when it is idle"
        )
    return lines
