r"""Pictures of the memory of a rank over a step, from a record `memory` of metrics.jsonl.

MiB |- - - - - -/- -\- - - - - -  the predicted peak
    |    ______/     \____        one area for each kind, stacked
    +--- forward ---|- backward -|-- ms
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from phalanx.report.units import GIB, KIB, MIB, size_text

COLOURS: Final = {
    "parameters": "#3b6fb6",
    "gathered": "#73a9d8",
    "cast": "#5fb3b3",
    "gradients": "#e08a3c",
    "optimizer": "#8a6bc9",
    "communication": "#d1587f",
    "activations": "#43a56c",
    "other": "#949ba3",
}
"""Kind of memory -> color; each is legible on a light and on a dark page."""

_STYLE: Final = """
.memory text{fill:currentColor;font:11px system-ui,sans-serif}.memory .end{text-anchor:end}
.memory .mid{text-anchor:middle}.memory .line{stroke:currentColor;fill:none}
.memory .faint{stroke:currentColor;stroke-opacity:.2}.memory .dash{stroke-dasharray:5 4}
@media(prefers-color-scheme:dark){.memory:root{color:#ddd;background:#16181c}}
"""


def memory_text(record: Mapping[str, Any]) -> str:
    """Return the peak of a record `memory`, predicted and by kind, in one line."""
    held = {kind: of[record["peak"]] for kind, of in record["curve"]["bytes"].items()}
    kinds = [f"{kind} {size_text(num_bytes)}" for kind, num_bytes in held.items() if num_bytes]
    return f"{_peak(record)[0]}: {', '.join(kinds)}"


def memory_svg(record: Mapping[str, Any], width: int = 480, height: int = 300) -> str:
    """Return a record `memory` as an SVG element: a stacked area with the predicted peak as a line.

    The element is for a page, light or dark, or for a file of its own.
    """
    curve, peak, (words, predicted) = record["curve"], record["peak"], _peak(record)
    kinds = {kind: of for kind, of in curve["bytes"].items() if any(of)}
    times_ms, totals = (
        [1e3 * at_s for at_s in curve["at_s"]],
        [*map(sum, zip(*curve["bytes"].values(), strict=True))],
    )
    top, span_ms = 1.02 * max(1, *totals, predicted or 0), max(times_ms[-1], 1e-9)
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if top >= size)
    left, right, bottom = 46, width - 8, height - 74
    title = f"Memory of rank {record['rank']}, stage {record['stage']}, step {record['step']}"

    def x(at_ms: float) -> str:
        return f"{left + (right - left) * at_ms / span_ms:.5g}"

    def y(num_bytes: float) -> str:
        return f"{bottom - (bottom - 36) * num_bytes / top:.5g}"

    def text(words: str, at_x: object, at_y: object, anchor: str = "") -> str:
        return f'<text class="{anchor}" x="{at_x}" y="{at_y}">{words}</text>'

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="memory" role="img" width="100%" '
        f'viewBox="0 0 {width} {height}" style="max-width:{2 * width}px">'
        f"<title>{title}: {memory_text(record)}</title><style>{_STYLE}</style>",
        *(text(f"{title}, {unit}", 0, 11), text(words, right, 27, "end")),
        text("ms", right, bottom + 30, "end"),
        *(text(f"{value:g}", x(value), bottom + 30, "mid") for value in _ticks(span_ms)),
    ]
    for value in _ticks(top / size):
        drawn.append(f'<path class="faint" d="M{left} {y(value * size)}H{right}"/>')
        drawn.append(text(f"{value:g}", left - 4, y(value * size), "end"))
    below = [0] * len(totals)
    for number, (kind, of) in enumerate(kinds.items()):
        above = [lower + held for lower, held in zip(below, of, strict=True)]
        # Stairs: a point holds until the next one. There along the top, back along the bottom.
        ends = [x(at_ms) for at_ms in times_ms[1:]]
        there = "".join(f"V{y(a)}H{end}" for a, end in zip(above, ends, strict=False))
        back = "".join(f"H{end}V{y(b)}" for b, end in zip(below[-2::-1], ends[::-1], strict=True))
        colour = COLOURS.get(kind, COLOURS["other"])
        drawn.append(
            f'<path fill="{colour}" d="M{x(0)} {y(below[0])}{there}{back}H{x(0)}z"><title>{kind}: '
            f"{size_text(max(of))} at most, {size_text(of[peak])} at the peak</title></path>"
        )
        column, row = left + (right - left) // 4 * (number % 4), bottom + 48 + 16 * (number // 4)
        drawn.append(f'<rect x="{column}" y="{row - 9}" width="10" height="10" fill="{colour}"/>')
        drawn.append(text(kind, column + 14, row))
        below = above
    phases = [
        next(each)
        for _, each in groupby(zip(curve["phase"], times_ms, strict=True), lambda at: at[0])
    ]
    ends_ms = [*(begin_ms for _, begin_ms in phases[1:]), times_ms[-1]]
    for number, ((phase, begin_ms), end_ms) in enumerate(zip(phases, ends_ms, strict=True)):
        drawn.append(
            f'<path d="M{x(begin_ms)} {bottom + 2}H{x(end_ms)}v14H{x(begin_ms)}z" '
            f'fill="currentColor" fill-opacity="{0.16 if number % 2 else 0.06}">'
            f"<title>{phase}</title></path>"
        )
        if end_ms - begin_ms > span_ms / 10:
            drawn.append(text(phase, x((begin_ms + end_ms) / 2), bottom + 13, "mid"))
    if predicted is not None:
        drawn.append(f'<path class="line dash" d="M{left} {y(predicted)}H{right}"/>')
    at, most = x(times_ms[peak]), y(totals[peak])
    drawn.append(f'<path class="line" d="M{at} {bottom}V{most}"/>')
    drawn.append(f'<circle cx="{at}" cy="{most}" r="3" fill="currentColor"/>')
    return "\n".join([*drawn, "</svg>"])


def memory_pixels(record: Mapping[str, Any], width: int = 800, height: int = 400) -> NDArray[Any]:
    """Return the areas and the line of `memory_svg` without text; [height, width, RGB]."""
    curve, predicted = record["curve"], _peak(record)[1]
    held = np.array([*curve["bytes"].values()], float)  # [kinds, points]
    columns_s = np.linspace(0, curve["at_s"][-1], width)
    stacked = held[:, np.searchsorted(curve["at_s"], columns_s, "right") - 1].cumsum(0)
    top = 1.02 * max(1, held.sum(0).max(), predicted or 0)
    above_row = top * np.arange(height, 0, -1)[:, None] / height
    pixels = np.full((height, width, 3), 255, np.uint8)
    for kind, below in [*zip(curve["bytes"], stacked, strict=True)][::-1]:  # the lower over these
        pixels[above_row <= below] = [*bytes.fromhex(COLOURS.get(kind, COLOURS["other"])[1:])]
    if predicted is not None:
        pixels[int(height * (1 - predicted / top)), np.arange(width) % 12 < 8] = 0
    return pixels


def _peak(record: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the peak and the predicted peak of a record `memory` as text, and the latter."""
    curve, at, predicted = record["curve"], record["peak"], record.get("predicted")
    words = (
        f"peak {size_text(sum(of[at] for of in curve['bytes'].values()))} in {curve['phase'][at]}"
    )
    if predicted is None:
        return words, None
    num_bytes = sum(predicted["at_peak"].values())
    return f"{words}, predicted {size_text(num_bytes)}", num_bytes


def _ticks(end: float) -> Iterator[float]:
    """Yield round numbers from 0 to `end`, at most seven."""
    step = 10.0 ** (len(f"{end:.0f}") - 1) if end >= 1 else 0.1
    step *= next((each for each in (0.2, 0.5, 1, 2) if end / (step * each) <= 6), 5)
    yield from (step * number for number in range(int(end / step) + 1))
