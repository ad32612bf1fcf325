"""Plot the matmul ceiling as SVG. Needs matplotlib, the `plot` extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from phalanx.bench.ceiling import Ceiling


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_ceiling(ceiling: Ceiling, path: Path) -> None:
    """Plot median and best rate against size, with lines for the ceiling and any data sheet."""
    # Not pyplot, because it keeps every figure in a global registry.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = [point.num_rows for point in ceiling.points]
    best = [point.best_flops_per_s / 1e12 for point in ceiling.points]
    median = [point.median_flops_per_s / 1e12 for point in ceiling.points]
    top = ceiling.flops_per_s / 1e12

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = [(f"ceiling {top:.3g} TFLOP/s", top, "#b04a2f", "--")]
    if ceiling.peak is not None:
        peak = ceiling.peak.flops_per_s / 1e12
        lines.append((f"data sheet {peak:.4g} TFLOP/s", peak, "#555555", "-"))
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
    top = max(height for _, height, _, _ in lines)
    axes.plot(sizes, best, marker="o", markersize=4, color="#8fb8de", label="best repeat")
    axes.plot(sizes, median, marker="o", markersize=5, color="#1f5a99", label="median")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.18 * top)
    axes.set_xlabel("n, product of two n x n matrices")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"Matrix products in {ceiling.arithmetic}, {ceiling.machine}")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_svg(figure, path)


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure; equal figures give equal SVG files."""
    from matplotlib import rc_context

    # A fixed hash salt and no date make the file reproducible.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "phalanx", "svg.fonttype": "none"}):
        figure.savefig(path, metadata=metadata, dpi=150)
