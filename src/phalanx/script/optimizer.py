"""Fit a torch optimizer to a split model: the same parameter groups, with this rank's shards."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import local_shard
from phalanx.errors import ScriptError
from phalanx.parallel.plan import shard_of
from phalanx.parallel.reduce import is_fused

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.ASGD),
)
"""Elementwise optimizers: a step on a shard equals the shard of a step on the whole tensor."""

HELD = (
    "take an optimizer whose state is numbers and tensors of the parameter's shape, such as AdamW"
)

Names = Mapping[nn.Parameter, str]
"""Parameter of a model before it was split -> its name."""


def rebind(optimizer: torch.optim.Optimizer, before: Names, model: nn.Module) -> None:
    """Make an optimizer update the parameters of `model` instead of the ones `before` the split.

    Groups and their settings are kept, and objects that refer to the optimizer, such as a
    scheduler, stay valid. The optimizer state is cut to this rank's shards.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    ours = set(after.values())
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in ours and parameter not in before:
                raise ScriptError(
                    f"prepare: the {type(optimizer).__name__} updates a parameter of shape "
                    f"{tuple(parameter.shape)} in group {number} that the prepared model does not "
                    "have; make the optimizer from the parameters of that model; if the loss has "
                    "parameters, prepare one module with both, such as "
                    "nn.ModuleDict({'model': model, 'loss': loss})"
                )
        group["params"] = [p if p in ours else after[before[p]] for p in group["params"]]
    check_kind(optimizer, ours, "prepare")
    for parameter in cast(list[nn.Parameter], [p for p in optimizer.state if p not in ours]):
        new = after[before[parameter]]
        state = optimizer.state.pop(parameter)
        optimizer.state[new] = {key: _split(value, new) for key, value in state.items()}


def split_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut a whole state, as it was loaded, to this rank's shards of the parameters."""
    for parameter, state in cast("dict[nn.Parameter, Any]", optimizer.state).items():
        optimizer.state[parameter] = {key: _split(value, parameter) for key, value in state.items()}


def check_kind(
    optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter], where: str
) -> None:
    """Refuse an optimizer that is not in `ELEMENTWISE` if a parameter is a shard (DTensor)."""
    if any(isinstance(p, DTensor) for p in parameters) and not isinstance(optimizer, ELEMENTWISE):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ScriptError(
            f"{where}: {type(optimizer).__name__} does not support sharded parameters, which a "
            f"rank has under this strategy; use dp, or one of {names}"
        )


def check_schedules(schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a schedule that sets the learning rates of an optimizer that is not prepared."""
    prepared = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for scheduler in schedulers:
        own = getattr(scheduler, "optimizer", None)
        # An optimizer that wraps another, such as SAM, has the same group objects.
        if isinstance(own, torch.optim.Optimizer) and not any(
            id(group) in prepared for group in own.param_groups
        ):
            raise ScriptError(
                f"prepare: the {type(scheduler).__name__} sets the learning rate of "
                f"{type(own).__name__}, which is not prepared, so no learning rate of a prepared "
                "optimizer would change; make the scheduler from the optimizer that is given to "
                "run.prepare, in the same call or an earlier one"
            )


def _split(value: Any, parameter: nn.Parameter) -> Any:
    """Return this rank's shard of a state tensor of `parameter`; return other values unchanged."""
    if not isinstance(value, Tensor) or value.ndim == 0 or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.shape or is_fused(parameter):
        raise ScriptError(
            f"prepare: the optimizer has a state of shape {tuple(value.shape)} for a parameter of "
            f"shape {tuple(parameter.shape)}, which cannot be split like the parameter; prepare "
            "the optimizer before its first step"
        )
    shard, offset = shard_of(parameter)
    here = tuple(slice(o, o + n) for o, n in zip(offset, shard.shape, strict=True))
    split = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    local_shard(split).copy_(value[here])
    return split


def unsavable_state(state: Mapping[str, Any], shape: torch.Size) -> str:
    """Describe the first state value that a checkpoint cannot store; empty if there is none."""
    for key, value in state.items():
        if value is not None and not (isinstance(value, Tensor) and value.shape in ((), shape)):
            what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return (
                f"keeps a {key} {what} of a parameter of shape {list(shape)}, which a checkpoint "
                "cannot store"
            )
    return ""


def warn_of_state(optimizer: torch.optim.Optimizer) -> None:
    """Warn, on the first rank, if a checkpoint cannot store the state of a stepped optimizer."""
    for parameter, state in optimizer.state.items():
        if (words := unsavable_state(state, parameter.shape)) and dist.get_rank() == 0:
            warnings.warn(
                f"{type(optimizer).__name__} {words}: run.save will save only the weights, and end "
                f"the script; {HELD}",
                stacklevel=5,
            )
            return
