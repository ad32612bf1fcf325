"""Pictures of panels with axes, as SVG. Only this file imports matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError
from phalanx.report.output import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_MATPLOTLIB = "matplotlib, which is not installed; pip install 'phalanx-train[plot]'"


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_picture(path: Path) -> None:
    """Check, before any work, that a picture can be drawn to `path`.

    Raises:
        ConfigError: `path` is not a writable SVG name, or matplotlib is missing.
    """
    check_writable(path, ".svg")
    _check_matplotlib()


def _check_matplotlib() -> None:
    if not has_matplotlib():
        raise ConfigError(f"a picture needs {NO_MATPLOTLIB}")


@contextmanager
def picture(
    path: Path, size: tuple[float, float], num_rows: int, num_columns: int, *, shares: bool = False
) -> Generator[list[list[Axes]]]:
    """Yield panels to draw on, rows of columns; write them to `path`, equal for equal values.

    Args:
        path: the file, .svg or .png.
        size: width and height in inches.
        num_rows: rows of panels.
        num_columns: panels of a row.
        shares: whether all panels have the same axes.

    Raises:
        ConfigError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    _check_matplotlib()
    # Not pyplot, because it keeps every figure in a global registry.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, sharex=shares, sharey=shares, squeeze=False)
    yield panels.tolist()
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    # A fixed salt and no date make the file reproducible.
    with rc_context({"svg.hashsalt": "phalanx", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def log2_ticks(axes: Axes, values: Sequence[int], fontsize: float | None = None) -> None:
    """Make the horizontal axis logarithmic, with a tick at each of the values alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=fontsize)
    axes.minorticks_off()
