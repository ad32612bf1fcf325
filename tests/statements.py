"""The statements of a syntax tree, without the expressions, which are most of its nodes."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each statement of a module and of its blocks, with except clauses and match cases."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        found = getattr(tree, name, [])
        for node in found if isinstance(found, list) else ():  # a lambda's body is an expression
            yield node
            yield from statements(node)
