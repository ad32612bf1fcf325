"""What verbs print on and with: the console, a bar for each part of a preparation, JSON."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleRenderable, Group, RenderHook
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

WIDTH = 100
"""Columns of the widest line, and of every line where the output is no terminal."""


def screen() -> Console:
    """Return a console for standard output, at most WIDTH columns wide.

    Where that is no terminal, tables are printed without frames and texts without line breaks.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        return Console(width=min(console.width, WIDTH), highlight=False)
    console = Console(width=WIDTH, highlight=False)
    console.push_render_hook(_Plain(console))
    return console


class _Plain(RenderHook):
    """Turns tables into lines of words, for a file or another program."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [self._plain(renderable) for renderable in renderables]

    def _plain(self, renderable: Any) -> ConsoleRenderable:
        if isinstance(renderable, Group):
            return Group(*map(self._plain, renderable.renderables))
        if isinstance(renderable, Text):
            renderable.no_wrap, renderable.overflow = True, "ignore"
        if not isinstance(renderable, Table):
            return renderable
        if renderable.box is not None:
            renderable.box, renderable.pad_edge, renderable.padding = None, False, (0, 2, 0, 0)
        lines = self._console.render_lines(renderable, pad=False)
        words = ("".join(segment.text for segment in line).rstrip() for line in lines)
        return Text("\n".join(words), no_wrap=True, overflow="ignore")


def print_json(document: object) -> None:
    """Print one line of valid JSON, the last of a verb's output."""
    from phalanx.measure.logs import json_text

    print(json_text(document), flush=True)


class Preparation:
    """Shows how far some work is done: a bar for each of its parts, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(console=console, disable=not console.is_terminal, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Preparation:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def report(self, what: str, done_bytes: int, all_bytes: int) -> None:
        """Show that `done_bytes` of `all_bytes` of one part are done; 0 in all is unknown."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what)
        self._progress.update(self._tasks[what], completed=done_bytes, total=all_bytes or None)
