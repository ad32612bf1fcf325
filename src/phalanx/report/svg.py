"""Compact SVG drawings: all boxes of one color are a single path."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Final

from phalanx.report.tabular import Table

Box = tuple[float, float, float, float]
"""Left, top, width and height, in pixels."""

ROW: Final = 17
"""Height of a line of text, pixels."""

LETTER: Final = 6.9
"""Width of a letter of a monospaced text, pixels."""

GREY, BAR = "#9aa3ad", "#9db8d9"

TURN_S = 2
"""Duration of a step of an animation, seconds."""


class SvgDrawing:
    """An SVG drawing on white; later shapes are drawn over earlier ones."""

    def __init__(self, width: float, height: float) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" font-family="Helvetica, Arial, sans-serif" fill="#1d2430">',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]

    def boxes(self, boxes: Iterable[Box], colour: str) -> None:
        """Add boxes of one color."""
        drawn = "".join(f"M{x:.5g} {y:.5g}h{w:.4g}v{h:.4g}h{-w:.4g}z" for x, y, w, h in boxes)
        self._lines.append(f'<path fill="{colour}" d="{drawn}"/>')

    def texts(
        self,
        texts: Iterable[tuple[float, float, str]],
        size: float = 11,
        anchor: str = "start",
        weight: str = "normal",
        *,
        is_mono: bool = False,
    ) -> None:
        """Add texts: each is (x of the `anchor`, y of the baseline, words).

        With `is_mono`, the font is monospaced and all spaces are kept.
        """
        drawn = "".join(
            f'<text x="{x:.5g}" y="{y:.5g}">{escape(text)}</text>' for x, y, text in texts
        )
        style = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}"'
        if is_mono:
            style += ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
            style += ' xml:space="preserve" style="white-space:pre"'
        self._lines.append(f"<g {style}>{drawn}</g>")

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """Add an arrow, and a dot that moves along it."""
        (x, y), (u, v) = begin, end
        length = max(1e-6, ((u - x) ** 2 + (v - y) ** 2) ** 0.5)
        dx, dy = 8 * (u - x) / length, 8 * (v - y) / length
        head = f"M{u:.5g} {v:.5g}L{u - dx - dy / 2:.5g} {v - dy + dx / 2:.5g}"
        head += f"L{u - dx + dy / 2:.5g} {v - dy - dx / 2:.5g}z"
        path = f"M{x:.5g} {y:.5g}L{u:.5g} {v:.5g}"
        self._lines.append(
            f'<path d="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>'
            f'<path d="{head}" fill="{colour}"/><circle r="4" cx="{x:.5g}" cy="{y:.5g}" '
            f'fill="{colour}"><animateMotion path="M0 0L{u - x:.5g} {v - y:.5g}" dur="{TURN_S}s" '
            'repeatCount="indefinite"/></circle>'
        )

    def line(self, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """Add a thin line."""
        (x, y), (u, v) = begin, end
        self._lines.append(f'<path d="M{x:.5g} {y:.5g}L{u:.5g} {v:.5g}" stroke="{colour}"/>')

    @contextmanager
    def turn(self, number: int, turns: int) -> Generator[None]:
        """Show the shapes added inside in step `number` of `turns` only; number 0 if static."""
        values = ";".join(str(int(at == number)) for at in range(turns))
        self._lines.append(f'<g opacity="{int(number == 0)}">')
        if turns > 1:
            self._lines.append(
                f'<animate attributeName="opacity" calcMode="discrete" values="{values}" '
                f'dur="{TURN_S * turns}s" repeatCount="indefinite"/>'
            )
        yield
        self._lines.append("</g>")

    def moving(self, box: Box, colour: str, attribute: str, to: Iterable[float]) -> None:
        """Add a translucent box whose `attribute`, x or y, cycles through the values `to`."""
        x, y, w, h = box
        values = [f"{value:.5g}" for value in to]
        self._lines.append(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{w:.4g}" height="{h:.4g}" fill="{colour}" '
            f'fill-opacity="0.35"><animate attributeName="{attribute}" calcMode="discrete" '
            f'values="{";".join(values)}" dur="{TURN_S * len(values):g}s" '
            'repeatCount="indefinite"/></rect>'
        )

    def key(self, colours: dict[str, str], x: float, y: float) -> None:
        """Add a legend: name -> color, in one line."""
        for name, colour in colours.items():
            self.boxes([(x, y - 9, 10, 10)], colour)
            self.texts([(x + 15, y, name)])
            x += 35 + 6 * len(name)

    def below(self, left: float, top: float, ticks: Iterable[tuple[float, str]]) -> None:
        """Add an axis below a panel; each tick is (distance from `left`, label)."""
        ticks = list(ticks)
        self.boxes([(left, top, max(x for x, _ in ticks), 0.8)], GREY)
        self.boxes([(left + x, top, 0.8, 4) for x, _ in ticks], GREY)
        self.texts([(left + x, top + 15, text) for x, text in ticks], 10, "middle")

    def table(self, table: Table, left: float, top: float) -> None:
        """Add a table, with a bar that moves down its rows."""
        if table.title:
            self.texts([(left, top + 12, table.title)], weight="bold")
            top += ROW
        heads = [name for name, _ in table.columns]
        rows = [heads, *([cell.text for cell in row] for row in table.lines())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        length = LETTER * (sum(widths) + 2 * len(widths))
        steps = [top + 4 + ROW * at for at in range(1, len(rows))]
        if len(steps) > 1:
            self.moving((left - 4, steps[0], length, ROW), BAR, "y", steps)
        for at, row in enumerate(rows):
            y, x, weight = top + 16 + ROW * at, left, "bold" if at == 0 else "normal"
            for (_, is_right), width, cell in zip(table.columns, widths, row, strict=True):
                end = x + LETTER * width
                shown = (end if is_right else x, y, cell)
                self.texts([shown], 11, "end" if is_right else "start", weight, is_mono=True)
                x = end + 2 * LETTER

    def write(self, path: Path) -> None:
        """Write the drawing to a file."""
        path.write_text("\n".join([*self._lines, "</svg>"]) + "\n", encoding="utf-8")
