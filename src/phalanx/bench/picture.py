"""Plot the matmul ceiling and the times of collectives as SVG. Needs matplotlib (`plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.report.figure import log2_ticks, picture

if TYPE_CHECKING:
    from phalanx.bench.ceiling import Ceiling
    from phalanx.bench.collectives import Fit, Sample

COLOURS = ("#1f5a99", "#b04a2f", "#3b7d4f")


def draw_ceiling(ceiling: Ceiling, path: Path) -> None:
    """Plot median and best rate against size, with lines for the ceiling and any data sheet."""
    sizes = [point.num_rows for point in ceiling.points]
    best = [point.best_flops_per_s / 1e12 for point in ceiling.points]
    median = [point.median_flops_per_s / 1e12 for point in ceiling.points]
    top = ceiling.flops_per_s / 1e12
    lines = [(f"ceiling {top:.3g} TFLOP/s", top, "#b04a2f", "--")]
    if ceiling.peak is not None:
        peak = ceiling.peak.flops_per_s / 1e12
        lines.append((f"data sheet {peak:.4g} TFLOP/s", peak, "#555555", "-"))
    with picture(path, (7, 4.2), 1, 1) as [[axes]]:
        for text, height, colour, style in lines:
            axes.axhline(height, color=colour, linewidth=1, linestyle=style)
            axes.annotate(
                text,
                (1.0, height),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 4),
                textcoords="offset points",
                ha="right",
                color=colour,
            )
        axes.plot(sizes, best, marker="o", markersize=4, color="#8fb8de", label="best repeat")
        axes.plot(sizes, median, marker="o", markersize=5, color="#1f5a99", label="median")
        log2_ticks(axes, sizes)
        axes.set_ylim(0, 1.18 * max(height for _, height, _, _ in lines))
        axes.set_xlabel("n, product of two n x n matrices")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}")
        axes.legend(loc="lower right", frameon=False)


def draw_fits(samples: Sequence[Sample], fits: Sequence[Fit], path: Path) -> None:
    """Plot time against size: a mark for each measurement, a line for the fitted model.

    Each panel has one collective at one level of the cluster; each engine has its own color.
    """
    ops = list(dict.fromkeys(fit.op for fit in fits))
    units = list(dict.fromkeys(fit.unit for fit in fits))
    engines = list(dict.fromkeys(fit.engine for fit in fits))
    size = (2.6 * len(ops) + 0.6, 2.8 * len(units) + 0.5)
    with picture(path, size, len(units), len(ops), shares=True) as panels:
        for fit in fits:
            axes = panels[units.index(fit.unit)][ops.index(fit.op)]
            colour = COLOURS[engines.index(fit.engine) % len(COLOURS)]
            own = [
                sample
                for sample in samples
                if (sample.op, sample.engine) == (fit.op, fit.engine)
                and fit.unit == ("server" if sample.axis == "tp" else "cluster")
            ]
            sizes = [one.num_bytes / 1024 for one in own]
            axes.plot(sizes, [1e6 * one.time_s for one in own], "o", markersize=4, color=colour)
            line = [1e6 * fit.time_s(one.num_bytes) for one in own]
            axes.plot(sizes, line, linewidth=1, color=colour, label=fit.engine)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{fit.op}, {fit.num_ranks} ranks", fontsize=9)
        for row in panels:
            row[0].set_ylabel("us")
        for axes in panels[-1]:
            axes.set_xlabel("KiB")
        panels[0][0].legend(loc="upper left", frameon=False, title="line: model", fontsize=8)
