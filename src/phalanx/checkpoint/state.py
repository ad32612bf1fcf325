"""Write and read the tensors of a run: weights, optimizer state and torch's generators.

torch.distributed.checkpoint stores each tensor under its name with its global shape; names of
optimizer state are those of the parameters, so nothing depends on the order in which the optimizer
was built.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.comm.primitives import barrier
from phalanx.errors import CheckpointError


def save(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Manifest) -> Path:
    """Save a checkpoint; every rank calls this together.

    It is written beside its place and renamed when it is whole, the manifest last.

    Returns:
        Its folder.

    Raises:
        CheckpointError: it could not be written, for want of space, say; older ones are untouched.
    """
    final = manifest.folder_of(run, about.steps_done)
    partial = final.with_name(final.name + ".partial")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    try:
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
    except Exception as error:  # torch wraps what any rank met into an exception of its own
        raise CheckpointError(
            f"cannot save {final}: {_root(error)}; older checkpoints stand"
        ) from error
    if is_first:
        manifest.write(partial, about)
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    barrier()
    return final


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, optimizer state and generators; every rank calls this together.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor has another shape.
    """
    state = _state(model, optimizer)
    generators = state["generators"]
    if manifest.read(folder).num_ranks != dist.get_world_size():
        del state["generators"]  # they belong to ranks; the run's own draws do not use them
    try:
        dcp.load(state, checkpoint_id=folder)
    except Exception as error:  # as above
        raise CheckpointError(f"cannot load {folder}: {_root(error)}") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    torch.set_rng_state(generators[f"cpu.{dist.get_rank()}"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with warnings.catch_warnings():
        # get_state_dict builds missing optimizer state by a step with zero gradients
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "generators": {f"cpu.{dist.get_rank()}": torch.get_rng_state()},
    }


def _root(error: BaseException) -> str:
    """Return the first line that says what went wrong, below torch's wrapping."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _sync(folder: Path) -> None:
    """Have the disk hold every file of the folder before it gets its name."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
