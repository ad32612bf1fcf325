"""Draw who holds what under the five layouts of tensor parallelism, from the layouts themselves.

python benchmarks/tensor/picture.py docs/tensor.svg
"""

import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from layouts import parse_layout
from phalanx.comm.dry_run import CountingComm
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.tensor.apply import LAYOUTS
from phalanx.parallel.tensor.layout import Layout
from phalanx.parallel.tensor.spec import Spec

FORMS = {
    "tp4": "1d, with sequence parallelism",
    "tp4:megatron": "1d, with full activations",
    "tp4:2d": "2d: a square of 2 x 2 (row, col)",
    "tp8:2.5d/2": "2.5d: two squares of 2 x 2 (depth, row, col)",
    "tp8:3d": "3d: a cube of 2 x 2 x 2 (y, z, x)",
}
NUM_ROWS, LENGTH, HIDDEN, INNER = 4, 4, 8, 8
PANELS = (
    ("x, residual", "rows x positions", "hidden"),
    ("column weight", "inner", "hidden"),
    ("y, inner", "rows x positions", "inner"),
    ("row weight", "hidden", "inner"),
)
Cell = tuple[int, int, int, int]
"""First line, number of lines, first column, number of columns; in parts of 16 and 8."""


def activation_cells(layout: Layout, spec: Spec, num_features: int) -> list[Cell]:
    """Return what this rank holds of an activation whose lines are rows, and in them positions."""
    batch = BatchShape(NUM_ROWS, LENGTH)
    rows, positions, features = layout.shard_ranges(spec, batch, num_features)
    return [
        (row * LENGTH + positions.start, len(positions), features.start, len(features))
        for row in rows
    ]


def weight_cells(layout: Layout, spec: Spec) -> list[Cell]:
    """Return what this rank holds of a weight, stretched to as many lines as activations have."""
    out = spec.shard(0, NUM_ROWS * LENGTH, layout.comm)
    inner = spec.shard(1, HIDDEN, layout.comm)
    return [(out.start, len(out), inner.start, len(inner))]


def holders(text: str) -> list[dict[Cell, list[int]]]:
    """Return for each panel who holds each cell."""
    sizes = parse_layout(text).grid()
    panels: list[dict[Cell, list[int]]] = [defaultdict(list) for _ in PANELS]
    for rank, coords in enumerate(product(*map(range, sizes.values()))):
        comm = CountingComm(sizes, dict(zip(sizes, coords, strict=True)))
        layout = LAYOUTS[parse_layout(text).tp.kind](comm)
        held = (
            activation_cells(layout, layout.residual, HIDDEN),
            weight_cells(layout, layout.column),
            activation_cells(layout, layout.inner, INNER),
            weight_cells(layout, layout.row),
        )
        for panel, cells in zip(panels, held, strict=True):
            for cell in cells:
                panel[cell].append(rank)
    return panels


def draw_panel(axes: Axes, left: float, top: float, cells: dict[Cell, list[int]]) -> None:
    """Draw one panel 1 wide and 1.6 high; each cell in the colour of its first holder."""
    width, height = 1 / HIDDEN, 1.6 / (NUM_ROWS * LENGTH)
    for (line, lines, column, columns), ranks in cells.items():
        x, y = left + column * width, top - (line + lines) * height
        axes.add_patch(
            Rectangle(
                (x, y),
                columns * width,
                lines * height,
                facecolor=colormaps["Set3"](ranks[0]),
                edgecolor="white",
                linewidth=0.8,
            )
        )
        axes.text(
            x + columns * width / 2,
            y + lines * height / 2,
            " ".join(map(str, ranks)),
            ha="center",
            va="center",
            fontsize=9 if lines > 1 else 6.5,
        )


def draw(path: Path) -> None:
    figure = Figure(figsize=(9, 13.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (text, words) in enumerate(FORMS.items()):
        top = -2.35 * row
        axes.text(-0.02, top + 0.25, text, family="monospace", fontsize=11, va="center")
        axes.text(0.85, top + 0.25, words, fontsize=10, va="center")
        for column, cells in enumerate(holders(text)):
            draw_panel(axes, 1.45 * column, top, cells)
            title, down, across = PANELS[column]
            axes.text(1.45 * column + 0.5, top - 1.69, title, ha="center", va="center", fontsize=9)
            if row == 0:
                x = 1.45 * column
                axes.text(x - 0.1, top - 0.8, down, rotation=90, va="center", fontsize=8)
                axes.text(x + 0.5, top + 0.04, across, ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.2, 5.5)
    axes.set_ylim(-2.35 * (len(FORMS) - 1) - 1.85, 0.45)
    axes.axis("off")
    # A fixed salt and no date: the same layouts give the same file.
    with rc_context({"svg.hashsalt": "phalanx", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
