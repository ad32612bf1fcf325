"""Draw the result of a topic as an animated SVG, which browsers and Markdown pages play.

Each part is drawn below the previous one. A strip shows its steps in rotation: ranks are boxes on
an ellipse, messages are arrows, and cells that the step has changed are colored. A bar moves down
the rows of a table, and a line through a timeline. A viewer without animation shows the first step.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Final

from phalanx.report.svg import LETTER, ROW, Box, SvgDrawing
from phalanx.report.tabular import Table
from phalanx.show.lanes import draw_lanes, height_of_lanes
from phalanx.show.served_job import draw_roles, height_of_roles
from phalanx.show.shown import Frame, Lanes, ServedJob, Shown, Sketch, Strip
from phalanx.show.tables import sent_text

# In pixels.
WIDTH: Final = 960
MARGIN: Final = 16
GAP: Final = 26

LETTERS: Final = 140
"""Largest number of characters of a line of prose."""

BOX, CHANGED, ARROW = "#e8eef6", "#fbe3a2", "#b04a2f"

Part = Strip | Sketch | Table | Lanes | ServedJob | str


def draw(shown: Shown, path: Path) -> None:
    """Draw a topic into the SVG file `path`.

    Raises:
        OSError: the file cannot be written.
    """
    about = [*shown.about, *([f"in torch: {shown.in_torch}"] if shown.in_torch else [])]
    drawn = shown.parts
    if any(isinstance(part, Lanes) for part in drawn):  # the timelines show the same as the tables
        drawn = [part for part in drawn if not isinstance(part, Table)]
    parts: list[Part] = [shown.title, *about, *drawn]
    tops, top = list[float](), float(MARGIN)
    for part in parts:
        tops.append(top)
        top += _height(part)
    drawing = SvgDrawing(WIDTH, top + MARGIN)
    for number, (part, at) in enumerate(zip(parts, tops, strict=True)):
        _draw_part(drawing, part, at, is_title=number == 0)
    drawing.write(path)


def _height(part: Part) -> float:
    if isinstance(part, str):
        return ROW * len(textwrap.wrap(part, LETTERS)) + 4
    if isinstance(part, Table):
        return ROW * (len(part.rows) + 1 + bool(part.title)) + GAP
    if isinstance(part, Lanes):
        return height_of_lanes(part) + GAP
    if isinstance(part, ServedJob):
        return height_of_roles(part) + GAP
    if isinstance(part, Sketch):
        return ROW * (len(part.lines) + 1) + GAP
    layout = _Places(part)
    return 2 * layout.radius_y + layout.height + 3 * ROW + GAP


def _draw_part(drawing: SvgDrawing, part: Part, top: float, *, is_title: bool) -> None:
    if isinstance(part, str):
        lines = textwrap.wrap(part, LETTERS)
        texts = [(MARGIN, top + 12 + ROW * at, line) for at, line in enumerate(lines)]
        drawing.texts(texts, 14 if is_title else 11, weight="bold" if is_title else "normal")
    elif isinstance(part, Table):
        drawing.table(part, MARGIN, top)
    elif isinstance(part, Lanes):
        draw_lanes(drawing, part, MARGIN, top)
    elif isinstance(part, Sketch):
        drawing.texts([(MARGIN, top + 12, part.title)], weight="bold")
        lines = [(MARGIN, top + 12 + ROW * at, line) for at, line in enumerate(part.lines, 1)]
        drawing.texts(lines, 14, is_mono=True)  # in which vertical lines of rows meet
    elif isinstance(part, ServedJob):
        draw_roles(drawing, part, MARGIN, top)
    else:
        _draw_strip(drawing, part, top)


class _Places:
    """Positions of the ranks of a strip, in pixels.

    Attributes:
        width, height: size of the box of a rank.
        radius_x, radius_y: radii of the ellipse on which the centers of the boxes are.
    """

    def __init__(self, strip: Strip) -> None:
        cells = [row for frame in strip.frames for row in frame.cells]
        longest = max(
            len(_line(h, c)) for row in cells for h, c in zip(strip.heads, row, strict=True)
        )
        self.num_ranks = len(strip.frames[0].cells)
        self.width = max(90.0, LETTER * longest + 16)
        self.height = ROW * (len(strip.heads) + 1) + 8
        if self.num_ranks == 1:
            self.radius_x = self.radius_y = 0.0
        elif self.num_ranks == 2:
            self.radius_x, self.radius_y = self.width / 2 + 110, 0.0
        else:
            around = 1 / math.sin(math.pi / self.num_ranks)
            self.radius_y = max(80.0, (self.height + 48) / 2 * around)
            self.radius_x = min(
                WIDTH / 2 - self.width / 2 - MARGIN, max(170.0, (self.width + 130) / 2 * around)
            )

    def centre(self, rank: int, top: float) -> tuple[float, float]:
        """Return the center of the box of a rank; ranks are clockwise from the top left."""
        angle = math.pi * (2 * rank / self.num_ranks - 1)
        if self.num_ranks > 2:
            angle += math.pi / self.num_ranks
        x = WIDTH / 2 + self.radius_x * math.cos(angle)
        return x, top + self.height / 2 + self.radius_y * (1 + math.sin(angle))

    def arrow(
        self, source: int, target: int, top: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return an arrow between the edges of two boxes, shifted so that the reverse one fits."""
        (x, y), (u, v) = self.centre(source, top), self.centre(target, top)
        length = math.hypot(u - x, v - y)
        dx, dy = (u - x) / length, (v - y) / length
        x, y, u, v = x - 7 * dy, y + 7 * dx, u - 7 * dy, v + 7 * dx
        edge = min(
            (self.width / 2 + 3) / abs(dx) if dx else math.inf,
            (self.height / 2 + 3) / abs(dy) if dy else math.inf,
            length / 2 - 8,
        )
        return (x + edge * dx, y + edge * dy), (u - edge * dx, v - edge * dy)


