"""One decoder block under layouts of tensor parallelism: bytes moved and held, calls and time.

python benchmarks/tensor/layouts.py [--layouts tp4 tp4:2d] [--sizes 512x8x32] [--repeats 5] [--help]

Each layout runs on real ranks, gloo processes on this host (`split_block.py`). Layouts of as many
ranks take turns, step by step, so that a change of the machine's load meets all alike. Those of
other numbers of ranks share the same cores among other numbers of processes, so that their times
say nothing to one another. Beside each stands what the plan says (`account.py`).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import torch

from account import Amounts, crossing_tokens, theory
from block import DEFAULT_SIZES, PATTERNS, BlockSize, OneBlock, Precision
from phalanx.account.fit import check_memory_for
from phalanx.bench.verb import BenchResult, PrintLine, ResultConfig
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import num_cores, run_ranks
from phalanx.measure.environment import MEMORY_SHARE, free_memory_bytes, has_fast_bfloat16
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor.split import TensorSplit
from phalanx.report.output import values_of
from phalanx.report.tabular import Part, Table
from phalanx.strategy import Axis, Strategy, require_built
from split_block import LayoutPoint, measure_rank


@dataclass(frozen=True, kw_only=True)
class TensorConfig(ResultConfig):
    """Measure one decoder block under layouts of tensor parallelism, on CPU ranks of this host."""

    layouts: tuple[str, ...] = ("tp4", "tp4:megatron", "tp4:2d", "tp8", "tp8:2.5d/2", "tp8:3d")
    """Strategies of tp alone."""
    sizes: tuple[str, ...] = DEFAULT_SIZES
    """Width of the block and its microbatch, each HIDDENxROWSxPOSITIONS."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Data type of the arithmetic; auto: bfloat16 where the CPU has it, else float32."""
    repeats: Annotated[int, Range(0)] = 5
    """Steps to time of each layout, which take turns; 0 only counts."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """From how many tokens a microbatch on a layout sends less than one dimension does."""

    strategy: str
    hidden: int
    num_tokens: float


@dataclass(frozen=True, kw_only=True)
class TensorRun:
    """What `measure_tensor` found, in the order asked for: sizes, and the layouts of each."""

    precision: Precision
    num_repeats: int
    threads: int | None
    points: tuple[LayoutPoint, ...]
    crossings: tuple[Crossing, ...]


def measure_tensor(config: TensorConfig) -> TensorRun:
    """Measure one block, forward and backward, under each layout at each size.

    Raises:
        ConfigError: a text cannot be read, a layout does not divide a size, or memory is short.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    precision, repeats, threads = config.dtype, config.repeats, config.threads
    if precision == "auto":
        precision = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    strategies = [parse_layout(text) for text in config.layouts]
    block_sizes = [BlockSize.parse(text) for text in config.sizes]
    check_memory_for(max((strategy.num_ranks for strategy in strategies), default=0))
    for size in block_sizes:
        for strategy in strategies:
            check_size(strategy, size, precision)
    by_ranks: defaultdict[int, list[str]] = defaultdict(list)
    for strategy in strategies:
        by_ranks[strategy.num_ranks].append(str(strategy))
    found: dict[tuple[str, str], LayoutPoint] = {}
    for num_ranks, texts in by_ranks.items():
        ranks: list[list[LayoutPoint]] = run_ranks(
            measure_rank, num_ranks, texts, block_sizes, precision, repeats, threads=threads
        )
        found |= {(str(point.size), point.strategy): point for point in ranks[0]}
    return TensorRun(
        precision=precision,
        num_repeats=repeats,
        threads=threads,
        points=tuple(found[str(size), str(s)] for size in block_sizes for s in strategies),
        crossings=tuple(
            Crossing(
                strategy=str(strategy),
                hidden=hidden,
                num_tokens=crossing_tokens(strategy, BlockSize(hidden, 1, 1).shape, precision),
            )
            for hidden in dict.fromkeys(size.hidden for size in block_sizes)
            for strategy in strategies
            if len(strategy.grid()) > 1
        ),
    )


def parse_layout(text: str) -> Strategy:
    """Read the strategy of a layout.

    Raises:
        StrategyError: it cannot be read.
        ConfigError: it has more than tp, or no tp.
    """
    strategy = Strategy.parse(text)
    if strategy != Strategy(tp=strategy.tp) or strategy.tp.degree == 1:
        nearest = Strategy(tp=strategy.tp if strategy.tp.degree > 1 else Axis(2, "1d"))
        raise ConfigError(
            f"layout is '{text}'; it must be tp alone with a degree above 1, such as {nearest}"
        )
    require_built(strategy)
    return strategy


