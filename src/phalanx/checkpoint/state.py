"""What a checkpoint holds of a run, by name, and how it comes back: into any split, on any ranks.

    model.<name>                parameters and kept buffers, by the model's own names
    optimizer.<name>.<key>      the optimizer's state of the parameter <name>, such as exp_avg
    generators.<device>         states of torch's generators, a row for each rank

Nothing is said of who held what: a tensor that was split (DTensor), or held whole by every rank, is
one tensor under one name. A tie has the first of its names.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import index, manifest
from phalanx.checkpoint.files import verify
from phalanx.checkpoint.foreign import brief
from phalanx.checkpoint.index import Index
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.sharding import Sharding, one_row_each, sharding_of
from phalanx.comm.comm import local_shard
from phalanx.comm.together import all_or_none, on_first_rank
from phalanx.errors import CheckpointError
from phalanx.parallel.reduce import is_fused

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What an Adam keeps of each parameter beside the count of steps."""


class Held(NamedTuple):
    """What this rank holds of a tensor of the checkpoint, and how that lies over the ranks."""

    sharding: Sharding
    local: torch.Tensor


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Held]:
    """Return what this rank holds of a checkpoint: the tensors themselves, not copies.

    Raises:
        CheckpointError: see `state_of`.
    """
    held = {name: _held(tensor) for name, tensor in state_of(model, optimizer).items()}
    return held | _rows(_generators(model))


def held_once_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Held]:
    """Return `held_by` as it will be when each parameter has its moments.

    Those that are not there yet stand as the parameter itself, which is as large.
    """
    held = held_by(model, optimizer)
    for name, parameter in _trained(weights_of(model), optimizer).items():
        for key in MOMENTS:
            held.setdefault(f"optimizer.{name}.{key}", _held(parameter))
        steps = torch.zeros((), dtype=torch.float32)
        held.setdefault(f"optimizer.{name}.step", Held(sharding_of(steps), steps))
    return held


