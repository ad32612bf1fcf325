"""Print reports to the terminal, or as plain lines to a file; show the progress of long work.

Only this file imports rich, and only once a terminal is opened: ranks that print nothing do not.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self, TextIO

from phalanx.errors import wrapped
from phalanx.report.tabular import Line, Part, Table
from phalanx.report.units import clock_text

if TYPE_CHECKING:
    from rich.progress import TaskID

WIDTH: Final = 100
"""Largest line width, in columns; the width of all tables if the output is no terminal."""

FIRST_LINE_S = 2.0
"""Seconds after which a part of a preparation prints its first line."""

LINES_S = 20.0
"""Seconds between further lines on the same part."""

BAR: Final = 10
"""Least width of a bar, in columns, if the terminal has WIDTH_FOR_BAR."""

WIDTH_FOR_BAR: Final = 90

GAPS: Final = 3
"""Total columns of the gaps between the parts of a bar."""


class Terminal:
    """Standard output, or another file, at most WIDTH columns wide.

    On a terminal, prose is wrapped between words; elsewhere it stays whole, for `grep`.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        is_error: bool = False,
        is_terminal: bool | None = None,
        is_quiet: bool = False,
        wraps: bool = False,
        width: int | None = None,
        reader_left: int = 1,
    ) -> None:
        """Open a file for reports.

        Args:
            file: where to print; standard output if None, or standard error with `is_error`.
            is_error: whether to print to standard error.
            is_terminal: whether the file is a terminal; found out if None.
            is_quiet: whether to print nothing.
            wraps: whether prose is wrapped in files too.
            width: columns; the terminal's if None, at most WIDTH.
            reader_left: exit code of the process once the reader of a pipe has left.
        """
        from rich.console import Console

        self.console = console = Console(
            file=file, stderr=is_error, force_terminal=is_terminal, quiet=is_quiet, highlight=False
        )

        def leave() -> None:
            try:
                Console.on_broken_pipe(console)
            except SystemExit as stop:
                raise SystemExit(reader_left) from stop

        console.on_broken_pipe = leave
        self.is_terminal = self.console.is_terminal
        self.width = width or (min(self.console.width, WIDTH) if self.is_terminal else WIDTH)
        self.console.width = self.width
        self._wraps = self.is_terminal or wraps

    def show(self, *parts: Part) -> None:
        """Print the parts of a report, each below the one before."""
        for part in parts:
            if isinstance(part, Table):
                self._table(part)
            else:
                self.say(*part) if isinstance(part, Line) else self.say(part)

    def say(self, text: str, style: str = "", wraps: bool = True) -> None:
        """Print a line of prose, or a path or command that does not wrap."""
        from rich.text import Text

        lines = wrapped(text, self.width) if wraps and self._wraps else text
        self.console.print(Text(lines, style), soft_wrap=True)

    def write(self, text: str) -> None:
        """Print a part of a line at once."""
        if not self.console.quiet:
            self.console.file.write(text)
            self.console.file.flush()

    def fail(self, name: str, message: str) -> None:
        """Print an error below the work, with the program's name in red."""
        from rich.text import Text

        text = f"{name}: {message}"
        shown = Text(wrapped(text, self.width) if self.is_terminal else text)
        shown.stylize("bold red", 0, len(name) + 1)
        self.console.print(shown, soft_wrap=True)

    def frame(
        self, title: str, about: str, indent: int, rows: Iterable[tuple[str, Sequence[str]]]
    ) -> None:
        """Print a frame: `about`, then rows of a bold head and lines that begin at `indent`."""
        from rich.panel import Panel
        from rich.text import Text

        body = Text(f"{about}\n" if about else "", "dim")
        margin = "\n" + " " * indent
        for head, lines in rows:
            body.append(head, "bold")
            body.append(" " * (indent - len(head)) if len(head) < indent else margin)
            body.append(margin.join(lines) + "\n")
        body.rstrip()
        self.console.print(Panel(body, title=title, title_align="left"))

    def restore(self) -> None:
        """Show the cursor, which the bar of a killed process has left hidden."""
        if self.is_terminal:
            self.console.show_cursor(True)
            self.console.print()  # end the line of the bar

    def _table(self, table: Table) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        if table.title:
            self.say(table.title, "bold")
        drawn = RichTable(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="bold",
            show_header=any(name for name, _ in table.columns),
        )
        rows = [*table.lines()]
        is_whole = [is_right or number == 0 for number, (_, is_right) in enumerate(table.columns)]
        widths = [
            max(len(name), *(len(row[number].text) if whole else 1 for row in rows), 1) + 2
            for number, ((name, _), whole) in enumerate(zip(table.columns, is_whole, strict=True))
        ]
        # Names and numbers stay on one line, unless rich would cut them: then all columns fold.
        keeps = sum(widths) - 2 <= self.width
        for (name, is_right), whole in zip(table.columns, is_whole, strict=True):
            drawn.add_column(
                Text(name), justify="right" if is_right else "left",
                no_wrap=whole and keeps, overflow="fold",
            )  # fmt: skip
        for row in rows:
            drawn.add_row(*(Text(cell.text, cell.style) for cell in row))
        if self.is_terminal:
            self.console.print(drawn)
        else:
            lines = self.console.render_lines(drawn, pad=False)
            texts = ("".join(segment.text for segment in line).rstrip() for line in lines)
            self.console.print(Text("\n".join(texts), no_wrap=True, overflow="ignore"))
        if table.note:
            self.say(table.note)


