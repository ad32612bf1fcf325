"""Output of the verbs: the console, progress of a preparation, the settings, JSON."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleRenderable, Group, RenderHook
from rich.progress import Progress, TaskID, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from phalanx.config.fields import value_at
from phalanx.config.load import Loaded
from phalanx.errors import wrapped

WIDTH = 100
"""Largest line width, in columns; the width of all lines if the output is no terminal."""

FIRST_LINE_S = 2.0
"""Seconds after which a part of a preparation prints its first line."""

LINES_S = 20.0
"""Seconds between further lines on the same part."""


def screen() -> Console:
    """Return a console for standard output, at most WIDTH columns wide.

    If it is no terminal, tables are printed without frames and rows without padding.
    """
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    if not console.is_terminal:
        console.push_render_hook(_Plain(console))
    return console


def say(console: Console, text: str, style: str = "") -> None:
    """Print prose, wrapped between words on a terminal, and unchanged elsewhere, for `grep`."""
    text = wrapped(text, console.width) if console.is_terminal else text
    console.print(Text(text, style), soft_wrap=True)


class _Plain(RenderHook):
    """Render hook that prints tables as plain lines, for a file or another program."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [self._plain(renderable) for renderable in renderables]

    def _plain(self, renderable: Any) -> ConsoleRenderable:
        if isinstance(renderable, Group):
            return Group(*map(self._plain, renderable.renderables))
        if not isinstance(renderable, Table):
            return renderable
        if renderable.box is not None:
            renderable.box, renderable.pad_edge, renderable.padding = None, False, (0, 2, 0, 0)
        lines = self._console.render_lines(renderable, pad=False)
        words = ("".join(segment.text for segment in line).rstrip() for line in lines)
        return Text("\n".join(words), no_wrap=True, overflow="ignore")


def print_json(document: object) -> None:
    """Print the document as one line of valid JSON, the last line of a verb's output."""
    from phalanx.measure.logs import json_text

    print(json_text(document), flush=True)


def show_config(loaded: Loaded[Any], schedule: Sequence[str] = ()) -> None:
    """Print key, value and source of every setting; as one JSON line if --json was given.

    Also print `schedule`, the lines of a pipeline schedule, if it is not empty.
    """
    config = loaded.config
    if loaded.json:
        document = {"config": dataclasses.asdict(config), "sources": dict(loaded.sources)}
        print_json(document | ({"schedule": list(schedule)} if schedule else {}))
        return
    columns = [Column("key", no_wrap=True), Column("value", overflow="fold")]
    columns += [Column("source", overflow="fold", max_width=30)]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for key, source in loaded.sources.items():
        style = "dim" if source == "default" else ""
        table.add_row(key, Text(_text(value_at(config, key)), style), Text(source, style))
    screen().print(table)
    if schedule:
        screen().print("\nschedule of the pipeline, one line per rank")
        for line in schedule:
            screen().print(Text(line), soft_wrap=True)


def _text(value: Any) -> str:
    """Return a value in the notation of the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class Preparation:
    """Progress display of a preparation, one part at a time.

    On a terminal, a bar shows the progress, or only activity if the size of the part is unknown.
    Elsewhere, a part prints a line after FIRST_LINE_S, and then one every LINES_S.
    """

    def __init__(self, console: Console, *, has_bars: bool = True) -> None:
        self._console = console
        self._has_bars = has_bars and console.is_terminal
        columns = (*Progress.get_default_columns(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=console, disable=not self._has_bars, transient=True
        )
        self._task: TaskID | None = None
        self._part = ""
        self._next_line_s = 0.0

    def __enter__(self) -> Preparation:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, what: str, done_bytes: int, all_bytes: int) -> None:
        """Show that `done_bytes` of the part `what` are done; `all_bytes` is 0 if unknown."""
        now_s = time.monotonic()
        if what != self._part:
            self._part, self._next_line_s = what, now_s + FIRST_LINE_S
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=None)
        assert self._task is not None, "a part has begun"
        self._progress.update(self._task, completed=done_bytes, total=all_bytes or None)
        if (
            not self._has_bars
            and now_s >= self._next_line_s
            and done_bytes < (all_bytes or math.inf)
        ):
            self._next_line_s = now_s + LINES_S
            share = f" of {all_bytes / 1e6:,.1f}" if all_bytes else ""
            size = f": {done_bytes / 1e6:,.1f}{share} MB" if done_bytes else ""
            say(self._console, f"preparing the data: {what}{size} ...")