def check_size(strategy: Strategy, size: BlockSize, precision: Precision) -> None:
    """Raise ConfigError for what the layout does not divide, and would pad, or does not fit."""
    model = OneBlock(size.shape, precision)
    layout = TensorSplit(Target(strategy, skeleton_of(model), roles=PATTERNS)).layout
    for dim, (what, number) in enumerate((("rows", size.num_rows), ("positions", size.length))):
        parts = layout.residual.num_shards(dim, layout.comm)
        if number % parts:
            raise ConfigError(
                f"size {size}: {strategy} splits {what} in {parts}, and {number} is not a multiple "
                f"of that; the nearest is {max(1, round(number / parts)) * parts}"
            )
    held = theory(strategy, size.shape, size.batch, precision)
    full = size.num_tokens * size.hidden * model.compute.itemsize
    rank_bytes = 2 * held.weight_bytes + 2 * held.kept_bytes + 3 * full
    need_bytes, free_bytes = strategy.num_ranks * rank_bytes, free_memory_bytes("cpu")
    if need_bytes > MEMORY_SHARE * free_bytes:
        raise ConfigError(
            f"size {size}: the ranks of {strategy} need about {need_bytes / 2**30:.1f} GiB, "
            f"{MEMORY_SHARE:.0%} of the free {free_bytes / 2**30:.1f} GiB are allowed; take "
            "fewer rows or a smaller width"
        )


def run(config: TensorConfig, say: PrintLine) -> BenchResult:
    """Measure, and show a table for each size."""
    del say
    result = measure_tensor(config)
    precision = result.precision
    shown: list[Part] = []
    for size, points in groupby(result.points, lambda point: point.size):
        shown.append(
            f"One block, hidden {size.hidden}, ffn {size.shape.ffn}, {size.num_rows} rows of "
            f"{size.length} positions ({size.num_tokens} tokens), {precision}; a rank, a step"
        )
        shown.append(_tensor_table(list(points)))
    shown += [
        f"hidden {crossing.hidden}: {crossing.strategy} sends less than one dimension "
        f"from {crossing.num_tokens:,.0f} tokens a microbatch on"
        for crossing in result.crossings
    ]
    if config.repeats:
        shown.append(
            f"times are of {config.repeats} steps in turns on {num_cores()} cores; compare those "
            "of as many ranks. The theory of a time is its products with weights alone, at the "
            "rate that all ranks together reach."
        )
    if stale := [point.strategy for point in result.points if _is_stale(point)]:
        shown.append(
            f"no theory of the time of {', '.join(dict.fromkeys(stale))}: at the rate measured "
            "for them, products alone take longer than a step did; measure again on an idle "
            "machine"
        )
    return BenchResult(name=f"tensor-cpu-{precision}", shown=shown, values=values_of(result))


def _tensor_table(points: Sequence[LayoutPoint]) -> Table:
    numbers = ("sent MiB", "calls", "weights MiB", "kept MiB", "peak MiB", "ms", "min - max")
    rows: list[tuple[str, ...]] = []
    for point in points:
        times_ms = [1e3 * time_s for time_s in point.times_s]
        median = _ms(statistics.median(times_ms)) if times_ms else "-"
        ends = f"{_ms(min(times_ms))} - {_ms(max(times_ms))}" if times_ms else "-"
        is_known = point.products_s is not None and not _is_stale(point)
        products = _ms(1e3 * (point.products_s or 0)) if is_known else "-"
        peak = f"{point.peak_bytes / 2**20:.2f}"
        measured, theory = _amounts_cells(point.measured), _amounts_cells(point.theory)
        rows.append((point.strategy, "measured", *measured, peak, median, ends))
        rows.append(("", "theory", *theory, "-", products, ""))
    return Table("", ("layout", "", *numbers), rows, numbers)


def _is_stale(point: LayoutPoint) -> bool:
    """Return whether its products alone would take longer than a whole step did."""
    return point.products_s is not None and point.products_s > min(point.times_s, default=math.inf)


def _ms(time_ms: float) -> str:
    return f"{time_ms:.1f}" if time_ms < 100 else f"{time_ms:.0f}"


def _amounts_cells(amounts: Amounts) -> list[str]:
    return [
        f"{amounts.sent_bytes / 2**20:.2f}",
        str(amounts.num_calls),
        f"{amounts.weight_bytes / 2**20:.2f}",
        f"{amounts.kept_bytes / 2**20:.2f}",
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from common import run_as_verb

    run_as_verb("tensor", TensorConfig, run)
