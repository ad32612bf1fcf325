"""What can be chosen by name, in a line each: strategies, and presets of models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from phalanx.models.registry import PRESETS
from phalanx.planner.model_shape import num_parameters

STRATEGIES: Final[Mapping[str, tuple[tuple[str, str], str]]] = MappingProxyType(
    {
        "dpN": (("dp", "bucketed"), "each process takes a share of the batch; all hold the model"),
        "dpN:naive": (("dp", "naive"), "the same, one all-reduce a gradient after backward"),
        "fsdpN": (("fsdp", "zero3"), "parameters, gradients and optimizer state are sharded too"),
        "fsdpN:zero2": (("fsdp", "zero2"), "parameters stay whole, the rest is sharded"),
        "fsdpN:zero1": (("fsdp", "zero1"), "only the optimizer state is sharded"),
        "tpN": (("tp", "1d"), "each layer is split, with sequence parallelism"),
        "tpN:megatron": (("tp", "megatron"), "each layer is split, activations stay whole"),
        "tpN:2d": (("tp", "2d"), "on a square of processes (SUMMA); N = 4, 9, 16 ..."),
        "tpN:2.5d/DEPTH": (("tp", "2.5d"), "on DEPTH squares; N = 8 and DEPTH 2, ..."),
        "tpN:3d": (("tp", "3d"), "on a cube of processes; N = 8, 27 ..."),
        "recompute:full": (("recompute", "full"), "backward runs each block again"),
        "recompute:every/K": (("recompute", "every"), "K blocks are run again as one"),
        "recompute:sqrt": (("recompute", "sqrt"), "segments of sqrt(L) of the L blocks"),
        "recompute:selective": (
            ("recompute", "selective"),
            "runs again all but matrix products and attention",
        ),
    }
)
"""Text form -> its axis and kind, and what it does."""


def strategy_help() -> str:
    """Return every strategy that is built, in a line each."""
    lines = [
        "strategies, joined by commas, such as dp2,fsdp2,recompute:full (dp with fsdp is HSDP):"
    ]
    return "\n".join([*lines, *_rows({name: text for name, (_, text) in STRATEGIES.items()})])


def preset_help() -> str:
    """Return every preset with its size, several in a line."""
    sizes = {name: _millions(num_parameters(shape).total) for name, shape in PRESETS.items()}
    cells = [f"{name} {size}" for name, size in sizes.items()]
    width = max(map(len, cells)) + 2
    num_columns = max(1, 78 // width)
    rows = [cells[at : at + num_columns] for at in range(0, len(cells), num_columns)]
    lines = ["  " + "".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    return "\n".join(["presets of --model, with their parameters:", *lines])


def _rows(texts: Mapping[str, str]) -> list[str]:
    width = max(map(len, texts))
    return [f"  {name:<{width}}  {text}" for name, text in texts.items()]


def _millions(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
