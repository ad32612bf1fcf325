"""No function of src is longer than 50 lines, no class than 250, no file than 400."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx
from statements import statements

SOURCE = Path(phalanx.__file__).parent
MOST = {"function": 50, "class": 250, "file": 400}


def too_long(name: str, text: str) -> set[str]:
    """Return what is too long in a file, by its name and its text."""
    found = {f"{name}: file"} if len(text.splitlines()) > MOST["file"] else set[str]()
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MOST[kind]:
                found.add(f"{name}: {kind} {node.name}")
    return found


def test_nothing_is_too_long() -> None:
    found = set[str]()
    for path in SOURCE.rglob("*.py"):
        found |= too_long(str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8"))
    assert not found, "cut it into steps that have names"


def test_the_rule_can_fail() -> None:
    body = "    x = 1\n" * 50
    assert too_long("a.py", f"def f():\n{body}") == {"a.py: function f"}
    assert too_long("a.py", f"class A:\n{body}") == set()
    assert too_long("a.py", f"class A:\n{body * 5}") == {"a.py: class A"}
    assert too_long("a.py", "x = 1\n" * 401) == {"a.py: file"}
