"""Fit a torch optimizer to a split model: the same parameter groups, with this rank's shards."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.optimizer_state import AT_OWNERS
from phalanx.comm.comm import Comm, local_shard
from phalanx.errors import ScriptError
from phalanx.parallel.plan import shard_of
from phalanx.parallel.reduce import is_fused
from phalanx.parallel.whole_matrix import Matrix, Owners, Round
from phalanx.train.optimizer import bind, not_owned

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


def rebind(optimizer: torch.optim.Optimizer, before: Names, model: nn.Module, comm: Comm) -> None:
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
    check_kind(optimizer, ours, "prepare", comm)
    for parameter in cast(list[nn.Parameter], [p for p in optimizer.state if p not in ours]):
        new = after[before[parameter]]
        state = optimizer.state.pop(parameter)
        optimizer.state[new] = {key: _split(value, new) for key, value in state.items()}


def split_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut a whole state, as it was loaded, to this rank's shards of the parameters."""
    for parameter, state in cast("dict[nn.Parameter, Any]", optimizer.state).items():
        optimizer.state[parameter] = {key: _split(value, parameter) for key, value in state.items()}


def check_kind(
    optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter], where: str, comm: Comm
) -> None:
    """Give owners to an optimizer of whole matrices; refuse another one of sharded parameters.

    Muon, and an optimizer with the attribute `whole_matrix`, get owners; every rank calls this
    together. Else an optimizer that is not in `ELEMENTWISE` is refused if a parameter is a DTensor.
    """
    if bind(optimizer, comm):
        return
    if getattr(optimizer, "whole_matrix", False):
        if comm.size("job") > 1:
            AtOwners(optimizer, comm)
        return
    if any(isinstance(p, DTensor) for p in parameters) and not isinstance(optimizer, ELEMENTWISE):
        names = ", ".join(kind.__name__ for kind in (*ELEMENTWISE, torch.optim.Muon))
        raise ScriptError(
            f"{where}: {type(optimizer).__name__} does not support sharded parameters, which a "
            f"rank has under this strategy; use dp, or one of {names}, or set its attribute "
            "whole_matrix to True if each parameter is updated by its own gradient alone"
        )


class AtOwners:
    """Steps of an optimizer on whole parameters, each at its owner, see parallel.whole_matrix.

        step_pre_hook    gather weights and gradients, and give the owned ones to the optimizer
        step             the optimizer's own, on the parameters that this rank owns
        step_post_hook   scatter the weights, and give the shards back to the optimizer

    The state of a parameter is with its owner, so a checkpoint does not have it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm) -> None:
        """Choose owners for all parameters of `optimizer`, and install the hooks."""
        if optimizer.state:
            raise ScriptError(
                f"prepare: {type(optimizer).__name__} is whole_matrix, and has stepped already; "
                "its owners keep the state; prepare it before its first step"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._index = {p: number for number, p in enumerate(parameters)}
        rows = [[range(p.shape[0] if p.ndim else 1)] for p in parameters]
        self._owners = Owners(comm, parameters, rows)
        self._wholes: dict[int, nn.Parameter] = {}
        self._shards: list[list[nn.Parameter]] = []
        # Nearest to the step: other hooks see the shards.
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        hooks: Any = optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
        hooks.move_to_end(next(reversed(hooks)), last=False)
        optimizer.state_at_owners = True  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        used = [n for p, n in self._index.items() if p.grad is not None]
        parameters = [cast(nn.Parameter, p) for p in self._owners.parameters]

        def weight_of(each: Matrix) -> Tensor:
            return each.local(local_shard(parameters[each.parameter].detach()))

        def gradient_of(each: Matrix) -> Tensor:
            return each.local(local_shard(cast(Tensor, parameters[each.parameter].grad)))

        for each, dtype in self._rounds(used):
            gradients = self._owners.gather(each, gradient_of, dtype)
            for matrix, weight in self._owners.gather(each, weight_of, dtype).items():
                shape = parameters[matrix.parameter].shape
                whole = self._wholes.setdefault(matrix.parameter, nn.Parameter(weight))
                whole.data, whole.grad = weight.reshape(shape), gradients[matrix].reshape(shape)
        self._used = used
        self._shards = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            whole = not_owned(optimizer, group["params"], self._owners)
            numbers = [self._index[p] for p in group["params"] if p in self._index]
            group["params"] = [*whole, *(self._wholes[n] for n in numbers if n in self._wholes)]

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, shards in zip(optimizer.param_groups, self._shards, strict=True):
            group["params"] = shards
        for each, dtype in self._rounds(self._used):
            wholes = {
                m: self._wholes[m.parameter].detach().view(m.shape)
                for m in each.matrices
                if m.parameter in self._wholes
            }
            for matrix, piece in self._owners.scatter(each, wholes, dtype).items():
                shard = local_shard(self._owners.parameters[matrix.parameter].detach())
                matrix.local(shard).copy_(piece)
        for whole in self._wholes.values():  # the state alone stays
            whole.data, whole.grad = whole.data.new_empty(0), None

    def _rounds(self, used: Sequence[int]) -> Iterator[tuple[Round, torch.dtype]]:
        for dtype in sorted({self._owners.parameters[n].dtype for n in used}, key=str):
            numbers = [n for n in used if self._owners.parameters[n].dtype == dtype]
            for each in self._owners.rounds(numbers, dtype.itemsize):
                yield each, dtype


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
    is_owned = getattr(optimizer, "state_at_owners", False)
    for parameter, state in optimizer.state.items():
        words = AT_OWNERS if is_owned else unsavable_state(state, parameter.shape)
        if words and dist.get_rank() == 0:
            warnings.warn(
                f"{type(optimizer).__name__} {words}: run.save will save only the weights, and end "
                f"the script; {HELD}",
                stacklevel=5,
            )
            return
