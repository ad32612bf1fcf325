"""Plot the times of collectives with the fitted model. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.bench.picture import save_svg

if TYPE_CHECKING:
    from phalanx.bench.collectives import Fit, Sample

COLOURS = ("#1f5a99", "#b04a2f", "#3b7d4f")


def draw_fits(samples: Sequence[Sample], fits: Sequence[Fit], path: Path) -> None:
    """Plot time against size: a mark for each measurement, a line for the fitted model.

    Each panel has one collective at one level of the cluster; each engine has its own color.
    """
    # Not pyplot, because it keeps every figure in a global registry.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys(fit.op for fit in fits))
    units = list(dict.fromkeys(fit.unit for fit in fits))
    engines = list(dict.fromkeys(fit.engine for fit in fits))
    size = (2.6 * len(ops) + 0.6, 2.8 * len(units) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(units), len(ops), sharex=True, sharey=True, squeeze=False)
    for fit in fits:
        axes = panels[units.index(fit.unit)][ops.index(fit.op)]
        colour = COLOURS[engines.index(fit.engine) % len(COLOURS)]
        own = [one for one in samples if _is_of(one, fit)]
        sizes = [one.num_bytes / 1024 for one in own]
        axes.plot(sizes, [1e6 * one.time_s for one in own], "o", markersize=4, color=colour)
        line = [1e6 * fit.time_s(one.num_bytes) for one in own]
        axes.plot(sizes, line, linewidth=1, color=colour, label=fit.engine)
        _finish(axes, f"{fit.op}, {fit.num_ranks} ranks")
    for row in panels:
        row[0].set_ylabel("us")
    for axes in panels[-1]:
        axes.set_xlabel("KiB")
    panels[0][0].legend(loc="upper left", frameon=False, title="line: model", fontsize=8)
    save_svg(figure, path)


def _is_of(sample: Sample, fit: Fit) -> bool:
    own = fit.unit == ("server" if sample.axis == "tp" else "cluster")
    return own and (sample.op, sample.engine) == (fit.op, fit.engine)


def _finish(axes: Any, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
