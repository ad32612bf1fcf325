"""Show a configuration: every value and where it came from (--show-config)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from phalanx.cli.screen import print_json, screen
from phalanx.config.fields import value_at
from phalanx.config.load import Loaded


def show_config(loaded: Loaded[Any], schedule: Sequence[str] = ()) -> None:
    """Print key, value and source of every setting; as one JSON line if --json was given.

    The lines of the schedule of a pipeline follow, if there is one.
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
        screen().print("\nschedule of the pipeline, a line a rank")
        for line in schedule:
            screen().print(Text(line), soft_wrap=True)


def _text(value: Any) -> str:
    """Return a value as a TOML file or a person would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
