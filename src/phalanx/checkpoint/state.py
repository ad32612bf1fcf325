"""The named tensors of a checkpoint, and their loading under any strategy and number of ranks.

    model.<name>                parameters and persistent buffers, by the model's own names
    optimizer.<name>.<key>      optimizer state of the parameter <name>, such as exp_avg
    generators.<device>         states of torch's random generators, a row for each rank
    registered.<name>...        objects that a script registered, see phalanx.checkpoint.registered

Names do not depend on the strategy: a sharded tensor (DTensor) and a replicated one are each one
full tensor under one name. A tied parameter is saved once, under the first of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.encoding import generators_of, set_generators
from phalanx.checkpoint.files import open_tensors, verify
from phalanx.checkpoint.frozen import check_frozen
from phalanx.checkpoint.index import Index
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.optimizer_state import (
    AT_OWNERS,
    DRY_SHAPE,
    AnyOptimizer,
    check_state_keys,
    check_values,
    dry_state,
    parameter_and_key,
    parts_of,
)
from phalanx.checkpoint.registered import is_extra_state
from phalanx.checkpoint.sharding import ShardedAxis, Sharding, sharding_of
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.comm import local_shard
from phalanx.comm.together import all_or_none, first_object, gather_objects, on_first_rank
from phalanx.errors import CheckpointError
from phalanx.parallel.reduce import is_fused

ADAM = ("exp_avg", "exp_avg_sq")
"""Moments of an optimizer that cannot step a dummy parameter."""


class LocalShard(NamedTuple):
    """This rank's shard of a tensor of the checkpoint, and the tensor's sharding."""

    sharding: Sharding
    local: torch.Tensor


def local_shards(
    model: nn.Module, optimizer: AnyOptimizer, beside: Mapping[str, torch.Tensor]
) -> dict[str, LocalShard]:
    """Return this rank's shards of all tensors to save, by name, without copying them.

    Args:
        model: sharded model.
        optimizer: optimizer of its parameters.
        beside: further tensors; rank 0's value is saved of a tensor that is not a DTensor.

    Raises:
        CheckpointError: see `state_of`.
    """
    weights = {f"model.{name}": tensor for name, tensor in weights_of(model).items()}
    buffers = {n for n, tensor in weights.items() if not isinstance(tensor, nn.Parameter)}
    held = {
        name: _held(tensor, is_buffer=name in buffers)
        for name, tensor in state_of(model, optimizer).items()
    }
    for name, tensor in beside.items():
        held[name] = _held(tensor, is_buffer=not isinstance(tensor, DTensor))
    return held | _generator_shards(generators_of(model))


def local_shards_with_moments(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, LocalShard]:
    """Return `local_shards` with an entry for each moment that the first step will make.

    The parameter itself, which has the same size, stands in for the missing moment. Frozen weights,
    which a checkpoint leaves out unless they change, have no entry.
    """
    held = local_shards(model, optimizer, {})
    for name, tensor in weights_of(model).items():
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            del held[f"model.{name}"]
    kept: dict[torch.Tensor, Sequence[str]] = {}
    for part, group in [(p, group) for p in parts_of(optimizer) for group in p.param_groups]:
        state = dry_state(part, group)
        values = {} if state is None else {k: getattr(v, "shape", None) for k, v in state.items()}
        keys = [key for key, shape in values.items() if shape == DRY_SHAPE]
        kept |= dict.fromkeys(group["params"], ADAM if state is None else keys)
    for name, parameter in _trained(weights_of(model), optimizer).items():
        for key in kept[parameter]:
            held.setdefault(f"optimizer.{name}.{key}", _held(parameter))
        steps = torch.zeros((), dtype=torch.float32)
        held.setdefault(f"optimizer.{name}.step", LocalShard(sharding_of(steps), steps))
    return held


def _held(tensor: torch.Tensor, *, is_buffer: bool = False) -> LocalShard:
    sharding = replace(sharding_of(tensor), is_buffer=is_buffer)
    return LocalShard(sharding, local_shard(tensor.detach()))


def is_on_all_stages(name: str) -> bool:
    """Return whether all pipeline stages hold shards of the tensor `name`."""
    return name.startswith("generators.")


def state_of(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state by name, without copying them.

    A parameter without optimizer state, for example before the first step, has no such entry.

    Raises:
        CheckpointError: optimizer state is not a tensor, or is neither 0-d nor of the parameter's
            shape, or is at owners; or the optimizer updates a parameter that is not in the model.
    """
    for part in parts_of(optimizer):
        if getattr(part, "state_at_owners", False):
            raise CheckpointError(f"the {type(part).__name__} {AT_OWNERS}")
    weights = weights_of(model)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, parameter in _trained(weights, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:  # momentum_buffer of SGD without momentum
                continue
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"the optimizer's {key} of {name} is {value!r}; only tensors can be saved"
                )
            if value.ndim and value.shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} has the shape {list(value.shape)}, the "
                    f"parameter {list(parameter.shape)}; only numbers and tensors of the "
                    "parameter's shape can be saved"
                )
            state[f"optimizer.{name}.{key}"] = value
    return state


