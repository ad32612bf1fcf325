"""Find the blocks of a model, the units of recomputation and sharding, and its ends."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from phalanx.errors import StrategyError


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of each element of the outermost ModuleLists, in order of registration.

    A list inside a block, such as the experts of a layer, is part of that block. Elements that are
    ModuleLists or ModuleDicts are not blocks, because they have no forward; they are searched.

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
    """Return the names of the modules in a model's `ends`: before its blocks, and after them.

    fsdp gathers each of the two when it runs, instead of with the rest of the model. The backward
    of the modules before the blocks must not read their parameters, as in an embedding look-up.

    Raises:
        StrategyError: a listed module is not a submodule of the model.
    """
    names = {module: name for name, module in model.named_modules()}
    given: Iterable[Iterable[nn.Module]] = getattr(model, "ends", ((), ()))
    for module in (module for modules in given for module in modules):
        if module not in names:
            raise StrategyError(
                f"fsdp: the `ends` of {type(model).__name__} list a {type(module).__name__} that "
                "is not a submodule of the model; expected submodules"
            )
    return tuple(tuple(names[module] for module in modules) for modules in given)
