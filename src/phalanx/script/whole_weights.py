"""Gather and load the whole weights of a split model, and detect misuse of shards in a script.

A parameter under fsdp or tp is a DTensor, this rank's shard. Two lines of plain scripts fail with
it: `torch.save(model.state_dict())` would write shards as if they were weights, and
`model.load_state_dict(whole)` would raise an error of DTensor. Both raise a clear error here.
"""

from __future__ import annotations

import copy
import functools
import re
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import phalanx
from phalanx.checkpoint import state
from phalanx.checkpoint.registered import is_extra_state
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import Comm, fill_shard
from phalanx.comm.together import broadcast_object, first_object
from phalanx.errors import ScriptError
from phalanx.parallel.sharded import free_gathered

_TORCH: Final = Path(torch.__file__).parent
_OURS: Final = Path(phalanx.__file__).parent
_ARITHMETIC: Final = re.compile(r"aten\.(add|sub|mul|div)_?\.")


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the whole weights and buffers on the CPU; every rank calls this together.

    The result of a module's `get_extra_state` is copied from this rank.
    """

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu().clone()

    return {name: whole(value) for name, value in model.state_dict().items()}


@torch.no_grad()
def load_whole(model: nn.Module, given: Any, comm: Comm) -> None:
    """Load the first rank's whole weights, or a checkpoint's, into a model; all ranks call this.

    Raises:
        ScriptError: the weights are not of this model.
        CheckpointError: the folder has no checkpoint of this model.
    """
    if isinstance(given, str | Path):
        state.load_weights(Path(given), model)
        return
    # `keep_vars` returns the parameters themselves; FSDP2 first frees its gathered parameters.
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    problem = first_object(_problem(given, own) if comm.is_first else None)
    if problem is not None:
        raise ScriptError(f"load_state_dict: {problem}")
    extra = {n: given[n] for n in own if is_extra_state(n)} if given else None
    model.load_state_dict(broadcast_object(extra), strict=False)
    own = {name: value for name, value in own.items() if not is_extra_state(name)}
    dtypes = broadcast_object({n: given[n].dtype for n in own} if given else None)
    for name, tensor in own.items():
        whole = torch.empty(tensor.shape, dtype=dtypes[name], device=comm.device)
        if comm.is_first:
            whole.copy_(given[name])
        comm.broadcast(whole, "job")
        fill_shard(tensor, whole)


def _problem(given: Any, own: Mapping[str, Any]) -> str | None:
    """Return why weights do not fit a model with the state `own`; None if they fit."""
    if not isinstance(given, Mapping):
        return (
            f"the state is a {type(given).__name__} on the first rank; expected the result of "
            "run.state_dict() or of the plain model's state_dict(), or the folder of a checkpoint"
        )
    weights = cast("Mapping[Any, Any]", given)
    for name in [*own, *weights]:
        if name not in weights:
            return f"the state has no {brief(name)}, which the model has"
        if name not in own:
            return f"the state has {brief(name)}, which the model does not have"
        tensor = weights[name]
        if is_extra_state(name):
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != own[name].shape:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else brief(tensor)
            return f"{name} is {shape} in the state, and {list(own[name].shape)} in the model"
        if isinstance(tensor, DTensor):
            return (
                f"{name} is a shard of this rank, as model.state_dict() returns it; give the "
                "result of run.state_dict(), or load shards by model.load_state_dict"
            )
    return None


def explain_shard_error(error: BaseException) -> ScriptError | None:
    """Return a ScriptError for torch's errors on shards and freed weights; None for others."""
    if "setStorage" in str(error) and "out of bounds for storage of size 0" in str(error):
        return ScriptError(
            "backward reads weights of a block that fsdp has freed: the loss uses a tensor from "
            "within the block that is not in its output, such as one that a forward hook keeps; "
            "return that tensor from the forward of the block too, or use dp"
        ).with_traceback(error.__traceback__)
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    frames = [each for each, _ in traceback.walk_tb(error.__traceback__)]
    callers = [
        frame.f_code.co_filename
        for frame in frames
        if frame.f_code.co_name != "__torch_dispatch__"  # of modes that are on in the script
        and not Path(frame.f_code.co_filename).is_relative_to(_TORCH)
    ]
    if callers and Path(callers[-1]).is_relative_to(_OURS):  # raised in Phalanx, not in the script
        return None
    within = [own for f in frames if isinstance(own := f.f_locals.get("self"), nn.Module)]
    model = next((each for each in within if isinstance(each, FSDPModule)), None)
    if isinstance(model, nn.Module):
        name = next((name for name, each in model.named_modules() if each is within[-1]), "")
        return ScriptError(
            f"the forward of '{name or type(model).__name__.removeprefix('FSDP')}' reads a "
            "parameter of a block outside the forward of the block, which alone gathers its "
            "shards; read it in that forward, and return the result, or use dp"
        ).with_traceback(error.__traceback__)
    if _ARITHMETIC.search(str(error)):
        return ScriptError(
            "a parameter, or its gradient, is a shard of this rank, and here it is added to, or "
            "multiplied by, a whole tensor, such as noise; split that tensor in the same way: "
            "torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements, "
            "src_data_rank=None), drawn from a torch.Generator with one seed on all ranks; average "
            "weights by run.average(decay)"
        ).with_traceback(error.__traceback__)
    return ScriptError(
        "a parameter is a shard of this rank, and here an operation combines it with a whole "
        "tensor; call the model itself, since only model(...) gathers its shards; average weights "
        "by run.average(decay), not by an AveragedModel or another copy of the model; and load "
        "whole weights by run.load_state_dict"
    ).with_traceback(error.__traceback__)


