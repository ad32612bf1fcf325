"""The values of a report: tables, and lines with a style.

Rooms make these values; `terminal` prints them, `svg` draws them, and `output` makes JSON of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Line(NamedTuple):
    """A line of text, or a cell of a table, in a style of the terminal such as "bold red".

    A line that does not wrap is printed whole, so that a path or command in it can be copied.
    """

    text: str
    style: str = ""
    wraps: bool = True


class Number(NamedTuple):
    """The head of a column of numbers, which is right-aligned.

    Attributes:
        name: the printed head, with the unit of the printed numbers.
        text: format of a number, or function that returns its text.
        unit: size of the printed unit; numbers are divided by it.
    """

    name: str
    text: str | Callable[[float], str]
    unit: float = 1


Cell = str | float | Line | None
"""A text; a number in SI units, in a column of numbers; or None for an empty cell."""


@dataclass(frozen=True)
class Table:
    """A table, at most 100 columns wide when it is printed.

    Attributes:
        title: the line above the table; "" for none.
        heads: heads of the columns: of texts, or of numbers in a unit; not printed if all are "".
        rows: cells of each row.
        numbers: heads of the columns of texts that are right-aligned.
        note: the line below the table; "" for none.
    """

    title: str
    heads: Sequence[str | Number]
    rows: Sequence[Sequence[Cell]]
    numbers: Sequence[str] = ()
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """The name of each column, and whether it is right-aligned."""
        return [
            (head.name, True) if isinstance(head, Number) else (head, head in self.numbers)
            for head in self.heads
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the table for JSON: names of the columns, numbers in SI units, texts as they are.

        `numbers` has the names of all right-aligned columns.
        """
        return {
            "title": self.title,
            "heads": [name for name, _ in self.columns],
            "rows": [[c.text if isinstance(c, Line) else c for c in row] for row in self.rows],
            "numbers": [name for name, is_right in self.columns if is_right],
            "note": self.note,
        }

    def lines(self) -> list[list[Line]]:
        """Return the printed cells of each row."""
        return [
            [self._printed(head, cell) for head, cell in zip(self.heads, row, strict=True)]
            for row in self.rows
        ]

    def _printed(self, head: str | Number, cell: Cell) -> Line:
        if isinstance(cell, Line):
            return cell
        if isinstance(head, Number) and isinstance(cell, int | float):
            value = cell / head.unit if head.unit != 1 else cell
            return Line(head.text(value) if callable(head.text) else format(value, head.text))
        return Line("" if cell is None else str(cell))


Part = str | Line | Table
"""A part of a report, below the part before."""


def columns(rows: Sequence[tuple[str, str]], width: int) -> Table:
    """Return names and texts as a table without heads; the texts begin at column `width`."""
    return Table("", ("", ""), [(name.ljust(width - 2), text) for name, text in rows])
