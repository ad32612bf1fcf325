"""Draw timelines of a pipeline, one above the other. Needs matplotlib, the `plot` extra."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.measure.utilization import percent
from phalanx.parallel.pipeline.schedule import Action, Op, Schedule
from timeline import MEANINGS, Outcome, stages_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final[dict[Op, str]] = {"F": "#2f6db5", "B": "#2e8b4f", "I": "#1a9aa0", "W": "#7d9c22"}
"""Forwards are blue and backwards green, as papers draw them; those of later chunks lighter."""
IDLE: Final = "#e6e6e6"
LIGHTEST = 0.6
"""Share of white in the colour of the last chunk."""

# In inches.
LEFT, RIGHT, ABOVE, BETWEEN, BELOW = 0.95, 0.3, 0.65, 0.4, 1.05
LINE = 0.19
LANE = 0.36
BOX = 0.2
"""Width of the shortest action, where the picture does not become too wide or narrow."""
NARROWEST, WIDEST = 8.0, 22.0
LABEL_POINTS = 6.5
CHARACTER = 0.62 * LABEL_POINTS / 72
"""Width of a digit, about."""


def draw_outcomes(schedule: Schedule, outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw timelines over the same time; legend and figures stand below."""
    # Not pyplot: it keeps every figure in a global register.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spans = [span for outcome in outcomes for lane in outcome.timeline.lanes for span in lane]
    longest_s = max(span.end for span in spans)
    shortest_s = min(end - begin for _, begin, end in spans if end > begin)
    inner = min(max(NARROWEST, BOX * longest_s / shortest_s), WIDEST)
    panel = LANE * len(schedule.orders)
    width = LEFT + inner + RIGHT
    height = ABOVE + len(outcomes) * (panel + BETWEEN) - BETWEEN + BELOW
    # Few families, since each text names them. A fixed salt and no date: the same timelines give
    # the same file.
    with rc_context(
        {"font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "phalanx", "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        figure.text(LEFT / width, 1 - 0.28 / height, title, fontsize=10, weight="bold")
        for number, outcome in enumerate(outcomes):
            bottom = height - ABOVE - panel - number * (panel + BETWEEN)
            axes = figure.add_axes((LEFT / width, bottom / height, inner / width, panel / height))
            axes.set_xlim(0, 1e3 * longest_s)
            axes.set_title(outcome.name, loc="left", fontsize=9, pad=4)
            _draw_lanes(axes, schedule, outcome, inner / longest_s)
            if outcome is outcomes[-1]:
                axes.set_xlabel("ms", fontsize=8, labelpad=1)
            else:
                axes.set_xticklabels([])
        _draw_legend(figure, schedule, LEFT / width, 0.6 / height)
        for line, outcome in enumerate(outcomes):
            place = (0.1 + LINE * (len(outcomes) - 1 - line)) / height
            figure.text(LEFT / width, place, _figures_text(outcome), fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)


def _figures_text(outcome: Outcome) -> str:
    numbers = ", ".join(f"{number:.3g}" for number in outcome.in_flight)
    return (
        f"{outcome.name}: step {1e3 * outcome.timeline.length:.1f} ms, bubble "
        f"{percent(outcome.timeline.bubble)}, highest MFU {percent(outcome.highest_mfu)}, most "
        f"microbatches in flight on each rank: {numbers}"
    )


def _draw_legend(figure: Figure, schedule: Schedule, left: float, middle: float) -> None:
    from matplotlib.patches import Patch

    ops = {action.op for order in schedule.orders for action in order}
    patches = [
        Patch(color=colour, label=f"{op}  {MEANINGS[op]}")
        for op, colour in COLOURS.items()
        if op in ops
    ]
    patches.append(Patch(color=IDLE, label="idle"))
    if len(schedule.stages_of(0)) > 1:
        patches.append(Patch(color=lighter("#444444", LIGHTEST), label="lighter: later stage"))
    figure.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=(left, middle),
        borderaxespad=0,
        borderpad=0,
        ncols=len(patches),
        frameon=False,
        fontsize=8,
        handlelength=1,
        columnspacing=1.5,
    )


def _draw_lanes(axes: Axes, schedule: Schedule, outcome: Outcome, inches_per_s: float) -> None:
    """Draw what each rank does in colours, and what is left of the step as idle."""
    num_ranks = len(schedule.orders)
    for rank, lane in enumerate(outcome.timeline.lanes):
        boxes: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        boxes[IDLE].append((0, 1e3 * outcome.timeline.length))
        for action, begin, end in lane:
            if end == begin:
                continue
            chunk = schedule.stages_of(rank).index(action.stage)
            colour = lighter(COLOURS[action.op], LIGHTEST * chunk / max(1, outcome.chunks - 1))
            boxes[colour].append((1e3 * begin, 1e3 * (end - begin)))
            axes.text(
                500 * (begin + end),
                rank,
                _label(action, outcome.chunks, inches_per_s * (end - begin)),
                ha="center",
                va="center",
                fontsize=LABEL_POINTS,
                color="white" if chunk == 0 else "black",
                linespacing=0.95,
            )
        for colour, of_colour in boxes.items():
            place = (rank - 0.44, 0.88)
            axes.broken_barh(of_colour, place, facecolor=colour, edgecolor="white", linewidth=0.4)
    names = [f"rank {rank}\n{stages_text(schedule, rank)}" for rank in range(num_ranks)]
    axes.set_yticks(range(num_ranks), names, fontsize=7)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(action: Action, chunks: int, inches: float) -> str:
    """Return what fits into a box: the microbatch, its action, and the stage of several."""
    number, stage = str(action.microbatch), f"s{action.stage}"
    fitting = [
        word
        for word in (f"{action.op}{number}", number, "")
        if not word or (len(word) + 0.3) * CHARACTER <= inches
    ]
    if chunks > 1 and fitting[0] and (len(stage) + 0.3) * CHARACTER <= inches:
        return f"{fitting[0]}\n{stage}"
    return fitting[0]


def lighter(colour: str, share: float) -> str:
    """Return a colour, #rrggbb, of which a share is white."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
