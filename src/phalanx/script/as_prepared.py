"""What must stay as it is while a script trains: of a model as prepared, of gradients as made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from phalanx.errors import ScriptError
from phalanx.parallel.reduce import GradientReducer


class AsPrepared:
    """Refuses a model whose parameters are no longer those that optimizers and ranks know."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        reducer: GradientReducer | None,
    ) -> None:
        self._model, self._parameters, self._reducer = model, parameters, reducer
        self._kept, self._held = _kept(parameters), _held(model)
        self._trained = [name for name, p in parameters.items() if p.requires_grad]

    def check(self, call: str) -> None:
        """Refuse parameters that are not as they were prepared."""
        now = _kept(dict(self._model.named_parameters()))
        if now != self._kept:
            name = next(name for name in now | self._kept if now.get(name) != self._kept.get(name))
            was, is_now = (kept.get(name, "not in the model") for kept in (self._kept, now))
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}; move, "
                "cast or extend the model before run.prepare"
            )
        held = _held(self._model)
        if name := next((name for name in held if held[name] is not self._held[name]), None):
            raise ScriptError(
                f"{call}: {name} was replaced after run.prepare by a tensor that the optimizers "
                "and the other ranks do not have; replace parameters and modules before "
                "run.prepare, or write into the prepared ones (run.load_state_dict, or copy_ "
                "under torch.no_grad)"
            )
        self._follow_trained(call)

    def _follow_trained(self, call: str) -> None:
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        if self._trained == list(trained):
            return
        if self._reducer is not None and not self._reducer.retrain(list(trained.values())):
            name = next(n for n in self._parameters if (n in self._trained) != (n in trained))
            was, is_now = ("trained", "frozen")[:: 1 if name in self._trained else -1]
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}, "
                "which shards do not follow; freeze for good before run.prepare, and for a "
                "while not at all: gradients that no optimizer steps change nothing; or use dp"
            )
        self._trained = list(trained)


def _kept(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return in words what must not change of each parameter once the model is prepared."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        for name, p in parameters.items()
    }


def _held(model: nn.Module) -> dict[str, object]:
    """Return by name what must stay the same object: each parameter, or the module that has it.

    FSDP2 puts gathered parameters into its modules, and refuses others there.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return dict(model.named_parameters())
    return {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


class MadeGradients:
    """Knows them again, and whether something has written to them."""

    def __init__(self) -> None:
        self._made: list[tuple[TensorWeakRef, int]] = []

    def note(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients that a backward has just made."""
        self._made = [(TensorWeakRef(each), version_of(each)) for each in gradients]

    def others(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients that are none of those."""
        made = {id(gradient()) for gradient, _ in self._made}
        return [gradient for gradient in gradients if id(gradient) not in made]

    def num_changed(self, gradients: Sequence[Tensor]) -> int:
        """Return how many have been written, replaced, added or taken away since."""
        made = {id(gradient()): version for gradient, version in self._made}
        kept = sum(made.get(id(gradient)) == version_of(gradient) for gradient in gradients)
        return max(len(made), len(gradients)) - kept


def version_of(tensor: Tensor) -> int:
    """Return how many times a tensor, or this rank's shard by itself, has been written."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor._version + tensor.to_local()._version
    return tensor._version