def _held(tensor: torch.Tensor) -> Held:
    return Held(sharding_of(tensor), local_shard(tensor.detach()))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state: the tensors themselves, not copies.

    A parameter that no step has used yet has no state in the optimizer, and none here.

    Raises:
        CheckpointError: the optimizer keeps what is no tensor, or for a parameter of another model.
    """
    weights = weights_of(model)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, parameter in _trained(weights, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"the optimizer's {key} of {name} is {value!r}; only tensors can be saved"
                )
            state[f"optimizer.{name}.{key}"] = value
    return state


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, optimizer state and generators; every rank calls this together.

    Settings of the optimizer (betas, decay and the like) stay as they are. Generators belong to
    ranks and devices, so they stay too unless as many ranks on such a device saved them; the
    run's own draws do not use them.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of another model; then the weights
            may be those of neither.
    """
    doing = f"cannot load {folder}"
    about, tensors = _open(folder, doing)
    weights = weights_of(model)
    all_or_none(lambda: _check_fit(about, tensors, weights, _trained(weights, optimizer)), doing)
    state = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    moments = _empty_moments(tensors, _trained(weights, optimizer), optimizer)
    for name, values in moments.items():
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    held = {name: _held(tensor) for name, tensor in state.items()}
    generators = {device: torch.empty_like(value) for device, value in _generators(model).items()}
    rows = _rows(generators)
    if all(_fits(tensors, name, row.sharding) for name, row in rows.items()):
        held |= rows
    else:
        generators = {}
    _read(folder, tensors, held, doing)
    all_or_none(lambda: _set_generators(generators), doing)
    for name, parameter in _trained(weights, optimizer).items():
        optimizer.state[parameter] = moments.get(name, {})


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights alone, into any split of the model; every rank calls this together.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of another model; then the weights
            may be those of neither.
    """
    doing = f"cannot load the weights in {folder}"
    _, tensors = _open(folder, doing)
    weights = weights_of(model)
    all_or_none(lambda: _check_weights(tensors, weights), doing)
    held = {f"model.{name}": _held(tensor) for name, tensor in weights.items()}
    _read(folder, tensors, held, doing)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and kept buffers by name, a tie once.

    It asks for the state_dict, before which FSDP2 puts back the parts of what it has gathered;
    `named_parameters` alone may give the gathered copies.

    Raises:
        CheckpointError: a rank's part of a tensor is several parts of the whole.
    """
    names: dict[torch.Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_fused(tensor):
            raise CheckpointError(
                f"'{name}' holds several maps, each split over tp by itself, and a file has room "
                "for one part of a tensor from a rank; save and load without tp, or hold the maps "
                "as modules of their own"
            )
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def _trained(
    weights: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the parameters that the optimizer updates, of all its groups, by name."""
    names = {tensor: name for name, tensor in weights.items()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in trained):
        raise CheckpointError("the optimizer updates a parameter that the model does not hold")
    return {names[parameter]: parameter for parameter in trained}


def _generators(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators: the CPU's, and its GPU's if it has one."""
    states = {"cpu": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _rows(states: dict[str, torch.Tensor]) -> dict[str, Held]:
    """Return this rank's generators as rows of tensors of the checkpoint."""
    num_ranks = dist.get_world_size()
    return {
        f"generators.{device}": Held(
            one_row_each(state.numel(), state.dtype, num_ranks), state[None]
        )
        for device, state in states.items()
    }


def _fits(tensors: Index, name: str, sharding: Sharding) -> bool:
    stored = tensors.get(name)
    return stored is not None and (stored.layout.shape, stored.dtype) == (
        sharding.shape,
        sharding.dtype,
    )


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    try:
        for device, state in states.items():
            (torch.cuda if device == "cuda" else torch).set_rng_state(state)
    except RuntimeError as error:
        raise CheckpointError(f"its state of a generator is none: {error}") from error


def _open(folder: Path, doing: str) -> tuple[Manifest, Index]:
    """Verify the files, dealt out over the ranks; return what the checkpoint says that it holds."""
    about = on_first_rank(lambda: manifest.read(folder), doing)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    all_or_none(lambda: verify(folder, about, rank, num_ranks), doing)
    return about, on_first_rank(lambda: index.read(folder, about.files), doing)


def _read(folder: Path, tensors: Index, held: dict[str, Held], doing: str) -> None:
    """Fill what this rank holds from the checkpoint."""
    rank = dist.get_rank()
    wanted = {name: (each.local, each.sharding.box(rank)) for name, each in held.items()}
    all_or_none(lambda: index.load(folder, tensors, wanted), doing)


def _check_weights(tensors: Index, weights: dict[str, torch.Tensor]) -> None:
    """Refuse the weights of another model.

    Raises:
        CheckpointError: names the first tensor that does not fit.
    """
    for name, tensor in weights.items():
        _check_tensor(tensors, f"model.{name}", name, tensor)
    for stored_name in sorted(tensors):
        room, _, name = stored_name.partition(".")
        if room == "model" and name not in weights:
            raise CheckpointError(f"it is of another model: this one has no tensor {name}")


def _check_tensor(tensors: Index, stored_name: str, name: str, tensor: torch.Tensor) -> None:
    stored = tensors.get(stored_name)
    if stored is None:
        raise CheckpointError(f"it is of another model: it has no tensor {name}")
    if stored.layout.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"it is of another model: its {name} has the shape {brief(list(stored.layout.shape))}, "
            f"this model's {list(tensor.shape)}"
        )
    if stored.dtype != tensor.dtype and not (
        stored.dtype.is_floating_point and tensor.dtype.is_floating_point
    ):
        raise CheckpointError(
            f"it is of another model: its {name} is of {stored.dtype}, this model's of "
            f"{tensor.dtype}"
        )


def _check_fit(
    about: Manifest,
    tensors: Index,
    weights: dict[str, torch.Tensor],
    trained: dict[str, torch.Tensor],
) -> None:
    """Refuse weights alone, another model, and the state of parameters that are not trained here.

    Raises:
        CheckpointError: names the first tensor that does not fit.
    """
    about.check_optimizer()
    _check_weights(tensors, weights)
    for name, keys in _moment_keys(tensors).items():
        if name not in trained:
            raise CheckpointError(
                f"it has optimizer state ({', '.join(keys)}) of {name}, which this run does not "
                "train"
            )
        for key in keys:
            like = torch.empty((), device="meta") if key == "step" else trained[name]
            _check_tensor(tensors, f"optimizer.{name}.{key}", f"{key} of {name}", like)


def _moment_keys(tensors: Index) -> dict[str, list[str]]:
    """Return the names of the optimizer's state, by parameter."""
    keys: dict[str, list[str]] = defaultdict(list)
    for stored_name in sorted(tensors):
        room, _, rest = stored_name.partition(".")
        if room == "optimizer":
            name, _, key = rest.rpartition(".")
            keys[name].append(key)
    return keys


def _empty_moments(
    tensors: Index, trained: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """Return room for the optimizer's state that the checkpoint has, split as the parameters are.

    The count of steps, `step`, lies where torch.optim keeps it: beside the parameter for fused and
    capturable optimizers, else on the CPU.
    """
    moments: dict[str, dict[str, torch.Tensor]] = {}
    on_device = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, keys in _moment_keys(tensors).items():
        parameter = trained[name]
        moments[name] = {}
        for key in keys:
            if key == "step":
                device = parameter.device if on_device[parameter] else "cpu"
                value = torch.zeros((), dtype=torch.float32, device=device)
            else:
                value = torch.zeros_like(parameter, requires_grad=False)
            moments[name][key] = value
    return moments
