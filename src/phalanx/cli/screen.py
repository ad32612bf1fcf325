"""What verbs print on and with: the console, a bar for each part of a preparation, JSON."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TaskID

WIDTH = 100
"""Columns of the widest line, and of every line where the output is no terminal."""


def screen() -> Console:
    """Return a console for standard output, at most WIDTH columns wide."""
    console = Console(highlight=False)
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return Console(width=width, highlight=False)


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
