"""Draw timelines of a pipeline, one above the other, with a moving time cursor."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from phalanx.parallel.pipeline.schedule import Op
from phalanx.planner.stages import NAMES
from phalanx.report.svg import Box, SvgDrawing
from phalanx.show.shown import Lanes, Outcome
from phalanx.show.tables import figures_text

COLOURS: Final[dict[Op, str]] = {"F": "#9db8d9", "B": "#79b48a", "I": "#7fc4c9", "W": "#c3cc7a"}
"""Forwards are blue and backwards green, as papers draw them; later chunks are lighter."""
IDLE, LATER, CURSOR = "#eceef1", "#bec2c7", "#b04a2f"

LIGHTEST: Final = 0.6
"""Fraction of white in the color of the last chunk."""

# In pixels.
NAME, INNER, LANE, HEADING, AXIS = 114, 800, 22, 24, 26
LETTER = 6
"""Width for each digit; narrower boxes get no number."""
NUM_TICKS, NUM_POSITIONS = 6, 24


def height_of_lanes(lanes: Lanes) -> float:
    """Return the height of all timelines, pixels."""
    return 26 + len(lanes.outcomes) * (HEADING + LANE * len(lanes.schedule.orders) + AXIS)


def draw_lanes(drawing: SvgDrawing, lanes: Lanes, left: float, top: float) -> None:
    """Draw timelines with a common time scale, each with its figures above it."""
    schedule, outcomes = lanes.schedule, lanes.outcomes
    px_per_s = INNER / max(outcome.timeline.length for outcome in outcomes)
    panel = HEADING + LANE * len(schedule.orders) + AXIS
    ops = {action.op for order in schedule.orders for action in order}
    key = {NAMES[op]: colour for op, colour in COLOURS.items() if op in ops} | {"idle": IDLE}
    if len(schedule.stages_of(0)) > 1:
        key["later chunk"] = LATER
    drawing.key(key, left + NAME, top + 12)
    for number, outcome in enumerate(outcomes):
        _draw_outcome(drawing, lanes, outcome, (left + NAME, top + 26 + panel * number), px_per_s)
    begins = [left + NAME + INNER * at / NUM_POSITIONS for at in range(NUM_POSITIONS)]
    drawing.moving((begins[0], top + 26, 3, panel * len(outcomes) - AXIS), CURSOR, "x", begins)


def _draw_outcome(
    drawing: SvgDrawing,
    lanes: Lanes,
    outcome: Outcome,
    corner: tuple[float, float],
    px_per_s: float,
) -> None:
    """Draw the actions of each rank in colors, and the rest of the step as idle."""
    schedule, (left, top) = lanes.schedule, corner
    drawing.texts([(left, top + 16, figures_text(outcome))])
    boxes, numbers = defaultdict[str, list[Box]](list), list[tuple[float, float, str]]()
    length = px_per_s * outcome.timeline.length
    for rank, lane in enumerate(outcome.timeline.lanes):
        y, stages = top + HEADING + LANE * rank, schedule.stages_of(rank)
        name = f"rank {rank}, stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        drawing.texts([(left - 8, y + 15, name)], 10, "end")
        boxes[IDLE].append((left, y + 1, length, LANE - 2))
        for action, begin_s, end_s in lane:
            x, width = left + px_per_s * begin_s, px_per_s * (end_s - begin_s)
            white = LIGHTEST * stages.index(action.stage) / max(1, len(stages) - 1)
            colour = lighter(COLOURS[action.op], white)
            boxes[colour].append((x, y + 1, max(0, width - 1), LANE - 2))
            if width > LETTER * len(str(action.microbatch)):
                numbers.append((x + width / 2, y + 15, str(action.microbatch)))
    for colour, of_colour in boxes.items():
        drawing.boxes(of_colour, colour)
    drawing.texts(numbers, 9, "middle")
    longest_ms = 1e3 * INNER / px_per_s
    ticks = [longest_ms * tick / NUM_TICKS for tick in range(NUM_TICKS + 1)]
    marked = [(px_per_s * ms / 1e3, f"{ms:.0f}" + " ms" * (ms == 0)) for ms in ticks]
    drawing.below(left, top + HEADING + LANE * len(outcome.timeline.lanes) + 2, marked)


def lighter(colour: str, white: float) -> str:
    """Return a color, #rrggbb, mixed with the fraction `white` of white."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
