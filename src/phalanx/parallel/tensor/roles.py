"""Which module plays which part: patterns of module names to the roles of layers.py.

In a pattern, `*` stands for one name between dots: `blocks.*.mlp.up`. The first that matches holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder

Role = Literal["embedding", "table", "branch", "column", "row", "norm", "local", "dropout", "head"]
ROLES: tuple[Role, ...] = get_args(Role)

Patterns = Mapping[str, Role]

DECODER: Patterns = {
    "embedding": "embedding",
    "position_embedding": "table",
    "dropout": "dropout",
    "blocks.*.dropout": "dropout",
    "blocks.*.attention_norm": "norm",
    "blocks.*.attention": "branch",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.k": "column",
    "blocks.*.attention.v": "column",
    "blocks.*.attention.q_norm": "local",
    "blocks.*.attention.k_norm": "local",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp_norm": "norm",
    "blocks.*.mlp": "branch",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "norm": "norm",
    "output": "head",
}


@dataclass(frozen=True)
class Site:
    """A module and its role.

    Attributes:
        name: of the module in the model.
        role: see layers.py.
        module: itself.
        columns: of a branch, its column maps by name, in the order of registration.
    """

    name: str
    role: Role
    module: nn.Module
    columns: tuple[tuple[str, nn.Module], ...] = ()


def default_patterns(model: nn.Module) -> Patterns:
    """Return the patterns of a model that is known here, without those it has no module for.

    Raises:
        StrategyError: it is not known.
    """
    if isinstance(model, Decoder):
        names = [name for name, _ in model.named_modules()]
        return {p: role for p, role in DECODER.items() if any(_matches(p, n) for n in names)}
    raise StrategyError(
        f"tp: the roles of the modules of {type(model).__name__} are not known; give patterns of "
        f"names to roles ({', '.join(ROLES)})"
    )


def sites_of(model: nn.Module, patterns: Patterns | None = None) -> list[Site]:
    """Return the modules that have a role, in the order of the model.

    Args:
        model: any module, on any device.
        patterns: names to roles; those known for the model if None.

    Raises:
        StrategyError: a pattern matches nothing, a role does not exist, a parameter is in no module
            with a role, or a column is in no branch.
    """
    patterns = default_patterns(model) if patterns is None else patterns
    names = [name for name, _ in model.named_modules() if name]
    for pattern, role in patterns.items():
        if role not in ROLES:
            raise StrategyError(
                f"tp: '{role}' of '{pattern}' is no role; the roles are {', '.join(ROLES)}"
            )
        if not any(_matches(pattern, name) for name in names):
            raise StrategyError(
                f"tp: the pattern '{pattern}' ({role}) matches no module{_nearest(pattern, names)}"
            )
    roles = {
        name: role
        for name in names
        if (role := next((r for p, r in patterns.items() if _matches(p, name)), None)) is not None
    }
    modules = dict(model.named_modules())
    branches: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, role in roles.items():
        if role == "branch":
            branches[name] = []
        if role == "column":
            branch = _enclosing(name, branches)
            if branch is None:
                raise StrategyError(
                    f"tp: the column map '{name}' is in no module with the role branch"
                )
            branches[branch].append((name, modules[name]))
    for name, _ in model.named_parameters():
        if _enclosing(name, {n: r for n, r in roles.items() if r != "branch"}) is None:
            raise StrategyError(
                f"tp: the parameter '{name}' is in no module that has a role; give a pattern for "
                f"'{name.rpartition('.')[0]}'"
            )
    return [
        Site(name, role, modules[name], tuple(branches.get(name, ())))
        for name, role in roles.items()
    ]


def _enclosing(name: str, homes: Mapping[str, object]) -> str | None:
    """Return the innermost of `homes` that the module or parameter `name` is in."""
    while name:
        name = name.rpartition(".")[0]
        if name in homes:
            return name
    return None


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _nearest(pattern: str, names: list[str]) -> str:
    """Return '; the nearest is ...' with numbers as the pattern has them, or nothing."""
    general = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): None for name in names}
    close = difflib.get_close_matches(pattern, general, 1, 0.5)
    return f"; the nearest is '{close[0]}'" if close else ""
