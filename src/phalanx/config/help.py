"""Print --help of a verb, with its settings by section, and its options for shell completion."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, Final, cast, get_origin, get_type_hints

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from phalanx.config.fields import Setting, choices, members, settings, value_at
from phalanx.errors import wrapped

WIDTH: Final = 100
"""Largest width of --help, in columns."""

_INDENT: Final = 22
"""Indentation of the text of a setting, in columns."""

_METAVARS: Final = {int: "INT", float: "FLOAT", bool: "{true,false}"}


def print_help(prog: str, schemas: Sequence[type]) -> None:
    """Print the last schema's docstring, and a frame for each section of all schemas."""
    console = Console(highlight=False)
    console.width = min(WIDTH, console.width)
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
    console.print(Text(wrapped(head, console.width)), soft_wrap=True)
    for title, rows in frames.items():
        if rows:
            head = texts.get(title.removesuffix(" options"))
            body = Text(f"{head}\n" if head else "", "dim")
            body.append_text(_rendered_rows(rows, console.width - 4))
            console.print(Panel(body, title=title, title_align="left"))


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


def _rendered_rows(rows: Sequence[tuple[str, str]], width: int) -> Text:
    """Return the rows as text: flags, then words on the same line, or below long flags."""
    drawn = Text()
    for flags, words in rows:
        lines = textwrap.wrap(words, max(20, width - _INDENT), break_on_hyphens=False)
        drawn.append(flags, "bold")
        margin = "\n" + " " * _INDENT
        drawn.append(flags.ljust(_INDENT)[len(flags) :] if len(flags) < _INDENT else margin)
        drawn.append(margin.join(lines) + "\n")
    drawn.rstrip()
    return drawn
