"""Detect changes of a prepared model and its buffers while a script trains.

Each rank has different rows. A forward that changes weights depending on its rows (max_norm) is
refused, and buffers that a forward changes differently on each rank cause a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.comm.comm import Comm
from phalanx.comm.together import gather_objects
from phalanx.errors import ConfigError, ScriptError
from phalanx.parallel.reduce import GradientReducer
from phalanx.script.drift import digest_of


class PreparedModelCheck:
    """Checks that a model still has the parameters it had when it was prepared."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        reducer: GradientReducer | None,
    ) -> None:
        self._model, self._parameters, self._reducer = model, parameters, reducer
        self._kept, self._held = _dtypes_and_devices(parameters), _objects_kept(model)
        self._trained = [p.requires_grad for p in parameters.values()]

    def check(self, call: str, *, is_quick: bool = False) -> None:
        """Refuse parameters that were cast, moved or replaced; follow changed requires_grad.

        If `is_quick`, only requires_grad is followed, which scripts change while they train.
        """
        if is_quick:
            self._follow_trained(call)
            return
        now = _dtypes_and_devices(dict(self._model.named_parameters()))
        if now != self._kept:
            name = next(name for name in now | self._kept if now.get(name) != self._kept.get(name))
            was, is_now = (kept.get(name, "not in the model") for kept in (self._kept, now))
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}; move, "
                "cast or extend the model before run.prepare"
            )
        held = _objects_kept(self._model)
        if name := next((name for name in held if held[name] is not self._held[name]), None):
            raise ScriptError(
                f"{call}: {name} was replaced after run.prepare by a tensor that the optimizers "
                "and the other ranks do not have; replace parameters and modules before "
                "run.prepare, or write into the prepared ones (run.load_state_dict, or copy_ "
                "under torch.no_grad)"
            )
        self._follow_trained(call)

    def _follow_trained(self, call: str) -> None:
        trained = [p.requires_grad for p in self._parameters.values()]
        if self._trained == trained:
            return
        now = [p for p in self._parameters.values() if p.requires_grad]
        if self._reducer is not None and not self._reducer.set_trained(now):
            changed = zip(self._parameters, self._trained, trained, strict=True)
            name, has_trained = next((n, was) for n, was, is_now in changed if was != is_now)
            was, is_now = ("trained", "frozen")[:: 1 if has_trained else -1]
            raise ScriptError(
                f"{call}: {name} was {was} when the model was prepared, and is {is_now}, which "
                "shards do not support; freeze a parameter before run.prepare and for the entire "
                "run, not temporarily: gradients that no optimizer uses have no effect; or use dp"
            )
        self._trained = trained


def _dtypes_and_devices(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the dtype and device of each parameter as text; they must not change."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        for name, p in parameters.items()
    }


def _objects_kept(model: nn.Module) -> dict[str, object]:
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


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse embeddings with max_norm: each forward rescales only the rows its rank uses."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise ConfigError(
                f"{type(module).__name__} '{name}' has a max_norm, so a forward rescales the "
                "weights of the rows that this rank looks up, but not their copies on other ranks; "
                "leave max_norm out, and scale the output instead"
            )


def warn_of_buffers(model: nn.Module, comm: Comm) -> None:
    """Warn of buffers that differ between data ranks; every rank calls this together.

    Buffers are not reduced: evaluation uses each rank's own, and a checkpoint stores the first
    rank's.
    """
    if comm.size("data") == 1:
        return
    own = {name: digest_of([buffer]) for name, buffer in model.named_buffers()}
    place = tuple(comm.coord(axis) for axis in comm.axes if axis not in comm.axes_of("data"))
    first: dict[tuple[int, ...], dict[str, str]] = {}
    apart: set[str] = set()
    for where, theirs in gather_objects((place, own)):
        mine = first.setdefault(where, theirs)
        apart |= {name for name in mine if theirs.get(name) != mine[name]}
    if apart and comm.is_first:
        names = ", ".join(sorted(apart)[:3]) + (" and more" if len(apart) > 3 else "")
        warnings.warn(
            f"the buffers {names} differ between ranks after a step: the forward updates them from "
            "this rank's rows, and they are not summed over the ranks; use run.sum for the values "
            "that they count, or expect numbers that differ from one process",
            stacklevel=3,
        )
