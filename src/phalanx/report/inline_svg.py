r"""Charts of a page as inline SVG, drawn without a library: curves, stacked areas and time lanes.

title                      ____ series, one color each, which the style sheet of the page gives
y, unit  |      ____
         |  ___/    \___   |  a mark at one x
         +----------------- x, unit
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, Final

WIDTH: Final = 640
HEIGHT: Final = 250
LEFT: Final = 62
TOP: Final = 12
BOTTOM: Final = 44
LANE: Final = 15
"""Pixels of a chart in its own coordinates; the page scales it."""

COLORS: Final = (
    *(("#1f5a99", "#6ea8e6"), ("#c2572f", "#ee8b62"), ("#3b7d4f", "#74bd88")),
    *(("#8a5aa8", "#bd94da"), ("#b8901c", "#dfba52"), ("#2a8c95", "#62c3cc")),
    *(("#b04a7a", "#e388b1"), ("#7b8794", "#95a1ae")),
)
"""Colors of series, in their order, on a light page and on a dark one."""


@dataclass(frozen=True)
class Chart:
    """Values over x: lines, or areas on top of each other.

    Attributes:
        title: text above the drawing.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        series: name -> points (x, y).
        scale: sizes of the units of x and y, by which points are divided.
        is_stacked: whether series are areas on top of each other; they have the same x, from each
            of which their value holds until the next.
        peak_at: x of a vertical line; None for none.
        planned: y of a horizontal line; None for none.
    """

    title: str
    x: str
    y: str
    series: dict[str, list[list[float]]]
    scale: tuple[float, float] = (1, 1)
    is_stacked: bool = False
    peak_at: float | None = None
    planned: float | None = None

    def svg(self, place: str) -> str:
        """Return the chart with its legend, as HTML; it is at `place` in the JSON document."""
        curves = dict(self.series)
        if self.is_stacked:
            columns = zip(*([y for _, y in points] for points in curves.values()), strict=True)
            sums = [[*accumulate(column)] for column in columns]
            for at, (name, points) in enumerate(curves.items()):
                curves[name] = [[x, ys[at]] for (x, _), ys in zip(points, sums, strict=True)]
        xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
        high = 1.12 * max(*ys, self.planned or 0) if self.is_stacked else max(ys)
        across = _Axis(min(xs), max(xs), LEFT, WIDTH - 12, self.scale[0])
        up = _Axis(0.0 if self.is_stacked else min(ys), high, HEIGHT - BOTTOM, TOP, self.scale[1])
        lines = [*_x_axis(across, HEIGHT - BOTTOM, self.x), *_y_axis(up, self.y)]
        drawn = list[str]()
        for number, (name, points) in enumerate(curves.items()):
            pixels = [(f"{across(x):.1f}", f"{up(y):.1f}") for x, y in points]
            kind, path = "line", "L".join(" ".join(each) for each in pixels)
            # Equal curves are all seen: an earlier one is wider than those that cover it.
            style = f' style="stroke-width:{1.6 * (len(curves) - number):g}"'
            if self.is_stacked:  # drawn down to zero, and those below over it
                steps = "".join(f"H{x}V{y}" for x, y in pixels[1:])
                kind, style = "area", ""
                path = f"{pixels[0][0]} {up(0):.1f}V{pixels[0][1]}{steps}V{up(0):.1f}z"
            drawn.append(
                f'<path class="{kind} c{number % len(COLORS)}"{style} d="M{path}" '
                f'data-points="{escape(f"{place}/series/{name}")}"/>'
            )
        lines += reversed(drawn) if self.is_stacked else drawn
        if self.peak_at is not None:
            at = across(self.peak_at)
            lines.append(f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            lines.append(_text(at, TOP + 9, "peak", "over", "middle"))
        if self.planned is not None:
            at = up(self.planned)
            lines.append(f'<path class="mark" d="M{LEFT} {at:.1f}H{WIDTH - 12}"/>')
            lines.append(_text(LEFT + 6, at - 5, "predicted peak", "over", "start"))
        return _figure(self.title, f"{self.y} over {self.x}", HEIGHT, lines, [*curves])


@dataclass(frozen=True)
class SpanLanes:
    """Spans of time in lanes, one below another.

    Attributes:
        title: text above the drawing.
        lanes: name -> spans (begin in s, end in s, kind).
        kinds: kinds in the order of their colors.
    """

    title: str
    lanes: dict[str, list[list[Any]]]
    kinds: Sequence[str]

    def svg(self, place: str) -> str:
        """Return the lanes with their legend, as HTML; they are at `place` in the document."""
        spans = [span for lane in self.lanes.values() for span in lane]
        left, bottom = 12 + 7 * max(map(len, self.lanes)), TOP + LANE * len(self.lanes) + 4
        first, last = min(span[0] for span in spans), max(span[1] for span in spans)
        across = _Axis(first, last, left, WIDTH - 12, 1e-3)
        lines = [*_x_axis(across, bottom, "time in the step, ms")]
        for row, (name, lane) in enumerate(self.lanes.items()):
            top = TOP + LANE * row
            lines.append(_text(left - 6, top + 10, name, "", "end"))
            for number, kind in enumerate(self.kinds):
                own = [(across(begin), across(end)) for begin, end, each in lane if each == kind]
                boxes = (f"M{x:.1f} {top}H{to:.1f}v{LANE - 3}H{x:.1f}z" for x, to in own)
                if own:
                    color = f'class="box c{number % len(COLORS)}"'
                    lines.append(f'<path {color} d="{"".join(boxes)}"/>')
        about = f"spans by lane, at {place} of the JSON document"
        return _figure(self.title, about, bottom + BOTTOM, lines, self.kinds)


@dataclass(frozen=True)
class HeatMap:
    """Rows of cells, whose values are factors of a mean: colored below it and above it.

    Attributes:
        title: text above the drawing.
        x: label of the columns.
        y: label of the rows.
        rows: name -> value of each cell.
        group: number of columns in the data that each cell stands for.
    """

    title: str
    x: str
    y: str
    rows: dict[str, list[float]]
    group: int = 1

    def svg(self, place: str) -> str:
        """Return the map with its legend, as HTML; it is at `place` in the JSON document."""
        num_columns = len(next(iter(self.rows.values())))
        lane = max(6, min(LANE, 400 // len(self.rows)))
        width, bottom = (WIDTH - 12 - LEFT) / num_columns, TOP + lane * len(self.rows)
        across = _Axis(0, num_columns * self.group, LEFT, WIDTH - 12, 1)
        lines = [*_x_axis(across, bottom + 4, self.x)]
        boxes = dict[tuple[int, float], str]()
        every = -(-12 // lane)  # rows a name
        for row, (name, values) in enumerate(self.rows.items()):
            top = TOP + lane * row
            if row % every == 0:
                lines.append(_text(LEFT - 6, top + lane / 2 + 4, name, "tick", "end"))
            for column, value in enumerate(values):
                # log2 of the factor in quarters, of at most 2: 1/4 and 4 have the full color.
                share = min(8, round(4 * abs(math.log2(value)))) / 8 if value > 0 else 1.0
                x, color = LEFT + column * width, (int(value > 1), share)
                box = f"M{x:.1f} {top}h{max(1, width - 1):.1f}v{lane - 1}H{x:.1f}z"
                boxes[color] = boxes.get(color, "") + box
        for (number, share), path in sorted(boxes.items()):
            opacity = f"{max(0.06, share):.2f}"
            lines.append(f'<path class="box c{number}" style="opacity:{opacity}" d="{path}"/>')
        turned = f"translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)"
        lines.append(f'<g transform="{turned}">{_text(0, 0, self.y, "", "middle")}</g>')
        names = ("below the mean, full at 1/4 and less", "above the mean, full at 4 and more")
        return _figure(self.title, f"{self.y} by {self.x}", bottom + BOTTOM + 4, lines, names)


class _Axis:
    """A linear map from values to pixels; its labels are in a unit of the size `scale`."""

    def __init__(self, low: float, high: float, begin: float, end: float, scale: float) -> None:
        around = 0.0 if high > low else abs(low) / 10 or 1.0
        self.low, self.high, self.scale = low - around, high + around, scale
        self.begin, self.end = begin, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield (pixel, label) at about six round values."""
        low, high = self.low / self.scale, self.high / self.scale
        size = 10.0 ** math.floor(math.log10((high - low) / 6))
        step = size * next(each for each in (1, 2, 5, 10) if each * size >= (high - low) / 6)
        for number in range(math.ceil(low / step), math.floor(high / step) + 1):
            yield self(number * step * self.scale), f"{round(number * step, 10):,.10g}"


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    place = f'class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _x_axis(axis: _Axis, top: float, label: str) -> Iterator[str]:
    yield f'<path class="axis" d="M{axis.begin} {top}H{axis.end}"/>'
    for at, text in axis.ticks():
        yield f'<path class="axis" d="M{at:.1f} {top}v4"/>'
        yield _text(at, top + 16, text, "tick", "middle")
    yield _text((axis.begin + axis.end) / 2, top + 34, label, "", "middle")


def _y_axis(axis: _Axis, label: str) -> Iterator[str]:
    for at, text in axis.ticks():
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - 12}"/>'
        yield _text(LEFT - 6, at + 4, text, "tick", "end")
    turned = f"translate(14 {(axis.begin + axis.end) / 2:.0f}) rotate(-90)"
    yield f'<g transform="{turned}">{_text(0, 0, label, "", "middle")}</g>'


def _figure(title: str, about: str, height: float, lines: list[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><i class="c{number % len(COLORS)}"></i>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    label = escape(f"{title}: {about}")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{label}"><title>{label}</title>{"".join(lines)}</svg></div></figure>'
    )
