"""Find the blocks of a model, what recomputation and sharding cut along, and its ends."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from phalanx.errors import StrategyError


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of each element of the outermost ModuleLists, in order of registration.

    A list inside a block (the experts of a layer, say) is part of that block. A list whose elements
    are lists themselves holds no blocks of its own: containers have no forward to cut along.

    Returns:
        Names as in `model.named_modules()`, each module once; empty without any ModuleList.
    """
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if isinstance(module, nn.ModuleList) and not is_container:
                found.setdefault(child, path)
            else:
                visit(child, path)

    visit(model, "")
    return [(name, block) for block, name in found.items()]


def ends_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of a model's `ends`: of modules before its blocks, and after them.

    fsdp gathers them when they run, and not with the rest. The backward of the former reads none of
    their parameters, like the backward of a look-up.

    Raises:
        StrategyError: one of them is not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    given: Iterable[Iterable[nn.Module]] = getattr(model, "ends", ((), ()))
    for module in (module for modules in given for module in modules):
        if module not in names:
            raise StrategyError(
                f"fsdp: the `ends` of {type(model).__name__} list a {type(module).__name__} that "
                "is not a module of it; expected submodules"
            )
    return tuple(tuple(names[module] for module in modules) for modules in given)
