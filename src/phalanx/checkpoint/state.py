"""Write and read the tensors of a run: weights, optimizer state and torch's generators.

torch.distributed.checkpoint stores each tensor under its name with its global shape; names of
optimizer state are those of the parameters, so nothing depends on the order in which the optimizer
was built.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.comm.primitives import share
from phalanx.errors import CheckpointError

T = TypeVar("T")


def save(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Manifest) -> None:
    """Save a checkpoint into the run folder; every rank calls this together.

    It is written beside its place and renamed when it is whole, the manifest last.

    Raises:
        CheckpointError: on every rank, if one could not write, for want of space, say; older
            checkpoints are untouched.
    """
    final = manifest.folder_of(run, about.steps_done)
    partial = final.with_name(final.name + ".partial")
    doing = f"cannot save {final} (older checkpoints stand)"
    _on_first(lambda: _make_empty(partial), doing)
    try:
        # What any rank meets reaches all; it is no Exception, as torch wraps it.
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
    except (Exception, CheckpointException) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{doing}: {_root(error)}") from error
    _on_first(lambda: _complete(partial, final, about), doing)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, optimizer state and generators; every rank calls this together.

    Settings of the optimizer (betas, decay and the like) stay as they are. Generators belong to
    ranks and devices, so they stay too unless as many ranks on such a device saved them; the
    run's own draws do not use them.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor has another shape.
    """
    doing = f"cannot load {folder}"
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    num_ranks, names = _on_first(lambda: _contents(folder), doing)
    state = _state(model, optimizer)
    generators = state["generators"]
    if num_ranks != dist.get_world_size() or any(
        f"generators.{n}" not in names for n in generators
    ):
        del state["generators"]
    try:
        dcp.load(state, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{doing}: {_root(error)}") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    for name, value in state.get("generators", {}).items():
        (torch.cuda if name.startswith("cuda") else torch).set_rng_state(value)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights alone, into any split of the model; every rank calls this together.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor has another shape.
    """
    doing = f"cannot load the weights in {folder}"
    _on_first(lambda: _contents(folder), doing)
    try:
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{doing}: {_root(error)}") from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    is_fresh = not optimizer.state
    if is_fresh:
        # get_state_dict builds missing optimizer state by a step with zero gradients, unless there
        # are gradients: those of a step that was skipped, which nobody needs.
        optimizer.zero_grad(set_to_none=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if is_fresh:
        for values in optimizer.state.values():  # that step was none: its count goes back to 0
            for value in values.values():
                value.zero_()
    return {"model": model_state, "optimizer": optimizer_state, "generators": _generators(model)}


def _generators(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators: the CPU's, and its GPU's if it has one."""
    rank = dist.get_rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _on_first(work: Callable[[], T], doing: str) -> T:
    """Do file work on rank 0 alone; every rank returns its result, or raises its failure."""
    outcome: tuple[T | None, str | None] = (None, None)
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = (work(), None)
        except Exception as error:  # the others wait to hear of it, whatever it is
            outcome, cause = (None, _root(error)), error
    result, failure = share(outcome)
    if failure is not None:
        raise CheckpointError(f"{doing}: {failure}") from cause
    return result


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(partial: Path, final: Path, about: Manifest) -> None:
    """Write the manifest and give the folder its name."""
    try:
        manifest.write(partial, about)
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_entry(final.parent)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _contents(folder: Path) -> tuple[int, set[str]]:
    """Return how many ranks wrote the checkpoint, and the names of all that is in it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return manifest.read(folder).num_ranks, set(metadata.state_dict_metadata)


def _root(error: BaseException) -> str:
    """Return the first line that says what went wrong, below torch's wrapping."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _sync(folder: Path) -> None:
    """Have the disk hold every file of the folder before it gets its name."""
    for path in (*folder.iterdir(), folder):
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
