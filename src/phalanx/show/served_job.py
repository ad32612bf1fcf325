"""Draw the processes of a job with parameter servers, and which sockets have connected."""

from __future__ import annotations

from typing import Final

from phalanx.report.svg import ROW, Box, SvgDrawing
from phalanx.show.shown import ServedJob

# In pixels.
PANEL, BETWEEN, WIDEST = 452, 24, 130
GAP: Final = 50
"""Height between two rows of boxes, where their connections are."""

FRAME, BOX = "#f4f1e8", "#e8eef6"
COLOURS: Final = {
    "push, pull": "#b04a2f",
    "tasks": "#3f6fb0",
    "copies": "#79b48a",
    "map": "#c9ced4",
}
"""What a connection carries -> its color."""


def height_of_roles(roles: ServedJob) -> float:
    """Return the height of the panels, pixels."""
    workers = ROW * (2 + max(len(each) for of in roles.tasks.values() for each in of.values()))
    return 2 * ROW + 3 * (2 * ROW + 6) + workers + 3 * GAP + 16


def draw_roles(drawing: SvgDrawing, roles: ServedJob, left: float, top: float) -> None:
    """Draw a panel for each consistency beside each other, with the same connections."""
    drawing.texts([(left, top + 12, roles.title)], weight="bold")
    drawing.key(COLOURS, left + PANEL + BETWEEN, top + 12)
    for number, name in enumerate(roles.tasks):
        _draw_panel(drawing, roles, name, left + number * (PANEL + BETWEEN), top + ROW)


def _draw_panel(drawing: SvgDrawing, roles: ServedJob, name: str, left: float, top: float) -> None:
    tasks = roles.tasks[name]
    drawing.texts([(left, top + 14, name)])
    servers = [each for each in roles.shapes if each.startswith("server")]
    workers = [each for group in roles.groups for each in group[1:]]
    boxes, up = dict[str, Box](), top + ROW + 6
    for row in (["coordinator"], servers, workers):
        height = ROW * (2 + max(len(tasks.get(each, ())) for each in row)) + 6
        room = PANEL / len(row)
        width = min(room - 8, WIDEST)
        for at, each in enumerate(row):
            boxes[each] = (left + room * (at + 0.5) - width / 2, up, width, height)
        up += height + GAP
    for scheduler, *of_group in roles.groups:
        (x, y, *_), (last, _, width, _) = boxes[of_group[0]], boxes[of_group[-1]]
        span, height = last + width - x, 2 * ROW + 6
        drawing.boxes([(x - 3, y - 5, span + 6, up + height - y + 10)], FRAME)
        width = min(span, WIDEST)
        boxes[scheduler] = (x + (span - width) / 2, up, width, height)
    # Who carries what: the map under all else, then copies, tasks, and weights with moving dots.
    for what in reversed(COLOURS):
        for process, peers in roles.connected.items():
            for peer in peers:
                if _carried(process, peer) == what:
                    _connect(drawing, boxes[process], boxes[peer], what)
    for each, (x, y, width, height) in boxes.items():
        drawing.boxes([(x, y, width, height)], BOX)
        middle = x + width / 2
        drawing.texts([(middle, y + 14, each)], 11, "middle", "bold")
        lines = [roles.shapes[each], *tasks.get(each, ())]
        texts = [(middle, y + 14 + ROW * at, line) for at, line in enumerate(lines, 1)]
        drawing.texts(texts, 10, "middle")


def _carried(process: str, peer: str) -> str:
    """Return what a connection carries, as named in `COLOURS`."""
    if peer == "coordinator":
        return "map"
    if peer.startswith("scheduler"):
        return "tasks"
    return "copies" if process.startswith("server") else "push, pull"


def _connect(drawing: SvgDrawing, begin: Box, end: Box, what: str) -> None:
    """Connect the edges of two boxes that face each other."""
    (x, y, width, height), (u, v, other_width, other_height) = begin, end
    if y == v:  # two servers: each has a line of its own
        from_left = x < u
        at = y + height * (0.35 if from_left else 0.65)
        ends = (x + width * from_left, at), (u + other_width * (not from_left), at)
    else:
        is_down = y < v
        ends = (
            (x + width / 2, y + height * is_down),
            (u + other_width / 2, v + other_height * (not is_down)),
        )
    if what == "map":
        drawing.line(*ends, COLOURS[what])
    else:
        drawing.arrow(*ends, COLOURS[what])
