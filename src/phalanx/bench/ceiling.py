"""The matmul ceiling: the highest rate at which this device multiplies matrices, measured now.

A data sheet states what the silicon could do; the ceiling says what the library, the clocks, the
cooling and the neighbours leave of it. Square products of doubling size show where the device
begins to be busy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from rich.table import Table

from phalanx.bench.picture import draw_ceiling
from phalanx.bench.verb import DeviceConfig, Found, Say, resolved
from phalanx.config.fields import Range
from phalanx.measure.environment import device_name, free_memory_bytes
from phalanx.measure.logs import values_of
from phalanx.measure.peaks import Arithmetic, Peak, peak_of
from phalanx.measure.products import (
    FEWEST_REPEATS,
    MatmulPoint,
    arithmetic_of,
    checked_device,
    machine_text,
    measure_matmul,
)
from phalanx.measure.utilization import percent

SMALLEST_SIZE = 512
LARGEST_SIZE = 32768
_MEMORY_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class CeilingConfig(DeviceConfig):
    """Measure the matmul ceiling: square products of doubling size, as a table and a picture."""

    max_size: Annotated[int, Range(SMALLEST_SIZE)] = LARGEST_SIZE
    """Largest size to try."""


def run(config: CeilingConfig, say: Say) -> Found:
    """Measure, and show a table and a picture."""
    del say
    ceiling = measure_ceiling(*resolved(config), config.max_size, config.budget_s)
    return Found(
        name=f"ceiling-{ceiling.device}-{ceiling.arithmetic}",
        shown=[
            f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}",
            ceiling.table(),
            *(f"{size} skipped: {reason}" for size, reason in ceiling.skipped),
            *ceiling.remarks(),
        ],
        values=values_of(ceiling),
        draw=partial(draw_ceiling, ceiling),
    )


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What `measure_ceiling` found on one device for one data type."""

    device: str
    device_name: str
    arithmetic: Arithmetic
    num_threads: int | None
    """CPU threads; None on a GPU."""
    points: tuple[MatmulPoint, ...]
    """One for each size measured, smallest first."""
    skipped: tuple[tuple[int, str], ...]
    """Sizes not measured, each with the reason."""

    @property
    def machine(self) -> str:
        """The device's name, with its threads if it is a CPU."""
        return machine_text(self.device_name, self.num_threads)

    @property
    def flops_per_s(self) -> float:
        """The ceiling: the fastest repeat of any size."""
        return max(point.best_flops_per_s for point in self.points)

    @property
    def sustained_flops_per_s(self) -> float:
        """The highest median over the sizes."""
        return max(point.median_flops_per_s for point in self.points)

    @property
    def peak(self) -> Peak | None:
        """The device's data sheet; None if it is not in the table."""
        return peak_of(self.device_name, self.arithmetic) if self.device == "cuda" else None

    def table(self) -> Table:
        """Draw a row for each size."""
        table = Table()
        table.add_column("n x n", justify="right")
        table.add_column("repeats", justify="right")
        table.add_column("median ms", justify="right")
        table.add_column("median TFLOP/s", justify="right")
        table.add_column("best TFLOP/s", justify="right")
        if self.peak is not None:
            table.add_column("of data sheet", justify="right")
        for point in self.points:
            row = [
                str(point.num_rows),
                str(point.repeats),
                f"{1e3 * point.median_s:.3f}",
                f"{point.median_flops_per_s / 1e12:.3f}",
                f"{point.best_flops_per_s / 1e12:.3f}",
            ]
            if self.peak is not None:
                row.append(percent(point.best_flops_per_s / self.peak.flops_per_s))
            table.add_row(*row)
        return table

    def remarks(self) -> list[str]:
        """Return what goes with the table."""
        words = (
            f"ceiling {self.flops_per_s / 1e12:.3f} TFLOP/s (fastest repeat), sustained "
            f"{self.sustained_flops_per_s / 1e12:.3f} TFLOP/s (best median)"
        )
        if self.peak is None:
            return [f"{words}; no data sheet is known for this device"]
        lines = [f"{words}; data sheet {self.peak.flops_per_s / 1e12:.1f} ({self.peak.source})"]
        if self.flops_per_s > self.peak.flops_per_s:
            lines.append(
                "no share above 100 % of a data sheet is given: it is not that of this device"
            )
        return lines


def measure_ceiling(
    device: torch.device | str,
    arithmetic: Arithmetic,
    max_size: int = LARGEST_SIZE,
    budget_s: float = 60.0,
) -> Ceiling:
    """Measure square products of 512, 1024, ... `max_size`, as memory and time allow.

    Args:
        device: cpu or a CUDA device.
        arithmetic: data type; `tf32` is float32 data on a GPU's tensor cores.
        max_size: largest size to try, at least 512.
        budget_s: do not start a size that would go beyond this many seconds in all.

    Raises:
        ConfigError: the device is missing or cannot do the arithmetic.
    """
    device = checked_device(device, arithmetic)
    points: list[MatmulPoint] = []
    skipped: list[tuple[int, str]] = []
    begin_s = time.perf_counter()
    with arithmetic_of(arithmetic) as dtype:
        size = SMALLEST_SIZE
        while size <= max_size:
            left_s = budget_s - (time.perf_counter() - begin_s)
            reason = _obstacle(device, dtype, size, points, left_s)
            if reason is None:
                # Half of what is left, so that larger sizes get their turn.
                points.append(measure_matmul(device, dtype, size, size, size, left_s / 2))
            else:
                skipped.append((size, reason))
            size *= 2
    return Ceiling(
        device=device.type,
        device_name=device_name(device),
        arithmetic=arithmetic,
        num_threads=torch.get_num_threads() if device.type == "cpu" else None,
        points=tuple(points),
        skipped=tuple(skipped),
    )


def _obstacle(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    points: Sequence[MatmulPoint],
    left_s: float,
) -> str | None:
    """Say why a size cannot be measured, or None."""
    # Operands are drawn as float32, one at a time, before they are converted.
    need_bytes = size * size * (3 * dtype.itemsize + 4)
    free_bytes = free_memory_bytes(device)
    if need_bytes > _MEMORY_SHARE * free_bytes:
        return (
            f"needs {need_bytes / 2**30:.1f} GiB, {_MEMORY_SHARE:.0%} of the free "
            f"{free_bytes / 2**30:.1f} GiB are allowed"
        )
    if points:
        product_s = points[-1].median_s * (size / points[-1].num_rows) ** 3
        need_s = product_s * (1 + FEWEST_REPEATS)
        if need_s > left_s:
            return f"needs about {need_s:.0f} s, {max(left_s, 0):.0f} s of the budget are left"
    return None
