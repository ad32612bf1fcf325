"""Count what is large or scattered in the source: `python tests/house.py` prints one table.

Lines, private functions that are called once, and files that draw are read from the source.
The state of a step and the files that it enters are those of an own loop on two ranks: an MLP of
six tensors under dp2 and fsdp2, its third step.
"""

from __future__ import annotations

import ast
import gc
import io
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src/phalanx"
DRAWING = ("rich", "matplotlib")
STATE_ROOMS = ("script", "train", "data", "checkpoint")
"""Rooms whose objects count as state of a step; comm and parallel hold the state of the split."""


def room_of(path: Path) -> str:
    """Return the room of a file: its folder in phalanx, or the name of a file on top."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def lines_by_room() -> dict[str, int]:
    """Return the lines of each room, blank ones too."""
    lines: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        lines[room_of(path)] += len(path.read_text().splitlines())
    return dict(lines.most_common())


def comment_share() -> float:
    """Return the part of all lines that have a comment alone; pragmas do not count."""
    num_lines = num_comments = 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        num_lines += len(text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_alone = token.line.lstrip().startswith("#")
            is_pragma = token.string.startswith(("# pyright", "# noqa", "# fmt", "# ruff"))
            num_comments += token.type == tokenize.COMMENT and is_alone and not is_pragma
    return num_comments / num_lines


def private_functions() -> dict[str, int]:
    """Return each private function, as `file:line name`, and how often its name is used."""
    functions: list[tuple[str, str]] = []
    uses: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.startswith("__"):
                    where = f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
                    functions.append((where, node.name))
            elif isinstance(node, ast.Name):
                uses[f"{path} {node.id}"] += 1
            elif isinstance(node, ast.Attribute):
                uses[f"{path} {node.attr}"] += 1
    return {where: uses[f"{SOURCE / where.partition(':')[0]} {name}"] for where, name in functions}


def drawing_files() -> list[str]:
    """Return the files that import rich or matplotlib, wherever in the file."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules: Iterable[str] = ()
            if isinstance(node, ast.Import):
                modules = (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules = (node.module or "",)
            if any(module.partition(".")[0] in DRAWING for module in modules):
                found.add(str(path.relative_to(SOURCE)))
    return sorted(found)


def state_of(*roots: Any) -> dict[str, int]:
    """Return the classes of phalanx whose objects `roots` reach, and the fields of each.

    A field counts once, however many objects of the class there are.
    """
    rooms = tuple(f"phalanx.{room}." for room in STATE_ROOMS)
    fields: dict[str, set[str]] = {}
    seen: set[int] = set()
    todo = [*roots]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | Enum):
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | tuple | set | frozenset):
            todo += gc.get_referents(each)
        elif f"{type(each).__module__}.".startswith(rooms):
            values = {
                **getattr(each, "__dict__", {}),
                **{
                    slot: getattr(each, slot)
                    for slot in getattr(type(each), "__slots__", ())
                    if hasattr(each, slot)
                },
            }
            name = f"{type(each).__module__.removeprefix('phalanx.')}.{type(each).__qualname__}"
            fields.setdefault(name, set()).update(values)
            todo += values.values()
    return {name: len(names) for name, names in fields.items()}


def watched_step(strategy: str) -> tuple[list[str], dict[str, int]]:
    """Take three steps on this rank; return the files that the third enters, and the state."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import phalanx

    run = phalanx.init(strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    entered: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        del event, argument
        name = frame.f_code.co_filename
        if name.startswith(str(SOURCE)):
            entered.add(str(Path(name).relative_to(SOURCE)))

    batches = iter(loader)
    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        x, y = next(batches)
        outputs, y = run.gather(model(x), y)
        run.backward(nn.functional.mse_loss(outputs, y))
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
    return sorted(entered), state_of(run, loader)


def table() -> list[tuple[str, str]]:
    """Return the rows: what is counted, and its number."""
    from phalanx.launch.local import run_ranks

    lines = lines_by_room()
    once = [where for where, uses in private_functions().items() if uses == 1]
    drawing = drawing_files()
    rows = [
        ("lines of src", f"{sum(lines.values()):,}"),
        *((f"  {room}", f"{count:,}") for room, count in lines.items()),
        ("comments, of all lines", f"{comment_share():.1%}"),
        ("private functions", f"{len(private_functions()):,}"),
        ("  called once", f"{len(once):,}"),
        ("files that import rich or matplotlib", f"{len(drawing)}"),
        ("  their rooms", " ".join(sorted({each.partition("/")[0] for each in drawing}))),
    ]
    for strategy in ("dp2", "fsdp2"):
        entered, state = run_ranks(watched_step, 2, strategy, threads=1)[0]
        rows += [
            (f"files entered in a step of an own loop, {strategy}", f"{len(entered)}"),
            (f"fields of the state of such a step, {strategy}", f"{sum(state.values())}"),
            *((f"  {name}", f"{count}") for name, count in sorted(state.items())),
        ]
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for what, number in table():
        sys.stdout.write(f"{what:<64}{number:>8}\n")
