"""Imports point one way, and what the command line loads first is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

SOURCE = Path(phalanx.__file__).parent

ROWS = [
    ["errors"],
    ["strategy", "storage"],
    ["config"],
    ["models"],
    ["comm"],
    ["debug"],
    ["launch"],
    ["parallel", "server"],
    ["planner"],
    ["data", "measure", "checkpoint"],
    ["hugging_face"],
    ["train"],
    ["bench"],
    ["verify", "infer"],
    ["script"],
    ["cli"],
]
"""The rooms; each may import only rooms of earlier rows, and itself."""

ROW = {room: number for number, row in enumerate(ROWS) for room in row}


def room_of(module: str) -> str:
    """Return the room of 'phalanx.comm.ledger': comm."""
    return module.split(".")[1] if "." in module else ""


def imported(tree: ast.AST) -> set[str]:
    """Return the phalanx modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            # `from phalanx import comm` names a room, `from phalanx.comm import join` a file.
            names |= {f"{base}.{a.name}" for a in node.names} if base == "phalanx" else {base}
    return {name for name in names if name.startswith("phalanx.")}


def files() -> list[Path]:
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE or path.stem[:2] != "__"
    ]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    room = room_of(".".join(["phalanx", *parts]))
    assert room in ROW, f"{room} is not on the map: see docs/architecture.md"
    for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        other = room_of(module)
        allowed = ROW[other] < ROW[room] or other == room
        assert allowed, f"{room} may not import {module}"


def test_the_rule_can_fail() -> None:
    tree = ast.parse("def f():\n    from phalanx.cli import main\n    import phalanx.launch.local")
    assert {room_of(name) for name in imported(tree)} == {"cli", "launch"}


@pytest.mark.parametrize(
    "module",
    ["phalanx", "phalanx.strategy", "phalanx.config", "phalanx.config.load", "phalanx.cli.main"],
)
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=280).returncode == 0


def test_the_public_names() -> None:
    assert sorted(phalanx.__all__) == [
        "DistributedOptimizer",
        "Options",
        "Run",
        "Strategy",
        "TrainConfig",
        "Trainer",
        "__version__",
        "average_gradients",
        "decoder_of",
        "from_deepspeed",
        "init",
        "train_decoder",
        "verify_strategy",
    ]
    with pytest.raises(AttributeError, match="no attribute 'Strateg'"):
        _ = phalanx.Strateg


@pytest.mark.parametrize("name", ["Strategy", "TrainConfig", "train_decoder", "verify_strategy"])
def test_each_public_name_can_be_called(name: str) -> None:
    assert callable(getattr(phalanx, name))
