"""Imports point one way, and what the command line loads first is light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from statements import statements

SOURCE = Path(phalanx.__file__).parent

ROWS = [
    ["errors"],
    ["report"],
    ["strategy", "storage"],
    ["object_store"],
    ["config"],
    ["models"],
    ["comm"],
    ["debug", "collectives"],
    ["launch"],
    ["parallel", "server"],
    ["account"],
    ["data", "measure", "checkpoint"],
    ["planner"],
    ["hugging_face"],
    ["infer"],
    ["train"],
    ["review"],
    ["bench"],
    ["verify"],
    ["script", "show"],
    ["hf"],
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
    for node in statements(tree):
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


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module, by its name."""
    names = {path: path.relative_to(SOURCE).with_suffix("").parts for path in files()}
    return {
        ".".join(["phalanx", *parts]): ast.parse(path.read_text(encoding="utf-8"))
        for path, parts in names.items()
    }


def offenders(module: str, tree: ast.AST) -> list[str]:
    """Return what a module imports that its room may not, and a room that is not on the map."""
    room = room_of(module)
    if room not in ROW:
        return [f"{module}: {room} is not on the map; see docs/architecture.md"]
    return [
        f"{module}: {room} may not import {other}"
        for other in sorted(imported(tree))
        if ROW[room_of(other)] >= ROW[room] and room_of(other) != room
    ]


def test_imports_point_one_way() -> None:
    found = [one for module, tree in trees().items() for one in offenders(module, tree)]
    assert not found, "\n".join(found)


DRAWING = {"rich", "matplotlib"}
"""Packages that only `report` imports; rooms give it values, or draw on a picture of its making."""


def drawn_with(module: str, tree: ast.AST) -> list[str]:
    """Return what a module outside of `report` imports to draw, wherever in the file."""
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""}
    found = sorted(name for name in names if name.partition(".")[0] in DRAWING)
    return [] if room_of(module) == "report" else [f"{module}: {name}" for name in found]


def test_only_the_report_room_draws() -> None:
    found = [one for module, tree in trees().items() for one in drawn_with(module, tree)]
    assert not found, "\n".join(found)
    tree = ast.parse("def f():\n    from rich.table import Table\n    import matplotlib.figure")
    names = ["matplotlib.figure", "rich.table"]
    assert drawn_with("phalanx.cli.plan", tree) == [f"phalanx.cli.plan: {n}" for n in names]
    assert drawn_with("phalanx.report.terminal", tree) == []


AXES = ("context", "pipeline", "tensor")
"""The folders of `parallel/`, an axis each."""

REGISTRY = "phalanx.parallel.plan"
"""The one module beside them that knows the axes: it lists their splits."""


def axis_of(module: str) -> str:
    """Return the axis in whose folder a module is; "" where it is in none."""
    names = module.split(".")
    return names[2] if names[1] == "parallel" and len(names) > 3 and names[2] in AXES else ""


def foreign_axes(module: str, tree: ast.AST) -> list[str]:
    """Return what a module of `parallel` imports of axes that are not its own."""
    if room_of(module) != "parallel" or module == REGISTRY:
        return []
    known = ("", axis_of(module))
    return [f"{module}: {other}" for other in sorted(imported(tree)) if axis_of(other) not in known]


def test_axes_do_not_know_each_other() -> None:
    found = [one for module, tree in trees().items() for one in foreign_axes(module, tree)]
    assert not found, "\n".join(found)


def test_the_rule_of_axes_can_fail() -> None:
    tree = ast.parse("def f():\n    from phalanx.parallel.tensor.spec import Spec")
    other = "phalanx.parallel.tensor.spec"
    for module in ("phalanx.parallel.context.ring", "phalanx.parallel.recompute"):
        assert foreign_axes(module, tree) == [f"{module}: {other}"]
    for module in ("phalanx.parallel.tensor.layout", REGISTRY, "phalanx.verify.trace"):
        assert not foreign_axes(module, tree)


def test_contributing_lists_the_files_that_name_an_axis() -> None:
    """Outside of its folder, context parallelism is named where CONTRIBUTING.md says, and no more.

    Files that only follow a table of axes do not name one; an axis may need ten at most.
    """
    name = re.compile(r"\bcp\b|[Cc]ontext parallel|parallel\.context|[Uu]lysses")
    naming = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "context" not in path.parts and name.search(path.read_text(encoding="utf-8"))
    }
    listed, _ = files_of_axes()
    assert naming == listed
    assert len(listed) <= 10


def test_contributing_lists_the_files_whose_code_names_ep() -> None:
    def names_ep(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "phalanx.parallel.expert_split"
        return (isinstance(node, ast.Constant) and node.value == "ep") or (
            isinstance(node, ast.Attribute) and node.attr == "ep"
        )

    naming = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(map(names_ep, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    _, listed = files_of_axes()
    assert naming - {"parallel/expert_split.py"} == listed


def files_of_axes() -> tuple[set[str], set[str]]:
    """Return the files that CONTRIBUTING.md lists for context parallelism, and for experts."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    of_cp, _, of_ep = page.partition("### An axis")[2].partition("Expert parallelism splits")
    found = [
        {
            word
            for line in of.splitlines()
            for word in re.findall(r"`([\w/]+\.py)`", line.partition("|")[2].partition("|")[0])
        }
        for of in (of_cp, of_ep)
    ]
    return found[0], found[1]


def test_the_rule_can_fail() -> None:
    tree = ast.parse("def f():\n    from phalanx.cli import main\n    import phalanx.launch.local")
    assert {room_of(name) for name in imported(tree)} == {"cli", "launch"}
    assert offenders("phalanx.data.order", tree) == [
        "phalanx.data.order: data may not import phalanx.cli"
    ]
    assert offenders("phalanx.attic", tree) == [
        "phalanx.attic: attic is not on the map; see docs/architecture.md"
    ]


def test_light_modules_load_no_torch() -> None:
    light = ("phalanx", "phalanx.strategy", "phalanx.config", "phalanx.config.load")
    code = (
        f"import sys\nfor name in {(*light, 'phalanx.cli.main')}:\n    __import__(name)\n"
        "    for heavy in {'torch', 'numpy'} & {*sys.modules}:\n"
        "        sys.exit(name + ' loads ' + heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=280, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def test_the_public_names() -> None:
    assert sorted(phalanx.__all__) == [
        "Callback",
        "DistributedOptimizer",
        "Muon",
        "Options",
        "Run",
        "Strategy",
        "Summary",
        "TrainConfig",
        "Trainer",
        "__version__",
        "average_gradients",
        "decoder_of",
        "from_deepspeed",
        "init",
        "muon_groups",
        "run_ranks",
        "train_decoder",
        "verify_strategy",
    ]
    assert dir(phalanx) == sorted(phalanx.__all__)  # which a shell completes by Tab
    with pytest.raises(AttributeError, match="no attribute 'Strateg'"):
        _ = phalanx.Strateg


def test_each_public_name_can_be_called() -> None:
    names = ("Strategy", "TrainConfig", "train_decoder", "verify_strategy")
    assert all(callable(getattr(phalanx, name)) for name in names)
