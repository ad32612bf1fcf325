"""What must stay of a model as it was prepared, while a script trains it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

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
        """Refuse parameters that are not as they were prepared.

        Raises:
            ScriptError: one was moved, cast, added, replaced, or frozen where shards do not follow.
        """
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
