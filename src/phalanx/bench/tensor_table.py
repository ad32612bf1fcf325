"""`phalanx bench tensor`: one decoder block under layouts of tensor parallelism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from phalanx.bench.account import Amounts
from phalanx.bench.tensor import LayoutPoint, TensorConfig, measure_tensor
from phalanx.bench.verb import Found, Say, table
from phalanx.launch.local import num_cores
from phalanx.measure.logs import values_of


def run(config: TensorConfig, say: Say) -> Found:
    """Measure, and show a table for each size."""
    del say
    result = measure_tensor(config)
    precision = result.precision
    shown: list[str | Table] = []
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
    return Found(name=f"tensor-cpu-{precision}", shown=shown, values=values_of(result))


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
    drawn = table(("layout", "", *numbers), rows, num_words=2)
    for row in drawn.rows[1::2]:
        row.end_section = True
    return drawn


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