def text_of(*parts: Part, wraps: bool = False) -> str:
    """Return parts of a report as plain lines, tables of at most WIDTH columns."""
    file = io.StringIO()
    Terminal(file, wraps=wraps).show(*parts)
    return file.getvalue()


class Progress:
    """A bar for one part of the work at a time; nothing where the output is no terminal."""

    def __init__(self, terminal: Terminal, *, has_bar: bool = True, keeps: bool = False) -> None:
        """Begin without a part.

        Args:
            terminal: where to draw.
            has_bar: whether to draw on a terminal; bars of several ranks would overwrite another.
            keeps: whether the last state stays on the screen.
        """
        self.terminal = terminal
        self.has_bar = has_bar and terminal.is_terminal
        self._part = ""
        self._begin: tuple[float, float] | None = None
        if self.has_bar:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            head, text = (TextColumn(f"{{task.fields[{name}]}}") for name in ("head", "text"))
            self.is_wide = terminal.width >= WIDTH_FOR_BAR
            self._bar = RichProgress(
                *((head, BarColumn(None), text) if self.is_wide else (head, text)),
                console=terminal.console,
                expand=True,
                refresh_per_second=4,
                transient=not keeps,
            )
            self._task: TaskID = self._bar.add_task("", head="", text="")
            self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop to draw."""
        if self.has_bar:
            self._bar.stop()

    def room(self, head: str) -> float:
        """Return the number of columns that a bar with `head` leaves for its text."""
        if not self.has_bar:
            return math.inf
        return self.terminal.width - len(head) - GAPS - (BAR if self.is_wide else 0)

    def draw(self, head: str, text: str, done: float, total: float | None) -> None:
        """Draw the bar between `head` and `text`; it shows only activity if `total` is None."""
        if self.has_bar:
            self._bar.tasks[0].total = total  # `update` takes None for no change
            self._bar.update(self._task, head=head, text=text, completed=done)

    def left(self, done: float, total: float) -> str:
        """Return the time left, at the rate since the first call: without a warm-up before."""
        now_s = time.monotonic()
        first, first_s = self._begin = self._begin or (done, now_s)
        if done <= first:
            return "left --:--"
        return f"left {clock_text((now_s - first_s) / (done - first) * max(total - done, 0))}"


class Preparation(Progress):
    """Progress of a preparation, one part at a time.

    Without a bar, a part prints a line after FIRST_LINE_S, and then one every LINES_S.
    """

    _next_line_s = 0.0

    def report(self, what: str, done_bytes: int, all_bytes: int) -> None:
        """Show that `done_bytes` of the part `what` are done; `all_bytes` is 0 if unknown."""
        now_s = time.monotonic()
        if what != self._part:
            self._part, self._next_line_s = what, now_s + FIRST_LINE_S
            self._begin = None
        share = f" of {all_bytes / 1e6:,.1f}" if all_bytes else ""
        size = f"{done_bytes / 1e6:,.1f}{share} MB" if done_bytes else ""
        if self.has_bar:
            left = self.left(done_bytes, all_bytes) if all_bytes else ""
            text = "  ".join(filter(None, (size, left)))
            self.draw(what, text, done_bytes, all_bytes or None)
        elif now_s >= self._next_line_s and done_bytes < (all_bytes or math.inf):
            self._next_line_s = now_s + LINES_S
            size = size and f": {size}"
            self.terminal.say(f"preparing the data: {what}{size} ...")
