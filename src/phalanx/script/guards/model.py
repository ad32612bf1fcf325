"""A prepared model that changes: optimizers would update tensors that the forward does not use.

Under dp a rank would train alone what it has replaced or cast; FSDP2 would overwrite it. Buffers
are in this file too: a forward that updates them from its rows makes evaluations differ by rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ScriptError
from phalanx.parallel.reduce import GradientReducer
from phalanx.script.checksums import digest_of


class ModelGuard:
    """Checks that a model still has the parameters it had when it was prepared."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        reducer: GradientReducer | None,
    ) -> None:
        self._model, self._parameters, self._reducer = model, parameters, reducer
        self._forms, self._objects = _forms(parameters), _objects(model)
        self._trained = [p.requires_grad for p in parameters.values()]

    def before(self, call: str, *, is_compared: bool = True) -> None:
        """Refuse parameters that were cast, moved or replaced; follow changed requires_grad.

        Unless `is_compared`, only requires_grad is followed, which scripts change while they train.
        """
        if is_compared:
            now = _forms(dict(self._model.named_parameters()))
            if now != self._forms:
                name = next(n for n in now | self._forms if now.get(n) != self._forms.get(n))
                was, is_now = (f.get(name, "not in the model") for f in (self._forms, now))
                raise ScriptError(
                    f"{call}: {name} was {was} when the model was prepared, and is {is_now}; move, "
                    "cast or extend the model before run.prepare"
                )
            objects = _objects(self._model)
            if name := next((n for n in objects if objects[n] is not self._objects[n]), None):
                raise ScriptError(
                    f"{call}: {name} was replaced after run.prepare by a tensor that the "
                    "optimizers and the other ranks do not have; replace parameters and modules "
                    "before run.prepare, or write into the prepared ones (run.load_state_dict, or "
                    "copy_ under torch.no_grad)"
                )
        trained = [p.requires_grad for p in self._parameters.values()]
        if self._trained == trained:
            return
        now_trained = [p for p in self._parameters.values() if p.requires_grad]
        if self._reducer is not None and not self._reducer.set_trained(now_trained):
            changed = zip(self._parameters, self._trained, trained, strict=True)
            name, has_trained = next((n, was) for n, was, is_now in changed if was != is_now)
            was, is_now = ("trained", "frozen")[:: 1 if has_trained else -1]
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}, which "
                "shards do not support; freeze a parameter before run.prepare and for the entire "
                "run, not temporarily: gradients that no optimizer uses have no effect; or use dp"
            )
        self._trained = trained


def _forms(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the dtype and device of each parameter as text; they must not change."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        for name, p in parameters.items()
    }


def _objects(model: nn.Module) -> dict[str, object]:
    """Return the objects that must not be replaced: each parameter, or under FSDP2 its module.

    FSDP2 itself replaces parameters in its modules by gathered ones, and refuses other tensors.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return dict(model.named_parameters())
    return {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def warn_of_buffers(model: nn.Module, comm: Comm) -> None:
    """Warn of buffers that differ between data ranks; every rank calls this together.

    Buffers are not reduced: evaluation uses each rank's own, and a checkpoint stores the first
    rank's.
    """
    if comm.size("data") == 1:
        return
    own = {name: digest_of([buffer]) for name, buffer in model.named_buffers()}
    where = tuple(comm.coord(axis) for axis in comm.axes if axis not in comm.axes_of("data"))
    first: dict[tuple[int, ...], dict[str, str]] = {}
    apart: set[str] = set()
    for place, theirs in gather_objects((where, own)):
        mine = first.setdefault(place, theirs)
        apart |= {name for name in mine if theirs.get(name) != mine[name]}
    if apart and comm.is_first:
        names = ", ".join(sorted(apart)[:3]) + (" and more" if len(apart) > 3 else "")
        warnings.warn(
            f"the buffers {names} differ between ranks after a step: the forward updates them from "
            "this rank's rows, and they are not summed over the ranks; use run.sum for the values "
            "that they count, or expect numbers that differ from one process",
            stacklevel=3,
        )
