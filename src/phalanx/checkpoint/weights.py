"""Read a checkpoint's full weights, without sharding, and the model shape in its manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint import files, index, manifest
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.untrusted import brief, decode
from phalanx.errors import CheckpointError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder in a folder; `read(name)` returns the full tensor of a parameter."""

    folder: Path
    shape: ModelShape
    read: Callable[[str], Tensor]


def open_checkpoint(path: Path) -> Weights:
    """Open a checkpoint, or the latest complete one of a run, and verify its files.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing or damaged, or a weight is
            missing, has an unexpected shape, or is not floating-point.
    """
    folder, about = manifest.find_and_read(path)
    try:
        files.verify(folder, about)
        tensors = index.read(folder, about.files)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error
    shape = shape_in(about, folder)
    sizes = {
        name.removeprefix("model."): tensor.layout.shape
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }
    if shape.num_layers > len(sizes):  # before building a model with too many layers
        raise CheckpointError(
            f"{folder}: it has {len(sizes)} weights, too few for the shape in {manifest.NAME} with "
            f"{brief(shape.num_layers)} layers"
        )
    try:
        expected = sizes_of(shape)
    except (RuntimeError, OverflowError, TypeError) as error:  # impossible sizes
        raise CheckpointError(
            f"{folder}: the shape in {manifest.NAME} is not valid: {brief(error)}"
        ) from error
    for name, size in expected.items():
        if sizes.get(name) != tuple(size):
            raise CheckpointError(
                f"{folder}: the weight '{name}' is {sizes.get(name, 'missing')}; the shape "
                f"in {manifest.NAME} needs {tuple(size)}"
            )

        if not (dtype := tensors[f"model.{name}"].dtype).is_floating_point:
            raise CheckpointError(
                f"{folder}: the weight '{name}' is of {dtype}; expected a type of real numbers"
            )

    def read(name: str) -> Tensor:
        try:
            return index.load_full(folder, tensors, f"model.{name}")
        except CheckpointError as error:
            raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error

    return Weights(folder, shape, read)


def shape_in(about: Manifest, folder: Path) -> ModelShape:
    """Return the model shape in a checkpoint's manifest.

    Raises:
        CheckpointError: the shape is not valid, or the checkpoint is of a training script.
    """
    if about.script is not None:
        raise CheckpointError(
            f"{folder} is of a training script, whose module is not a Phalanx decoder; resume from "
            "it in that script by run.resume, or for a phalanx.Trainer by phalanx train --script "
            "FILE:JOB --resume RUN"
        )
    try:
        return decode(ModelShape, about.shape, "shape")
    except ValueError as error:
        words = brief(error, 300)
        raise CheckpointError(f"cannot read {folder / manifest.NAME}: {words}") from error


def sizes_of(shape: ModelShape) -> dict[str, torch.Size]:
    """Return the size of each parameter of `Decoder(shape)`, by name."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(shape).named_parameters()}


def load_decoder(weights: Weights, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Return a decoder with `weights`, unsharded on one device, for inference in `dtype`."""
    with torch.device("meta"):
        model = Decoder(weights.shape).to(dtype=dtype)
    model.to_empty(device=device)
    read_into(model, weights)
    return model.eval()


@torch.no_grad()
def read_into(model: Decoder, weights: Weights) -> None:
    """Copy weights into an unsharded decoder on one device, in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.read(name))
