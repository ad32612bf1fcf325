"""Draw a trace of `main.py --trace`: what rank 0 computes, and what travels meanwhile.

python benchmarks/overlap/picture.py TRACE.json PICTURE.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from phalanx.report.svg import SvgDrawing

COLOURS = {
    "computes": "#9db8d9", "waits": "#d9694f", "gathers": "#79b48a", "reductions": "#e0b354",
}  # fmt: skip
LEFT, INNER, LANE, PANEL = 80, 900, 22, 150
LETTER = 6
"""A span without so much room for each letter has no name."""


def spans_of(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def label(name: str) -> str:
    """Return the number of a block, or the name of another group."""
    return name.split(" ")[-1].removeprefix("blocks.").removeprefix("wait")


def draw(
    drawing: SvgDrawing, top: float, title: str, spans: list[dict[str, Any]], us: float
) -> None:
    """Draw one way below `top`; `us` is the width of a microsecond."""
    drawing.texts([(LEFT, top, title)], 12, weight="bold")
    for row, (track, colour) in enumerate(COLOURS.items()):
        y = top + 8 + row * (LANE + 3)
        boxes = [
            (LEFT + us * span["ts"], y, us * span["dur"], LANE)
            for span in spans
            if span["tid"] == row
        ]
        names = [label(span["name"]) for span in spans if span["tid"] == row]
        drawing.boxes(boxes, colour)
        drawing.texts([(LEFT - 6, y + 15, track)], anchor="end")
        fitting = [
            (x + width / 2, y + 15, name)
            for (x, _, width, _), name in zip(boxes, names, strict=True)
            if name and width > LETTER * len(name)
        ]
        drawing.texts(fitting, 9, "middle")
    end_ms = round(INNER / us / 1000)
    ticks = [(1000 * us * ms, str(ms)) for ms in range(0, end_ms + 1, 500)]
    drawing.below(LEFT, top + 8 + len(COLOURS) * (LANE + 3), ticks)


def main() -> None:
    events = json.loads(Path(sys.argv[1]).read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = [process for process, title in titles.items() if title.endswith("rank 0")]
    us = INNER / max(e["ts"] + e["dur"] for p in shown for e in spans_of(events, p))
    drawing = SvgDrawing(LEFT + INNER + 20, PANEL * len(shown) + 20)
    for number, process in enumerate(shown):
        title = f"in flight: {titles[process].replace('none in flight', 'none')}"
        draw(drawing, 20 + PANEL * number, title, spans_of(events, process), us)
    words = "ms from the first forward; numbers are blocks"
    drawing.texts([(LEFT + INNER / 2, PANEL * len(shown) + 12, words)], anchor="middle")
    drawing.write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
