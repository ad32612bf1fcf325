"""Draw which part of the work each of four devices has, under each axis of a strategy.

python benchmarks/overview.py docs/overview.svg
"""

import sys
from pathlib import Path

AXES = (
    ("dp4", "samples", "gradients, once a step", "rows"),
    (
        "fsdp4",
        "samples and stored layers",
        "layers and gradients",
        "rows",
    ),
    ("tp4", "every layer", "activations, in each layer", "columns"),
    ("cp4", "the positions of each sample", "keys and values, in each layer", "positions"),
    ("pp4", "the layers", "activations between stages", "layers"),
)
"""Strategy, what it splits, what the devices send, and how the picture shows it."""

SHADES = ("#1f3f66", "#3b6fb6", "#7fa6d8", "#c3d6ee")
"""The devices."""


def draw(path: Path) -> None:
    """Draw a panel for each axis: samples by positions above, layers by features below."""
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    def grid(axes: Axes, bottom: float, split: str | None, label: str) -> None:
        """Draw a square of 4 by 4 cells, coloured by the device that has each."""
        for row in range(4):
            for column in range(4):
                device = {"down": row, "across": column}.get(split or "")
                colour = "#e8d9c9" if device is None else SHADES[device]
                box = Rectangle((column, bottom + 3 - row), 0.94, 0.94, color=colour, lw=0)
                axes.add_patch(box)
        axes.text(2, bottom - 0.25, label, ha="center", va="top", fontsize=8)

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "phalanx"}):
        figure = Figure(figsize=(10.6, 4.6))
        FigureCanvasAgg(figure)
        for index, (strategy, what, sends, kind) in enumerate(AXES):
            axes = figure.add_subplot(1, len(AXES), index + 1)
            samples = {"rows": "down", "positions": "across"}.get(kind)
            layers = {"columns": "across", "layers": "down"}.get(kind)
            grid(axes, 6.2, samples, "samples (down) by positions")
            stored = "across" if strategy == "fsdp4" else layers
            grid(axes, 0.6, stored, "layers (down) by features")
            axes.set_title(f"{strategy}\n{what}", fontsize=9, weight="bold")
            axes.text(2, -0.75, f"sends {sends}", ha="center", va="top", fontsize=7.5)
            axes.set(xlim=(-0.3, 4.3), ylim=(-1.6, 10.4), aspect="equal")
            axes.axis("off")
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (*SHADES, "#e8d9c9")]
        names = [*(f"device {device}" for device in range(4)), "all devices"]
        figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name))
