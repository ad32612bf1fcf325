"""What can be chosen by name, in a line each: strategies, and presets of models."""

from __future__ import annotations

from phalanx.models.registry import PRESETS
from phalanx.planner.model_shape import num_parameters
from phalanx.strategy import built


def strategy_help() -> str:
    """Return every strategy that is built, in a line each."""
    forms = built() | {"cut:4+5": "layers of each stage of pp, counting embedding and head"}
    width = max(map(len, forms))
    head = "strategies, joined by commas, such as dp2,fsdp2,recompute:full (dp with fsdp is HSDP):"
    return "\n".join([head, *(f"  {form:<{width}}  {about}" for form, about in forms.items())])


def preset_help() -> str:
    """Return every preset with its size, several in a line."""
    sizes = {name: _millions(num_parameters(shape).total) for name, shape in PRESETS.items()}
    cells = [f"{name} {size}" for name, size in sizes.items()]
    width = max(map(len, cells)) + 2
    num_columns = max(1, 78 // width)
    rows = [cells[at : at + num_columns] for at in range(0, len(cells), num_columns)]
    lines = ["  " + "".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    return "\n".join(["presets of --model, with their parameters:", *lines])


def _millions(number: int) -> str:
    # What rounds to 1,000 M is 1 B.
    return f"{number / 1e9:.3g} B" if number >= 999.5e6 else f"{number / 1e6:.3g} M"
