r"""Pictures of the records of a run: the memory of a rank over a step, from a record `memory`.

MiB |            ___ peak 241 MiB in backward
200 |- - - - - -/- -\- - - - - - predicted
    |    ______/     \____           one area for each kind, stacked
    |___/ activations     \___
    |      parameters
    +--- forward ---|- backward -|-- ms
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

import numpy as np

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
    at = record["peak"]
    held = {kind: of[at] for kind, of in record["curve"]["bytes"].items() if of[at]}
    kinds = ", ".join(f"{kind} {size_text(num_bytes)}" for kind, num_bytes in held.items())
    return f"{_peak_text(record)}{_predicted_text(record)}: {kinds}"


def memory_svg(record: Mapping[str, Any], width: int = 480, height: int = 300) -> str:
    """Return a record `memory` as an SVG element: a stacked area with the predicted peak as a line.

    The element is for a page, light or dark, or for a file of its own.
    """
    curve, peak, predicted = record["curve"], record["peak"], _predicted_bytes(record)
    kinds = {kind: of for kind, of in curve["bytes"].items() if any(of)}
    times_ms = [1e3 * at_s for at_s in curve["at_s"]]
    totals = [sum(row) for row in zip(*curve["bytes"].values(), strict=True)]
    top = max(1, *totals, predicted or 0) * 1.02
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if top >= size)
    left, bottom, right = 46, height - 74, width - 8
    span_ms = max(times_ms[-1], 1e-9)

    def x(at_ms: float) -> str:
        return f"{left + (right - left) * at_ms / span_ms:.5g}"

    def y(num_bytes: float) -> str:
        return f"{bottom - (bottom - 36) * num_bytes / top:.5g}"

    title = f"Memory of rank {record['rank']}, stage {record['stage']}, step {record['step']}"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="memory" role="img" width="100%" '
        f'viewBox="0 0 {width} {height}" style="max-width:{2 * width}px">'
        f"<title>{title}: {escape(memory_text(record))}</title><style>{_STYLE}</style>"
        f'<text x="0" y="11">{title}, {unit}</text>'
    ]
    for value in _ticks(top / size):
        at = y(value * size)
        drawn.append(f'<path class="faint" d="M{left} {at}H{right}"/>')
        drawn.append(f'<text class="end" x="{left - 4}" y="{at}" dy="4">{value:g}</text>')
    below = [0] * len(totals)
    for kind, of in kinds.items():
        above = [lower + held for lower, held in zip(below, of, strict=True)]
        # Stairs: a point holds until the next one. There along the top, back along the bottom.
        there = "".join(f"V{y(a)}H{x(t)}" for a, t in zip(above, times_ms[1:], strict=False))
        back = "".join(
            f"H{x(t)}V{y(b)}" for b, t in zip(below[-2::-1], times_ms[1:][::-1], strict=False)
        )
        drawn.append(
            f'<path fill="{COLOURS.get(kind, COLOURS["other"])}" '
            f'd="M{x(0)} {y(below[0])}{there}{back}H{x(0)}z"><title>{kind}: '
            f"{size_text(max(of))} at most, {size_text(of[peak])} at the peak</title></path>"
        )
        below = above
    for value in _ticks(span_ms):
        drawn.append(f'<text class="mid" x="{x(value)}" y="{bottom + 30}">{value:g}</text>')
    drawn.append(f'<text class="end" x="{right}" y="{bottom + 30}">ms</text>')
    for number, (phase, begin_ms, end_ms) in enumerate(_phases(curve["phase"], times_ms)):
        middle, is_wide = (begin_ms + end_ms) / 2, end_ms - begin_ms > span_ms / 10
        drawn.append(
            f'<rect x="{x(begin_ms)}" y="{bottom + 2}" height="14" fill="currentColor" '
            f'width="{(right - left) * (end_ms - begin_ms) / span_ms:.4g}" '
            f'fill-opacity="{0.16 if number % 2 else 0.06}"><title>{phase}</title></rect>'
        )
        if is_wide:
            drawn.append(f'<text class="mid" x="{x(middle)}" y="{bottom + 13}">{phase}</text>')
    if predicted is not None:
        drawn.append(f'<path class="line dash" d="M{left} {y(predicted)}H{right}"/>')
    at = x(times_ms[peak])
    drawn.append(f'<path class="line" d="M{at} {bottom}V{y(totals[peak])}"/>')
    drawn.append(f'<circle cx="{at}" cy="{y(totals[peak])}" r="3" fill="currentColor"/>')
    words = f"{_peak_text(record)}{_predicted_text(record)}"
    drawn.append(f'<text class="end" x="{right}" y="27">{words}</text>')
    for number, kind in enumerate(kinds):
        column, row = left + (right - left) // 4 * (number % 4), bottom + 48 + 16 * (number // 4)
        colour = COLOURS.get(kind, COLOURS["other"])
        drawn.append(f'<rect x="{column}" y="{row - 9}" width="10" height="10" fill="{colour}"/>')
        drawn.append(f'<text x="{column + 14}" y="{row}">{kind}</text>')
    return "\n".join([*drawn, "</svg>"])


def memory_png(record: Mapping[str, Any], width: int = 800, height: int = 400) -> bytes:
    """Return the areas of `memory_svg` without any text as PNG, for viewers without SVG."""
    curve, predicted = record["curve"], _predicted_bytes(record)
    held = np.array([*curve["bytes"].values()], float)  # [kinds, points]
    columns_s = np.linspace(0, curve["at_s"][-1], width)
    stacked = held[:, np.searchsorted(curve["at_s"], columns_s, "right") - 1].cumsum(0)
    top = max(1, held.sum(0).max(), predicted or 0) * 1.02
    above_row = top * np.arange(height, 0, -1)[:, None] / height
    pixels = np.full((height, width, 3), 255, np.uint8)
    for kind, below in [*zip(curve["bytes"], stacked, strict=True)][::-1]:  # the lower over these
        colour = COLOURS.get(kind, COLOURS["other"])
        pixels[above_row <= below] = [*bytes.fromhex(colour[1:])]
    if predicted is not None:
        pixels[int(height * (1 - predicted / top)), np.arange(width) % 12 < 8] = 0
    # PNG: a row of pixels begins with its filter, 0; a part is length, kind, data, checksum.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of 3 colors
    parts = {b"IHDR": head, b"IDAT": zlib.compress(rows.tobytes()), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )


def _peak_text(record: Mapping[str, Any]) -> str:
    curve, at = record["curve"], record["peak"]
    total = sum(of[at] for of in curve["bytes"].values())
    return f"peak {size_text(total)} in {curve['phase'][at]}"


def _predicted_text(record: Mapping[str, Any]) -> str:
    predicted = _predicted_bytes(record)
    return "" if predicted is None else f", predicted {size_text(predicted)}"


def _predicted_bytes(record: Mapping[str, Any]) -> int | None:
    predicted = record.get("predicted")
    return None if predicted is None else sum(predicted["at_peak"].values())


def _ticks(end: float) -> Iterator[float]:
    """Yield round numbers from 0 to `end`, at most seven."""
    step = 10.0 ** (len(f"{end:.0f}") - 1) if end >= 1 else 0.1
    step *= next((each for each in (0.2, 0.5, 1, 2) if end / (step * each) <= 6), 5)
    yield from (step * number for number in range(int(end / step) + 1))


def _phases(names: list[str], times_ms: list[float]) -> Iterator[tuple[str, float, float]]:
    """Yield each phase with its begin and end; equal neighbours are one."""
    begin_ms = times_ms[0]
    for at, name in enumerate(names[1:], 1):
        if name != names[at - 1]:
            yield names[at - 1], begin_ms, times_ms[at]
            begin_ms = times_ms[at]
