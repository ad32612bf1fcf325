"""The matmul ceiling: the highest FLOP/s of matrix products that this device reaches, measured now.

A data sheet states the peak of the chip. The ceiling is lower, because of the library, the clocks,
the cooling and other work on the machine. Square products of doubling size show from which size the
device is fully used.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from phalanx.bench.in_step import core_in_step
from phalanx.bench.picture import draw_ceiling
from phalanx.bench.verb import (
    BenchResult,
    DeviceConfig,
    OnDevice,
    PrintLine,
    device_fields,
    resolve_device,
)
from phalanx.config.fields import Range
from phalanx.measure.environment import MEMORY_SHARE, free_memory_bytes
from phalanx.measure.products import FEWEST_REPEATS, MatmulPoint, arithmetic_of, measure_matmul
from phalanx.planner import calibration, calibration_file
from phalanx.report.output import values_of
from phalanx.report.tabular import Number, Table
from phalanx.report.units import percent

SMALLEST_SIZE = 512
LARGEST_SIZE = 32768


@dataclass(frozen=True, kw_only=True)
class CeilingConfig(DeviceConfig):
    """Measure the matmul ceiling: square products of doubling size, as a table and a picture."""

    max_size: Annotated[int, Range(SMALLEST_SIZE)] = LARGEST_SIZE
    """Largest size to try."""
    write: str | None = None
    """Calibration to write for the planner: "this", which calibrates the cluster named "this", or a
    FILE.json, which can be named as a cluster."""


def run(config: CeilingConfig, say: PrintLine) -> BenchResult:
    """Measure the ceiling; return its table and picture, and write the calibration if requested."""
    del say
    path = None if config.write is None else calibration_file.path_of(config.write)
    ceiling = measure_ceiling(config)
    if path is not None:
        machine = calibration.blank("gpu" if ceiling.device == "cuda" else "cpu")
        best = {ceiling.arithmetic: ceiling.flops_per_s}
        sustained = {ceiling.arithmetic: ceiling.sustained_flops_per_s}
        compute = calibration.compute_of(machine, best, sustained, ceiling.num_threads or 1)
        if compute.core is not None:
            compute = dataclasses.replace(
                compute, core=core_in_step(machine, compute, compute.core)
            )
        calibration_file.keep(path, dataclasses.replace(machine, compute=compute))
    return BenchResult(
        name=f"ceiling-{ceiling.device}-{ceiling.arithmetic}",
        shown=[
            f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}",
            ceiling.table(),
            *(f"{size} skipped: {reason}" for size, reason in ceiling.skipped),
            *ceiling.remarks(),
            *([] if path is None else [f"wrote {path}"]),
        ],
        values=values_of(ceiling),
        draw=partial(draw_ceiling, ceiling),
    )


@dataclass(frozen=True, kw_only=True)
class Ceiling(OnDevice):
    """The matmul ceiling of one device in one data type."""

    points: tuple[MatmulPoint, ...]
    """The measured sizes, smallest first."""
    skipped: tuple[tuple[int, str], ...]
    """Sizes that were not measured, each with the reason."""

    @property
    def flops_per_s(self) -> float:
        """The ceiling: the rate of the fastest repeat of any size."""
        return max(point.best_flops_per_s for point in self.points)

    @property
    def sustained_flops_per_s(self) -> float:
        """The highest median rate of any size."""
        return max(point.median_flops_per_s for point in self.points)

    def table(self) -> Table:
        """Return a table with one row for each measured size."""
        heads = [
            *(Number("n x n", "d"), Number("repeats", "d"), Number("median ms", ".3f", 1e-3)),
            *(Number(f"{name} TFLOP/s", ".3f", 1e12) for name in ("median", "best")),
        ]
        rows = [
            [p.num_rows, p.repeats, p.median_s, p.median_flops_per_s, p.best_flops_per_s]
            for p in self.points
        ]
        if self.peak is not None:
            heads.append(Number("of data sheet", percent))
            for row in rows:
                row.append(row[-1] / self.peak.flops_per_s)
        return Table("", heads, rows)

    def remarks(self) -> list[str]:
        """Return the lines below the table: the ceiling, and the data sheet's peak if known."""
        words = (
            f"ceiling {self.flops_per_s / 1e12:.3f} TFLOP/s (fastest repeat), sustained "
            f"{self.sustained_flops_per_s / 1e12:.3f} TFLOP/s (best median)"
        )
        if self.peak is None:
            return [f"{words}; no data sheet is known for this device"]
        lines = [f"{words}; data sheet {self.peak.flops_per_s / 1e12:.1f} ({self.peak.source})"]
        if self.flops_per_s > self.peak.flops_per_s:
            lines.append(
                "percentages above 100 are not shown: the data sheet describes another device"
            )
        return lines


def measure_ceiling(config: CeilingConfig) -> Ceiling:
    """Measure square products of 512, 1024, ... `max_size`; skip sizes beyond memory or budget."""
    device, arithmetic = resolve_device(config)
    points: list[MatmulPoint] = []
    skipped: list[tuple[int, str]] = []
    begin_s = time.perf_counter()
    with arithmetic_of(arithmetic) as dtype:
        size = SMALLEST_SIZE
        while size <= config.max_size:
            left_s = config.budget_s - (time.perf_counter() - begin_s)
            # Each operand is generated in float32 and then converted, one operand at a time.
            need_bytes = size * size * (3 * dtype.itemsize + 4)
            free_bytes = free_memory_bytes(device)
            need_s = 0.0
            if points:
                product_s = points[-1].median_s * (size / points[-1].num_rows) ** 3
                need_s = product_s * (1 + FEWEST_REPEATS)
            if need_bytes > MEMORY_SHARE * free_bytes:
                reason = (
                    f"needs {need_bytes / 2**30:.1f} GiB, but only {MEMORY_SHARE:.0%} of the free "
                    f"{free_bytes / 2**30:.1f} GiB may be used"
                )
                skipped.append((size, reason))
            elif points and need_s > left_s:
                left = f"{max(left_s, 0):.0f} s of the budget are left"
                skipped.append((size, f"needs about {need_s:.0f} s, but {left}"))
            else:
                # Use half of the time left, so that larger sizes can be measured too.
                points.append(measure_matmul(device, dtype, size, size, size, left_s / 2))
            size *= 2
    return Ceiling(
        **device_fields(device, arithmetic), points=tuple(points), skipped=tuple(skipped)
    )
