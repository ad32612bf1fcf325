"""Draw who holds what under the six forms of data parallelism, from their own plans.

python benchmarks/data_parallel/picture.py docs/data_parallel.svg
"""

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

FORMS = {
    "dp4:naive": "all-reduce of each gradient,\nafter backward",
    "dp4": "all-reduce of buckets,\nduring backward",
    "fsdp4:zero1": "gathers weights once,\nreduces whole gradients once",
    "fsdp4:zero2": "gathers weights once,\nreduces every microbatch",
    "fsdp4": "gathers each block twice,\nreduces every microbatch",
    "dp2,fsdp2": "as fsdp in each pair,\nall-reduce of shares across",
}
COLORS = {"parameters": "#1f5a99", "gradients": "#c8642d", "moments": "#4d8a57"}
NUM_BLOCKS = 16


class Equal(nn.Module):
    """Blocks of one size, so that shares are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(NUM_BLOCKS))


def bar(
    axes: Axes, x: float, y: float, name: str, share: float, first: float, whole: float
) -> None:
    """Draw a column of height 1: what is held from `first` on, and what is only borrowed."""
    axes.add_patch(Rectangle((x, y), 0.22, 1, fill=False, edgecolor="#bbbbbb", linewidth=0.6))
    if whole > 0:
        bottom = 1 - whole if first + share == 1 else 0  # where the rank's own share is not
        axes.add_patch(Rectangle((x, y + bottom), 0.22, whole, facecolor=COLORS[name], alpha=0.25))
    top = 1 - first
    axes.add_patch(Rectangle((x, y + top - share), 0.22, share, facecolor=COLORS[name]))


def draw(path: Path) -> None:
    model = Equal()
    size = sum(p.nbytes for p in model.parameters())
    figure = Figure(figsize=(9, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (text, words) in enumerate(FORMS.items()):
        strategy = Strategy.parse(text)
        plan = Plan(strategy, model)
        held = plan.holds(accumulation=2)
        entries = plan.traffic([(1, 1)])
        sent = sum(e.sent_bytes for e in entries if e.phase != "agree") / size
        y = -1.55 * row
        axes.text(-0.15, y + 0.5, text, ha="right", va="center", family="monospace", fontsize=11)
        for rank in range(4):
            degree = strategy.fsdp.degree
            coord = rank % degree
            columns = {
                "parameters": (held.parameter_bytes, held.gathered_bytes),
                "gradients": (held.gradient_bytes, 0),
                "moments": (held.optimizer_bytes / 2, 0),
            }
            for place, (name, (own, borrowed)) in enumerate(columns.items()):
                share = own / size
                first = coord / degree if share < 1 else 0
                bar(axes, 1.05 * rank + 0.27 * place, y, name, share, first, borrowed / size)
            if row == 0:
                axes.text(1.05 * rank + 0.38, y + 1.12, f"rank {rank}", ha="center", fontsize=9)
        axes.text(4.35, y + 0.5, f"{words}\nsends {sent:.2f} P a step", va="center", fontsize=9)
    for place, (name, color) in enumerate(COLORS.items()):
        x, y = 1.0 * place, 1.55
        axes.add_patch(Rectangle((x, y), 0.14, 0.2, facecolor=color))
        axes.text(x + 0.2, y + 0.1, name, va="center", fontsize=9)
    axes.add_patch(Rectangle((3.0, 1.55), 0.14, 0.2, facecolor=COLORS["parameters"], alpha=0.25))
    axes.text(3.2, 1.65, "gathered from others, at most at one time", va="center", fontsize=9)
    axes.set_xlim(-1.4, 6.6)
    axes.set_ylim(-1.55 * 5 - 0.2, 1.9)
    axes.axis("off")
    # A fixed salt and no date: the same figures give the same file.
    with rc_context({"svg.hashsalt": "phalanx", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