def _draw_strip(drawing: SvgDrawing, strip: Strip, top: float) -> None:
    """Draw the steps of a strip in rotation: arrows, boxes over them, then labels over both."""
    layout = _Places(strip)
    if strip.title:
        drawing.texts([(MARGIN, top + 12, strip.title)], weight="bold")
    before: Frame | None = None
    for number, frame in enumerate(strip.frames):
        arrows = dict.fromkeys((sent.source, sent.target) for sent in frame.sent)
        with drawing.turn(number, len(strip.frames)):
            drawing.texts([(MARGIN, top + 12 + ROW, frame.title)])
            for source, target in arrows:
                drawing.arrow(*layout.arrow(source, target, top + 3 * ROW), ARROW)
            for rank, cells in enumerate(frame.cells):
                x, y = layout.centre(rank, top + 3 * ROW)
                left, up = x - layout.width / 2, y - layout.height / 2
                drawing.boxes([(left, up, layout.width, layout.height)], BOX)
                drawing.texts([(x, up + 14, f"rank {rank}")], 11, "middle", "bold")
                changed: list[Box] = [
                    (left + 4, up + 4 + ROW * at, layout.width - 8, ROW - 2)
                    for at, cell in enumerate(cells, 1)
                    if before is not None and before.cells[rank][at - 1] != cell
                ]
                if changed:
                    drawing.boxes(changed, CHANGED)
                lines = map(_line, strip.heads, cells)
                drawing.texts([(left + 8, up + 16 + ROW * at, s) for at, s in enumerate(lines, 1)])
            for source, target in arrows:
                alike = [s for s in frame.sent if (s.source, s.target) == (source, target)]
                what = sent_text(alike).rpartition(" to ")[0]
                text = f"{what}: {sum(sent.num_bytes for sent in alike):,} B"
                (x, y), (u, v) = layout.arrow(source, target, top + 3 * ROW)
                x, y, width = x + 0.38 * (u - x), y + 0.38 * (v - y) + 3, LETTER * 0.85 * len(text)
                drawing.boxes([(x - width / 2, y - 9, width, 12)], "#ffffff")
                drawing.texts([(x, y, text)], 9, "middle")
        before = frame


def _line(head: str, cell: str) -> str:
    return f"{head}: {cell}" if head else cell
