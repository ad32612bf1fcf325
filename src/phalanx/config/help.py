"""Print --help of a verb, its options for shell completion, and the settings of a run."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from itertools import pairwise
from typing import Any, Final, cast, get_origin, get_type_hints

from phalanx.config.fields import Setting, choices, members, settings, value_at
from phalanx.config.load import Loaded
from phalanx.report.output import print_json
from phalanx.report.tabular import Line, Table
from phalanx.report.terminal import Terminal

_INDENT: Final = 22
"""Indentation of the text of a setting, in columns."""

_METAVARS: Final = {int: "INT", float: "FLOAT", bool: "{true,false}"}


def print_help(prog: str, schemas: Sequence[type]) -> None:
    """Print the last schema's docstring, and a frame for each section of all schemas."""
    terminal = Terminal(wraps=True)
    frames: dict[str, list[tuple[str, str]]] = {
        "positional arguments": [],
        "options": [("-h, --help", "Show this help and exit.")],
    }
    texts: dict[str, str] = {}
    positionals = ""
    for schema in schemas:
        texts |= field_docstrings(schema)
        for setting in settings(schema):
            title = f"{setting.key.rpartition('.')[0]} options".lstrip()
            if setting.positional is not None:
                title = "positional arguments"
                positionals += f" {setting.positional}"
            words = texts[setting.key] + _default(value_at(schema(), setting.key))
            frames.setdefault(title, []).append((_flags(setting), words))
    about = inspect.cleandoc(schemas[-1].__doc__ or "")
    paragraphs = [" ".join(each.split()) for each in about.split("\n\n")]
    head = "\n\n".join([f"usage: {prog}{positionals} [OPTIONS]", *paragraphs, ""])
    terminal.say(head)
    width = max(20, terminal.width - 4 - _INDENT)
    for title, rows in frames.items():
        if rows:
            about = texts.get(title.removesuffix(" options"), "")
            lines = (
                (flags, textwrap.wrap(words, width, break_on_hyphens=False))
                for flags, words in rows
            )
            terminal.frame(title, about, _INDENT, lines)


def print_completion(prog: str, keys: Iterable[str]) -> None:
    """Print the bash command that enables completion of a verb's options."""
    words = sorted({f"--{key.replace('_', '-')}" for key in keys})
    name, *verb = prog.split()
    sys.stdout.write(f'complete -o default -W "{" ".join([*verb, *words])}" {name}\n')


def field_docstrings(schema: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and its sections, by dotted key."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, below in pairwise(cast(ast.ClassDef, tree).body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
                case _:
                    pass
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            inner = field_docstrings(cast(type, hint))
            texts |= {f"{name}.{key}": text for key, text in inner.items()}
    return texts


def _flags(setting: Setting) -> str:
    """Return a setting as written on the command line, such as '--steps INT'."""
    if setting.positional is not None:
        return setting.positional
    section, dot, name = setting.key.replace("_", "-").rpartition(".")
    if setting.hint is bool:
        return f"--{section}{dot}[no-]{name}"
    kinds = members(setting.hint)
    numbers = [name for kind, name in _METAVARS.items() if kind in kinds]
    if words := choices(setting.hint):
        metavar = "{" + ",".join([*words, *numbers]) + "}"
    else:
        metavar = numbers[0] if numbers else "TEXT"
    return f"--{section}{dot}{name} {metavar}" + (" ..." * (get_origin(setting.hint) is tuple))


def _default(value: Any) -> str:
    """Return the words for a default; empty for None (the text explains it), False, [] and ""."""
    if value is None or value is False or value in ([], ""):
        return ""
    text = " ".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)
    return f" (default: {'true' if value is True else text})"


def show_config(loaded: Loaded[Any], schedule: Sequence[str] = ()) -> None:
    """Print key, value and source of every setting; as one JSON line if --json was given.

    Also print `schedule`, the lines of a pipeline schedule, if it is not empty.
    """
    config = loaded.config
    if loaded.json:
        document = {"config": asdict(config), "sources": dict(loaded.sources)}
        print_json(document | ({"schedule": list(schedule)} if schedule else {}))
        return
    rows = list[list[Line]]()
    for key, source in loaded.sources.items():
        style = "dim" if source == "default" else ""
        rows.append([Line(key), Line(_text(value_at(config, key)), style), Line(source, style)])
    terminal = Terminal()
    terminal.show(Table("", ("key", "value", "source"), rows))
    if schedule:
        terminal.say("\nschedule of the pipeline, one line per rank")
        terminal.show(*(Line(line, wraps=False) for line in schedule))


def _text(value: Any) -> str:
    """Return a value in the notation of the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
