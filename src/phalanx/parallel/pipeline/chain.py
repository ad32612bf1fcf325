"""The modules of a chain in their model; a `PlaceholderModule` replaces modules of other ranks.

The parameters of a replaced module are removed with it, except a weight that the first and the last
stage read: it keeps its name on the ranks of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.links import children
from phalanx.parallel.pipeline.stage import Absent


class PlaceholderModule(Absent):
    """Placeholder for a module outside of the running stage.

    It has the attributes of the module, with parameters on the meta device, because a model may
    read, for example, the dtype of its first layer. None of the parameters is registered.
    """

    def __init__(self, of: nn.Module, call: Callable[[Sequence[Any]], Any]) -> None:
        super().__init__()
        self.__dict__ |= _outline(of)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function given to the constructor: it returns a stand-in or ends the forward."""
        return self._call([*args, *kwargs.values()])


def _outline(of: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, with parameters on the meta device and child outlines."""
    outline = {k: v for k, v in vars(of).items() if not k.startswith("_") and k != "forward"}
    parameters = of.named_parameters(recurse=False)
    outline |= {name: torch.empty_like(each, device="meta") for name, each in parameters}
    return outline | {name: SimpleNamespace(**_outline(child)) for name, child in children(of)}


class Chain:
    """The modules of the links of a chain, and their placeholders.

    Attributes:
        stage_of: name of a module of a link -> its stage.
        modules: name -> module, for the modules on this rank.
        tied: name of the weight that the first and the last stage read, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Mapping[str, int],
        tied: str | None,
        call_absent: Callable[[str, Sequence[Any]], Any],
    ) -> None:
        """Collect the modules; a placeholder calls `call_absent` with its name and arguments."""
        self.stage_of = stage_of
        self.modules = {name: model.get_submodule(name) for name in stage_of}
        self._model = model
        self._absent = {
            name: PlaceholderModule(module, functools.partial(call_absent, name))
            for name, module in self.modules.items()
        }
        # Link module -> all its names in the model, except names within another link.
        self._paths = {name: [name] for name in stage_of}
        name_of = {module: name for name, module in reversed(self.modules.items())}
        for path, module in model.named_modules(remove_duplicate=False):
            if module in name_of and not self._is_in_link(path):
                self._paths[name_of[module]].append(path)
        self.tied = tied

    def keep(self, stages: Sequence[int], *, holds_tied: bool) -> None:
        """Replace the modules outside of `stages` by placeholders, in place."""
        tied = None if self.tied is None else self._model.get_parameter(self.tied)
        gone = {name for name, stage in self.stage_of.items() if stage not in stages}
        # A module of an absent link may also have a name outside of links, by which a forward would
        # find it on this rank although its link is on another: a call by such a name is refused.
        kept = {m for n, each in self.modules.items() if n not in gone for m in each.modules()}
        link_of = {m: n for n in gone for m in self.modules[n].modules()}
        removed: list[str] = []
        for path, module in list(self._model.named_modules(remove_duplicate=False)):
            is_other = module in link_of and module not in kept and not self._is_in_link(path)
            if is_other and not any(path.startswith(f"{each}.") for each in removed):
                refuse = functools.partial(self._refuse_name, path, link_of[module])
                parent, _, child = path.rpartition(".")
                setattr(self._model.get_submodule(parent), child, PlaceholderModule(module, refuse))
                removed.append(path)
        for name in gone:
            self._put(name, self._absent[name])
        if self.tied is not None and tied is not None and holds_tied:
            self._hold(tied, self.tied, stages)
        # Drop the references, so that the modules of other ranks and their parameters are freed.
        self.modules = {name: m for name, m in self.modules.items() if name not in gone}

    def names(self, stage: int) -> list[str]:
        """Return the names of the modules of a stage."""
        return [name for name, of in self.stage_of.items() if of == stage]

    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage of this rank."""
        names = self.names(stage)
        return list(dict.fromkeys(p for name in names for p in self.modules[name].parameters()))

    @contextmanager
    def others_absent(self, stage: int) -> Generator[None]:
        """Replace the modules of all stages but `stage` by placeholders, until exit."""
        others = [name for name in self.modules if self.stage_of[name] != stage]
        for name in others:
            self._put(name, self._absent[name])
        try:
            yield
        finally:
            for name in others:
                self._put(name, self.modules[name])

    def _hold(self, parameter: nn.Parameter, name: str, stages: Sequence[int]) -> None:
        """Register the tied weight under its name in a placeholder, if its module is absent."""
        (link,) = (n for n in self.stage_of if name.startswith(f"{n}."))
        if self.stage_of[link] in stages:
            return
        module: nn.Module = self._absent[link]
        *path, last = name.removeprefix(f"{link}.").split(".")
        # The outline has child namespaces where named_parameters() would look for modules: each one
        # on the way to the weight becomes a module, so that the weight keeps its full name.
        for step in path:
            module.__dict__.pop(step, None)
            module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.__dict__.pop(last, None)
        module.register_parameter(last, parameter)

    def _is_in_link(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{name}.") for name in self.stage_of)

    def _refuse_name(self, path: str, link: str, _: Sequence[Any]) -> Any:
        raise StrategyError(
            f"pp: the forward of {type(self._model).__name__} calls '{path}', and the `chain` "
            f"names '{link}', which contains the same module; name in the `chain` the modules "
            "that the forward calls"
        )

    def _put(self, name: str, module: nn.Module) -> None:
        for path in self._paths[name]:
            parent, _, child = path.rpartition(".")
            setattr(self._model.get_submodule(parent), child, module)
