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
from typing import Any, Final

WIDTH: Final = 640
HEIGHT: Final = 250
LEFT: Final = 62
TOP: Final = 12
BOTTOM: Final = 44
LANE: Final = 15
"""Pixels of a chart in its own coordinates; the page scales it."""

NUM_COLORS: Final = 8


@dataclass(frozen=True)
class Chart:
    """Values over x: lines, or areas on top of each other.

    Attributes:
        title: text above the drawing.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        series: name -> points (x, y), in units of the axes times the scale.
        scale: size of the unit of x and of y: points are divided by it.
        is_stacked: whether series are areas on top of each other; they have the same x.
        marks: x -> text of a vertical line.
        levels: y -> text of a horizontal line.
        keys: name -> place of the points in the JSON document.
    """

    title: str
    x: str
    y: str
    series: dict[str, Sequence[Sequence[float]]]
    scale: tuple[float, float] = (1, 1)
    is_stacked: bool = False
    marks: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[float, str]] = ()
    keys: dict[str, str] | None = None

    def svg(self) -> str:
        """Return the chart with its legend, as HTML."""
        scaled = {
            name: [(x / self.scale[0], y / self.scale[1]) for x, y in points]
            for name, points in self.series.items()
        }
        bottoms = dict[str, list[tuple[float, float]]]()
        if self.is_stacked:
            base = [(x, 0.0) for x, _ in next(iter(scaled.values()))]
            for name, points in scaled.items():
                bottoms[name] = base
                base = [(x, y + z) for (x, y), (_, z) in zip(points, base, strict=True)]
                scaled[name] = base
        xs = [x for points in scaled.values() for x, _ in points]
        ys = [y for points in scaled.values() for _, y in points if math.isfinite(y)] or [0.0]
        ys += [y / self.scale[1] for y, _ in self.levels]
        low, high = (0.0, 1.12 * max(ys)) if self.is_stacked else (min(ys), max(ys))
        x_of, y_of = _Axis(min(xs), max(xs), LEFT, WIDTH - 12), _Axis(
            low, high, HEIGHT - BOTTOM, TOP
        )  # fmt: skip
        lines = [*_x_axis(x_of, HEIGHT - BOTTOM, self.x), *_y_axis(y_of, self.y)]
        for number, (name, points) in enumerate(scaled.items()):
            drawn = [f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in points if math.isfinite(y)]
            path, kind = "M" + "L".join(drawn), "line"
            if self.is_stacked:
                kind = "area"
                path += "L" + "L".join(
                    f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in reversed(bottoms[name])
                )
            elif len(points) <= 40:
                path += "".join(f"M{each}h.01" for each in drawn)
            key = f' data-points="{escape((self.keys or {}).get(name, ""))}"'
            # Equal curves are all seen: an earlier one is wider than those that cover it.
            width = f' style="stroke-width:{1.6 + 1.6 * (len(scaled) - 1 - number):g}"'
            style = "" if self.is_stacked else width
            lines.append(f'<path class="{kind} c{number % NUM_COLORS}"{key}{style} d="{path}"/>')
        for x, text in self.marks:
            at = x_of(x / self.scale[0])
            side = "end" if at > WIDTH / 2 else "start"
            lines.append(
                f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
                f'<text class="over" x="{at + (-5 if side == "end" else 5):.1f}" y="{TOP + 11}" '
                f'text-anchor="{side}">{escape(text)}</text>'
            )
        for y, text in self.levels:
            at = y_of(y / self.scale[1])
            lines.append(
                f'<path class="mark" d="M{LEFT} {at:.1f}H{WIDTH - 12}"/><text class="over" '
                f'x="{LEFT + 6}" y="{at - 5:.1f}">{escape(text)}</text>'
            )
        return _figure(self.title, f"{self.y} over {self.x}", HEIGHT, lines, [*scaled])


@dataclass(frozen=True)
class SpanLanes:
    """Spans of time in lanes, one below another.

    Attributes:
        title: text above the drawing.
        lanes: name -> spans (begin in s, end in s, kind).
        kinds: kinds in the order of their colors.
    """

    title: str
    lanes: dict[str, Sequence[Sequence[Any]]]
    kinds: Sequence[str]

    def svg(self) -> str:
        """Return the lanes with their legend, as HTML."""
        spans = [span for lane in self.lanes.values() for span in lane]
        left = 12 + 7 * max(map(len, self.lanes))
        bottom = TOP + LANE * len(self.lanes) + 4
        x_of = _Axis(
            1e3 * min(span[0] for span in spans), 1e3 * max(span[1] for span in spans),
            left, WIDTH - 12,
        )  # fmt: skip
        lines = [*_x_axis(x_of, bottom, "time in the step, ms")]
        for row, (name, lane) in enumerate(self.lanes.items()):
            top = TOP + LANE * row
            lines.append(f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{name}</text>')
            for number, kind in enumerate(self.kinds):
                boxes = "".join(
                    f"M{x_of(1e3 * begin):.1f} {top}h{x_of(1e3 * end) - x_of(1e3 * begin):.1f}"
                    f"v{LANE - 3}H{x_of(1e3 * begin):.1f}z"
                    for begin, end, each in lane
                    if each == kind
                )
                if boxes:
                    lines.append(f'<path class="box c{number % NUM_COLORS}" d="{boxes}"/>')
        return _figure(self.title, "a lane a rank over time", bottom + BOTTOM, lines, self.kinds)


class _Axis:
    """A linear map from values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        around = 0.0 if high > low else abs(low) / 10 or 1.0
        self.low, self.high = low - around, high + around
        self.begin, self.end = begin, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, count: int = 6) -> Iterator[tuple[float, str]]:
        """Yield (pixel, label) at about `count` round values."""
        raw = (self.high - self.low) / count
        size = 10.0 ** math.floor(math.log10(raw))
        step = size * next(each for each in (1, 2, 5, 10) if each * size >= raw)
        for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            yield self(number * step), f"{round(number * step, 10):,.10g}"


def _x_axis(axis: _Axis, top: float, label: str) -> Iterator[str]:
    yield f'<path class="axis" d="M{axis.begin} {top}H{axis.end}"/>'
    for at, text in axis.ticks():
        yield f'<path class="axis" d="M{at:.1f} {top}v4"/>'
        yield f'<text class="tick" x="{at:.1f}" y="{top + 16}" text-anchor="middle">{text}</text>'
    middle = (axis.begin + axis.end) / 2
    yield f'<text x="{middle:.0f}" y="{top + 34}" text-anchor="middle">{escape(label)}</text>'


def _y_axis(axis: _Axis, label: str) -> Iterator[str]:
    for at, text in axis.ticks(5):
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - 12}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    middle = (axis.begin + axis.end) / 2
    yield (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(label)}</text>"
    )


def _figure(title: str, about: str, height: float, lines: list[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><i class="c{number % NUM_COLORS}"></i>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    label = escape(f"{title}: {about}")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{label}"><title>{label}</title>{"".join(lines)}</svg></div></figure>'
    )