def guard_shards(model: nn.Module, strategy: str) -> None:
    """Make a sharded model refuse to load whole weights, and its state_dict refuse pickling."""

    # The model is an argument, because a copy of the model copies the arguments of its hooks.
    def refuse(
        whole: nn.Module,
        names: Sequence[str],
        _: nn.Module,
        weights: Mapping[str, Any],
        prefix: str,
        *_more: Any,
    ) -> None:
        for name in names:
            value = weights.get(prefix + name)
            if value is not None and not isinstance(value, DTensor):
                raise ScriptError(
                    f"model.load_state_dict: {prefix}{name} is a whole tensor, but under "
                    f"{strategy} the model has shards; call run.load_state_dict(state) with the "
                    "weights of the whole model on every rank, or load them before run.prepare"
                )
        free_gathered(whole)  # else the shards would be copied to gathered tensors

    def as_shards(_: nn.Module, state_dict: Any, prefix: str, _metadata: Any) -> Any:
        if prefix:
            return None
        shards = _Shards(state_dict)
        shards.strategy = strategy
        vars(shards).update(vars(state_dict))  # torch stores `_metadata` there
        return shards

    for module in model.modules():
        own = module.named_parameters(recurse=False)
        if names := [name for name, parameter in own if isinstance(parameter, DTensor)]:
            module.register_load_state_dict_pre_hook(functools.partial(refuse, model, names))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        read_whole_numbers()
        for module in model.modules():
            # Private, and torch's only way to return another mapping;
            # tests/script/test_whole_weights.py pins it.
            cast(Any, module)._register_state_dict_hook(as_shards)


def read_whole_numbers() -> None:
    """Make `item()`, `float()` and `bool()` of a DTensor reduce its value over the ranks.

    Without this torch returns this rank's partial value, so that `parameter.grad.norm().item()`
    would be the norm of a shard. All ranks must make the call, because it is a collective.

    An initialization of a DTensor draws the whole tensor, as one process does. On a CPU torch
    would draw equal numbers for the shards of all ranks.
    """
    # Private, and torch's only way to change an operation of DTensor;
    # tests/script/test_whole_weights.py pins it.
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number
    for name in ("normal_", "uniform_"):
        handlers[getattr(torch.ops.aten, name).default] = _draw_whole


def _whole_number(_op: Any, args: tuple[DTensor, ...], _kwargs: Any) -> float:
    return args[0].full_tensor().item()


def _draw_whole(op: Any, args: tuple[Any, ...], kwargs: Any) -> DTensor:
    tensor, *rest = args
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    op(whole, *rest, **kwargs)
    fill_shard(tensor, whole)
    return tensor


class _Shards(OrderedDict[str, Any]):
    """A state_dict of shards that refuses to be pickled, so that no file has shards as weights."""

    strategy = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ScriptError(
            f"model.state_dict() under {self.strategy} has this rank's shards, and a file of "
            "shards cannot be loaded as weights; call state = run.state_dict() on every rank, and "
            "torch.save it on the first, or run.save"
        )

    def __deepcopy__(self, memo: Any) -> _Shards:
        copied = _Shards((name, copy.deepcopy(value, memo)) for name, value in self.items())
        vars(copied).update(vars(self))
        return copied
