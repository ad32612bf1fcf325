"""Draw timelines of a pipeline, one above the other."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from drawing import Box, Drawing
from phalanx.measure.utilization import percent
from phalanx.parallel.pipeline.schedule import Op, Schedule
from timeline import MEANINGS, Outcome, stages_text

COLOURS: Final[dict[Op, str]] = {"F": "#9db8d9", "B": "#79b48a", "I": "#7fc4c9", "W": "#c3cc7a"}
"""Forwards are blue and backwards green, as papers draw them; those of later chunks lighter."""
IDLE: Final = "#eceef1"
LIGHTEST = 0.6
"""Share of white in the colour of the last chunk."""

# In pixels.
LEFT, INNER, LANE, HEADING, AXIS = 130, 800, 22, 24, 26
LETTER = 6
"""A box without so much room for each digit has no number."""
NUM_TICKS = 6


def draw_outcomes(schedule: Schedule, outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw timelines over the same time, each with its figures above."""
    px_per_s = INNER / max(outcome.timeline.length for outcome in outcomes)
    panel = HEADING + LANE * len(schedule.orders) + AXIS
    drawing = Drawing(LEFT + INNER + 30, 50 + panel * len(outcomes) + 10)
    drawing.texts([(10, 20, title)], 13, weight="bold")
    ops = {action.op for order in schedule.orders for action in order}
    meanings = {MEANINGS[op]: colour for op, colour in COLOURS.items() if op in ops}
    later = {"of a later chunk": lighter("#5b6470", LIGHTEST)}
    key = meanings | {"idle": IDLE} | (later if len(schedule.stages_of(0)) > 1 else {})
    drawing.key(key, LEFT, 42)
    for number, outcome in enumerate(outcomes):
        _draw_lanes(drawing, schedule, outcome, 50 + panel * number, px_per_s)
    drawing.write(path)


def _draw_lanes(
    drawing: Drawing, schedule: Schedule, outcome: Outcome, top: float, px_per_s: float
) -> None:
    """Draw what each rank does in colours, and what is left of the step as idle."""
    drawing.texts([(LEFT, top + 16, _figures_text(outcome))])
    boxes, numbers = defaultdict[str, list[Box]](list), list[tuple[float, float, str]]()
    length = px_per_s * outcome.timeline.length
    for rank, lane in enumerate(outcome.timeline.lanes):
        y = top + HEADING + LANE * rank
        drawing.texts(
            [(LEFT - 8, y + 15, f"rank {rank}, {stages_text(schedule, rank)}")], 10, "end"
        )
        boxes[IDLE].append((LEFT, y + 1, length, LANE - 2))
        for action, begin_s, end_s in lane:
            x, width = LEFT + px_per_s * begin_s, px_per_s * (end_s - begin_s)
            chunk = schedule.stages_of(rank).index(action.stage)
            share = LIGHTEST * chunk / max(1, outcome.chunks - 1)
            boxes[lighter(COLOURS[action.op], share)].append(
                (x, y + 1, max(0, width - 1), LANE - 2)
            )
            if width > LETTER * len(str(action.microbatch)):
                numbers.append((x + width / 2, y + 15, str(action.microbatch)))
    for colour, of_colour in boxes.items():
        drawing.boxes(of_colour, colour)
    drawing.texts(numbers, 9, "middle")
    longest_ms = 1e3 * INNER / px_per_s
    ticks = [longest_ms * tick / NUM_TICKS for tick in range(NUM_TICKS + 1)]
    marked = [(px_per_s * ms / 1e3, f"{ms:.0f}" + " ms" * (ms == 0)) for ms in ticks]
    drawing.below(LEFT, top + HEADING + LANE * len(outcome.timeline.lanes) + 2, marked)


def _figures_text(outcome: Outcome) -> str:
    numbers = ", ".join(f"{number:.3g}" for number in outcome.in_flight)
    return (
        f"{outcome.name}: step {1e3 * outcome.timeline.length:.1f} ms, bubble "
        f"{percent(outcome.timeline.bubble)}, highest MFU {percent(outcome.highest_mfu)}; most "
        f"microbatches in flight on each rank: {numbers}"
    )


def lighter(colour: str, share: float) -> str:
    """Return a colour, #rrggbb, of which a share is white."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