MakeTensors = Callable[[Index], Mapping[str, torch.Tensor]]
"""Returns empty tensors for entries besides model and optimizer, or raises a CheckpointError."""


def load(
    folder: Path,
    model: nn.Module,
    optimizer: AnyOptimizer,
    room_beside: MakeTensors = lambda _: {},
    take: Callable[[Mapping[str, torch.Tensor]], None] = lambda _: None,
) -> Mapping[str, torch.Tensor]:
    """Load weights, optimizer state and generators; every rank calls this together.

    Hyperparameters of the optimizer (betas, weight decay) do not change. Generator states belong to
    ranks and devices, so they are loaded only if the same number of ranks on the same kind of
    device saved them; the run's own draws use other generators. The weights are written last, after
    all checks and after `take`, which receives the tensors of `room_beside`, filled.

    Returns:
        The tensors that `room_beside` returned, filled from the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint has no optimizer state, or
            is of another model or optimizer, or `take` raised it. The weights are partly loaded
            only if a file can no longer be read that could be read for its checksum.
    """
    doing = f"cannot load {folder}"
    about, tensors = _open(folder, doing)
    weights = weights_of(model)
    elsewhere = _names_on_other_stages(tensors, weights)
    trained = _trained(weights, optimizer)

    stored = {name: tensor for name, tensor in weights.items() if name not in about.frozen}

    def make_room() -> dict[str, torch.Tensor]:
        about.check_optimizer()
        _check_weights(tensors, stored, elsewhere)
        # Zeros for the optimizer's state, sharded as the parameters are. torch.optim keeps a step
        # count on the device of fused and capturable optimizers, else on the CPU.
        on_device = {
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if group.get("fused") or group.get("capturable")
        }
        moments: dict[str, torch.Tensor] = {}
        for stored_name in sorted(tensors):
            if not stored_name.startswith("optimizer."):
                continue
            name, key = parameter_and_key(stored_name)
            if name in elsewhere:
                continue
            if name not in trained:
                raise CheckpointError(
                    f"it has optimizer state of {brief(name)}, which this run does not train"
                )
            parameter = trained[name]
            if key == "step" or not tensors[stored_name].layout.shape:
                device = parameter.device if parameter in on_device else "cpu"
                dtype = tensors[stored_name].dtype
                moments[stored_name] = torch.zeros((), dtype=dtype, device=device)
            else:
                moments[stored_name] = torch.zeros_like(parameter, requires_grad=False)
            _check_tensor(tensors, stored_name, f"{key} of {name}", moments[stored_name])
        check_state_keys(moments, trained, optimizer)
        return moments

    moments = all_or_none(make_room, doing)
    check_frozen(about.frozen, weights, doing)
    beside = all_or_none(lambda: room_beside(tensors), doing)
    held = {name: _held(tensor) for name, tensor in (moments | {**beside}).items()}
    generators = {device: torch.empty_like(value) for device, value in generators_of(model).items()}
    rows = _generator_shards(generators)
    # Generators are loaded only if as many ranks on the same kind of device saved them.
    saved = {name: (each.layout.shape, each.dtype) for name, each in tensors.items()}
    if all(saved.get(n) == (row.sharding.shape, row.sharding.dtype) for n, row in rows.items()):
        held |= rows
    else:
        generators = {}
    # All that can be refused is read and checked first, and the weights are written last:
    #
    #     1. room for moments and registered objects    names, shapes and data types are checked
    #     2. fill the room                              the moments' values are checked
    #     3. generators, then `take`                    both are undone if either raises
    #     4. the weights                                a file that fails now leaves a part loaded
    _read(folder, about, tensors, held, doing)
    all_or_none(lambda: check_values(moments), doing)
    before = generators_of(model)
    try:
        all_or_none(lambda: set_generators(generators), doing)
        all_or_none(lambda: take(beside), doing)
    except CheckpointError:
        set_generators(before)
        raise
    ours = {f"model.{name}": _held(tensor) for name, tensor in stored.items()}
    _read(folder, about, tensors, ours, doing)
    for parameter in trained.values():
        optimizer.state[parameter] = {}
    for stored_name, value in moments.items():
        name, key = parameter_and_key(stored_name)
        optimizer.state[trained[name]][key] = value
    return beside


