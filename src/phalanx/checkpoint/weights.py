"""The weights of a checkpoint: the shape its manifest describes, and each weight, whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint import files, index, manifest
from phalanx.checkpoint.foreign import brief, decode
from phalanx.checkpoint.manifest import Manifest
from phalanx.errors import CheckpointError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder in a folder; `read` gives one, full, by its parameter's name."""

    folder: Path
    shape: ModelShape
    read: Callable[[str], Tensor]


def open_checkpoint(path: Path) -> Weights:
    """Open a checkpoint, or the latest whole one of a run, and verify its files.

    Raises:
        CheckpointError: there is none, a file is missing or damaged, or a weight is missing or of
            another size.
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
    if shape.num_layers > len(sizes):  # before a model is made of more
        raise CheckpointError(
            f"{folder}: it has {len(sizes)} weights; the shape in {manifest.NAME} asks for "
            f"{brief(shape.num_layers)} layers"
        )
    try:
        expected = sizes_of(shape)
    except (RuntimeError, OverflowError, TypeError) as error:  # no such tensor can be
        raise CheckpointError(
            f"{folder}: the shape in {manifest.NAME} is none: {brief(error)}"
        ) from error
    for name, size in expected.items():
        if sizes.get(name) != tuple(size):
            raise CheckpointError(
                f"{folder}: the weight '{name}' is {sizes.get(name, 'missing')}; the shape "
                f"in {manifest.NAME} asks for {tuple(size)}"
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
    """Return the shape of the model that a checkpoint holds.

    Raises:
        CheckpointError: the manifest does not describe one, or is of a script.
    """
    if about.script is not None:
        raise CheckpointError(
            f"{folder} is of a training script, whose module is no decoder of phalanx; resume from "
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
    """Return the decoder of some weights, whole on one device, for inference in `dtype`."""
    with torch.device("meta"):
        model = Decoder(weights.shape).to(dtype=dtype)
    model.to_empty(device=device)
    read_into(model, weights)
    return model.eval()


@torch.no_grad()
def read_into(model: Decoder, weights: Weights) -> None:
    """Copy weights in place to a decoder that is whole on one device."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.read(name))
