"""What a checkpoint holds of a run, by name, and how it comes back: into any split, on any ranks.

    model.<name>                parameters and kept buffers, by the model's own names
    optimizer.<name>.<key>      the optimizer's state of the parameter <name>, such as exp_avg
    generators.<device>.<rank>  torch's generators of one rank

Nothing is said of who held what: a tensor that was split (DTensor), or held whole by every rank, is
one tensor under one name. A tie has the first of its names.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from phalanx.checkpoint import manifest
from phalanx.checkpoint.agree import agree, agree_on_first
from phalanx.checkpoint.files import verify
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.reader import Reader, read_index
from phalanx.errors import CheckpointError
from phalanx.parallel.tensor.replicas import is_fused

Shapes = dict[str, tuple[int, ...]]
"""Whole shape of each tensor of a checkpoint, by name."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds, as this rank has it: the tensors themselves, not copies.

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
    state |= {f"generators.{name}": value for name, value in _generators(model).items()}
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
    about, shapes = _open(folder, doing)
    weights = weights_of(model)
    agree(lambda: _check_fit(about, shapes, weights, _trained(weights, optimizer)), doing)
    state = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    moments = _empty_moments(shapes, _trained(weights, optimizer), optimizer)
    for name, values in moments.items():
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    generators = _generators(model)
    if about.num_ranks != dist.get_world_size() or any(
        f"generators.{name}" not in shapes for name in generators
    ):
        generators = {}
    state |= {f"generators.{name}": value for name, value in generators.items()}
    _read(folder, state, doing)
    for name, parameter in _trained(weights, optimizer).items():
        optimizer.state[parameter] = moments.get(name, {})
    for name, value in generators.items():
        (torch.cuda if name.startswith("cuda") else torch).set_rng_state(value)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights alone, into any split of the model; every rank calls this together.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of another model; then the weights
            may be those of neither.
    """
    doing = f"cannot load the weights in {folder}"
    _, shapes = _open(folder, doing)
    weights = weights_of(model)
    agree(lambda: _check_weights(shapes, weights), doing)
    _read(folder, {f"model.{name}": tensor.detach() for name, tensor in weights.items()}, doing)


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
    rank = dist.get_rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _open(folder: Path, doing: str) -> tuple[Manifest, Shapes]:
    """Verify the files, dealt out over the ranks; return what the checkpoint says that it holds."""
    about = agree_on_first(lambda: manifest.read(folder), doing)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    agree(lambda: verify(folder, about, rank, num_ranks), doing)
    return about, agree_on_first(lambda: _shapes(folder), doing)


def _shapes(folder: Path) -> Shapes:
    tensors: dict[str, Any] = read_index(folder).state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in tensors.items()}


def _check_weights(shapes: Shapes, weights: dict[str, torch.Tensor]) -> None:
    """Refuse the weights of another model.

    Raises:
        CheckpointError: names the first tensor that does not fit.
    """
    for name, tensor in weights.items():
        stored = shapes.get(f"model.{name}")
        if stored is None:
            raise CheckpointError(f"it is of another model: it has no tensor {name}")
        if stored != tuple(tensor.shape):
            raise CheckpointError(
                f"it is of another model: its {name} has the shape {list(stored)}, this model's "
                f"{list(tensor.shape)}"
            )
    for stored_name in sorted(shapes):
        room, _, name = stored_name.partition(".")
        if room == "model" and name not in weights:
            raise CheckpointError(f"it is of another model: this one has no tensor {name}")


def _check_fit(
    about: Manifest,
    shapes: Shapes,
    weights: dict[str, torch.Tensor],
    trained: dict[str, torch.Tensor],
) -> None:
    """Refuse weights alone, another model, and the state of parameters that are not trained here.

    Raises:
        CheckpointError: names the first tensor that does not fit.
    """
    about.check_optimizer()
    _check_weights(shapes, weights)
    for name, keys in _moment_keys(shapes).items():
        if name not in trained:
            raise CheckpointError(
                f"it has optimizer state ({', '.join(keys)}) of {name}, which this run does not "
                "train"
            )


def _moment_keys(shapes: Shapes) -> dict[str, list[str]]:
    """Return the names of the optimizer's state, by parameter."""
    keys: dict[str, list[str]] = defaultdict(list)
    for stored_name in sorted(shapes):
        room, _, rest = stored_name.partition(".")
        if room == "optimizer":
            name, _, key = rest.rpartition(".")
            keys[name].append(key)
    return keys


def _empty_moments(
    shapes: Shapes, trained: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
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
    for name, keys in _moment_keys(shapes).items():
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


def _read(folder: Path, state: dict[str, torch.Tensor], doing: str) -> None:
    """Fill the tensors of `state` in place."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = Reader(folder)
    agree(lambda: dcp.load(state, storage_reader=reader, planner=planner), doing)
