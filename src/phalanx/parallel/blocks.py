"""Find the blocks of a model: what recomputation and sharding cut along."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of each element of the outermost ModuleLists, in order of registration.

    A list inside a block (the experts of a layer, say) is part of that block. A list whose elements
    are lists themselves holds no blocks of its own: containers have no forward to cut along.

    Args:
        model: any module.

    Returns:
        Names as in `model.named_modules()`, each module once; empty without any ModuleList.
    """
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(module, nn.ModuleList) and not _is_container(child):
                found.setdefault(child, path)
            else:
                visit(child, path)

    visit(model, "")
    return [(name, block) for block, name in found.items()]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
