"""The console that verbs print on."""

from __future__ import annotations

from rich.console import Console

WIDTH = 100
"""Columns of the widest line, and of every line where the output is no terminal."""


def screen() -> Console:
    """Return a console for standard output, at most WIDTH columns wide."""
    console = Console(highlight=False)
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return Console(width=width, highlight=False)
