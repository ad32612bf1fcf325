"""Pictures of many boxes in few lines of SVG: all boxes of a colour are one path."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

Box = tuple[float, float, float, float]
"""Left, top, width and height, in pixels."""

GREY = "#9aa3ad"


class Drawing:
    """Shapes on white, in the order in which they are added."""

    def __init__(self, width: float, height: float) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" font-family="Helvetica, Arial, sans-serif" fill="#1d2430">',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]

    def boxes(self, boxes: Iterable[Box], colour: str) -> None:
        """Add boxes of one colour."""
        drawn = "".join(f"M{x:.5g} {y:.5g}h{w:.4g}v{h:.4g}h{-w:.4g}z" for x, y, w, h in boxes)
        self._lines.append(f'<path fill="{colour}" d="{drawn}"/>')

    def texts(
        self,
        texts: Iterable[tuple[float, float, str]],
        size: float = 11,
        anchor: str = "start",
        weight: str = "normal",
    ) -> None:
        """Add texts: each its place, by `anchor` and the line it stands on, and its words."""
        drawn = "".join(
            f'<text x="{x:.5g}" y="{y:.5g}">{escape(words)}</text>' for x, y, words in texts
        )
        style = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}"'
        self._lines.append(f"<g {style}>{drawn}</g>")

    def key(self, colours: dict[str, str], x: float, y: float) -> None:
        """Add a line that says what colours mean."""
        for name, colour in colours.items():
            self.boxes([(x, y - 9, 10, 10)], colour)
            self.texts([(x + 15, y, name)])
            x += 35 + 6 * len(name)

    def below(self, left: float, top: float, ticks: Iterable[tuple[float, str]]) -> None:
        """Add the ticks of an axis below a panel, each a distance from its left and a number."""
        ticks = list(ticks)
        self.boxes([(left, top, max(x for x, _ in ticks), 0.8)], GREY)
        self.boxes([(left + x, top, 0.8, 4) for x, _ in ticks], GREY)
        self.texts([(left + x, top + 15, words) for x, words in ticks], 10, "middle")

    def write(self, path: Path) -> None:
        """Write all of it."""
        path.write_text("\n".join([*self._lines, "</svg>"]) + "\n", encoding="utf-8")
