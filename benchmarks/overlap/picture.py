"""Draw a trace of `main.py --trace`: what rank 0 computes, and what travels meanwhile.

python benchmarks/overlap/picture.py TRACE.json PICTURE.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = {
    "computes": "#9db8d9", "waits": "#d9694f", "gathers": "#79b48a", "reductions": "#e0b354",
}  # fmt: skip
LETTER_MS = 9
"""A span without so much room for each letter has no name."""


def spans_of(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def label(name: str) -> str:
    """Return the number of a block, or the name of another group."""
    return name.split(" ")[-1].removeprefix("blocks.").removeprefix("wait")


def draw(axes: Axes, title: str, spans: list[dict[str, Any]], end_ms: float) -> None:
    tracks = list(COLORS)
    for span in spans:
        begin_ms, width_ms, row = span["ts"] / 1e3, span["dur"] / 1e3, span["tid"]
        axes.broken_barh([(begin_ms, width_ms)], (row - 0.4, 0.8), color=COLORS[tracks[row]])
        if width_ms > LETTER_MS * len(label(span["name"])):
            axes.text(
                begin_ms + width_ms / 2, row, label(span["name"]), ha="center", va="center",
                fontsize=6, clip_on=True,
            )  # fmt: skip
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(range(len(tracks)), tracks, fontsize=8)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(0, end_ms)
    axes.tick_params(axis="x", labelsize=7)


def main() -> None:
    events = json.loads(Path(sys.argv[1]).read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = [process for process, title in titles.items() if title.endswith("rank 0")]
    end_ms = max(e["ts"] + e["dur"] for p in shown for e in spans_of(events, p)) / 1e3
    # The same picture from the same trace, to the byte.
    with rc_context({"svg.hashsalt": "overlap", "svg.fonttype": "none"}):
        figure = Figure(figsize=(13, 1.5 * len(shown)), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, process in zip(figure.subplots(len(shown)), shown, strict=True):
            draw(axes, f"in flight: {titles[process]}", spans_of(events, process), end_ms)
        figure.supxlabel("ms from the first forward; numbers are blocks", fontsize=8)
        figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