def load_weights(path: Path, model: nn.Module) -> Path:
    """Load only the weights, under any strategy; every rank calls this together.

    Args:
        path: a checkpoint, or the folder of a run, whose latest checkpoint is loaded.
        model: sharded model.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing or damaged, or the checkpoint is
            of another model; the weights may then be partly loaded.
    """
    weights = weights_of(model)

    def load_from(folder: Path) -> Path:
        doing = f"cannot load the weights in {folder}"
        about, tensors = _open(folder, doing)
        elsewhere = _names_on_other_stages(tensors, weights)
        stored = {name: tensor for name, tensor in weights.items() if name not in about.frozen}
        all_or_none(lambda: _check_weights(tensors, stored, elsewhere), doing)
        check_frozen(about.frozen, weights, doing)
        held = {f"model.{name}": _held(tensor) for name, tensor in stored.items()}
        _read(folder, about, tensors, held, doing)
        return folder

    doing = f"cannot load the weights in {path}"
    return manifest.read_found(path, load_from, lambda work: on_first_rank(work, doing))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, a tied one once.

    Extra states of modules are excluded, because `registered` saves them. The names come from
    `state_dict`, whose hook makes FSDP2 reshard; `named_parameters` may return unsharded copies.

    Raises:
        CheckpointError: a rank's shard of a fused tensor is several pieces of the full tensor.
    """
    names: dict[torch.Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_extra_state(name):
            continue
        if is_fused(tensor):
            raise CheckpointError(
                f"'{name}' contains several linear maps, each split over tp separately, but a file "
                "stores one piece of a tensor per rank; save and load without tp, or use separate "
                "modules for the maps"
            )
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def _trained(weights: dict[str, torch.Tensor], optimizer: AnyOptimizer) -> dict[str, torch.Tensor]:
    """Return the parameters in all groups of the optimizer, by name."""
    names = {tensor: name for name, tensor in weights.items()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in trained):
        raise CheckpointError("the optimizer updates a parameter that is not in the model")
    return {names[parameter]: parameter for parameter in trained}


def _generator_shards(states: dict[str, torch.Tensor]) -> dict[str, LocalShard]:
    """Return this rank's generator states, each a row of a tensor sharded over all ranks."""
    num_ranks = dist.get_world_size()
    axes = (ShardedAxis(Shard(0), num_ranks, 1),) if num_ranks > 1 else ()
    return {
        f"generators.{device}": LocalShard(
            Sharding((num_ranks, state.numel()), state.dtype, axes), state[None]
        )
        for device, state in states.items()
    }


def _open(folder: Path, doing: str) -> tuple[Manifest, Index]:
    """Verify the files, distributed over the ranks; return the manifest and the index."""
    about = on_first_rank(lambda: manifest.read(folder), doing)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    all_or_none(lambda: verify(folder, about, rank, num_ranks), doing)

    def read_index() -> Index:
        tensors = index.read(folder / about.save, about.files)
        for name in tensors:
            kind, _, rest = name.partition(".")
            is_known = rest in ("cpu", "cuda") if kind == "generators" else bool(rest)
            if kind not in ("model", "optimizer", "generators", "registered") or not is_known:
                raise CheckpointError(
                    f"it is not the state of a run: it has the tensor {brief(name)}"
                )
        return tensors

    return about, on_first_rank(read_index, doing)


def _read(
    folder: Path, about: Manifest, tensors: Index, held: dict[str, LocalShard], doing: str
) -> None:
    """Fill this rank's shards `held` from the files of the checkpoint."""
    rank = dist.get_rank()
    wanted = {name: (each.local, each.sharding.box(rank)) for name, each in held.items()}
    files = partial(open_tensors, folder, about)
    all_or_none(lambda: index.load(files, tensors, wanted), doing)


def _names_on_other_stages(tensors: Index, weights: dict[str, torch.Tensor]) -> set[str]:
    """Return names of weights that only other pipeline stages hold; all ranks call this."""
    stored = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    missing = stored.difference(weights)
    if first_object("some" if missing else None) is None:
        return set()
    return set[str]().union(*gather_objects(list(weights))).difference(weights)


def _check_weights(tensors: Index, weights: dict[str, torch.Tensor], elsewhere: set[str]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the weights of this model."""
    for name, tensor in weights.items():
        _check_tensor(tensors, f"model.{name}", name, tensor)
    for stored_name in sorted(tensors):
        name = stored_name.removeprefix("model.")
        if name != stored_name and name not in weights and name not in elsewhere:
            raise CheckpointError(f"it is of another model: this one has no tensor {brief(name)}")


def _check_tensor(tensors: Index, stored_name: str, what: str, tensor: torch.Tensor) -> None:
    stored = tensors.get(stored_name)
    if stored is None:
        problem = f"it has no tensor {what}"
    elif stored.layout.shape != tuple(tensor.shape):
        problem = (
            f"its {what} has the shape {brief(list(stored.layout.shape))}, this model's "
            f"{list(tensor.shape)}"
        )
    elif stored.dtype != tensor.dtype and not (
        stored.dtype.is_floating_point and tensor.dtype.is_floating_point
    ):
        problem = f"its {what} is of {stored.dtype}, this model's of {tensor.dtype}"
    else:
        return
    raise CheckpointError(f"it is of another model: {problem}")
