"""Read a checkpoint's full weights, without sharding, and the model shape in its manifest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.checkpoint import files, index, manifest
from phalanx.checkpoint.index import Index
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.tensor_file import SUFFIX, open_file
from phalanx.checkpoint.untrusted import brief, decode
from phalanx.comm.together import reason_of
from phalanx.errors import CheckpointError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.object_store import address_of
from phalanx.storage import open_regular

MOST_OPEN: Final = 256
"""Most files of a checkpoint that are kept open; a process may often open only 1024."""


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder in a folder.

    Attributes:
        folder: folder of the weights.
        shape: shape of the model.
        base: folder and checksum of the frozen weights, which a checkpoint of adapters lacks; None
            if it has all weights.
        read: returns the full tensor of a parameter by its name.
        close: closes the files, which are open from the start because a run may remove its
            checkpoint, and whose disk space is in use until then. A later `read` opens them again.
            A checkpoint of more than MOST_OPEN files is not kept open.
    """

    folder: Path
    shape: ModelShape
    read: Callable[[str], Tensor]
    close: Callable[[], None] = lambda: None
    base: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Opened:
    """A verified checkpoint: its folder, manifest, index, and opened tensor files by name.

    The files are not mapped into memory, whose pages would stay resident once they are read.
    """

    folder: Path
    about: Manifest
    tensors: Index
    files: dict[str, Any]

    @staticmethod
    def of(folder: Path) -> _Opened:
        about = manifest.read(folder)
        try:
            files.verify(folder, about)
            tensors = index.read(folder / about.save, about.files)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {folder}: {error}") from error
        opened = _Opened(folder, about, tensors, {})
        weakref.finalize(opened, _close, opened.files)
        # A run may remove the checkpoint while it is read: an open file stays readable.
        names = [name for name in about.files if name.endswith(SUFFIX)]
        is_here = address_of(folder) is None
        try:
            for name in names if is_here and len(names) <= MOST_OPEN else ():
                opened.files[name] = open_regular(folder / about.save / name)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}: {reason_of(error)}") from error
        return opened

    def file(self, name: str) -> Any:
        """Return the tensor file `name`, mapped into memory, or of an object store."""
        file = self.files.get(name)
        if address_of(self.folder) is None:
            path = self.folder / self.about.save / name
            return open_file(path, None if file is None else file.fileno())
        if file is None:  # kept with the blocks that it has read
            file = self.files[name] = files.open_tensors(self.folder, self.about, name)
        return file

    def close(self) -> None:
        """Close the files; `file` then opens them by their names."""
        _close(self.files)


def _close(files: dict[str, Any]) -> None:
    for file in files.values():
        file.close()
    files.clear()


def open_checkpoint(path: Path) -> Weights:
    """Open a checkpoint, or the latest complete one of a run, and verify its files.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing or damaged, or a weight is
            missing, has an unexpected shape, or is not floating-point.
    """
    opened = manifest.read_found(path, _Opened.of)
    folder, about, tensors = opened.folder, opened.about, opened.tensors
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
            return index.load_full(opened.file, tensors, f"model.{name}")
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error

    return Weights(folder, shape, read, opened.close, base_in(about, folder))


def shape_in(about: Manifest, folder: Path) -> ModelShape:
    """Return the model shape in a checkpoint's manifest.

    Raises:
        CheckpointError: the shape is not valid, or the checkpoint is of a training script.
    """
    if not about.is_of_decoder:
        raise CheckpointError(
            f"{folder} is of a training script, whose module is not a Phalanx decoder; resume from "
            "it in that script by run.resume, or for a phalanx.Trainer by phalanx train --script "
            "FILE:JOB --resume RUN"
        )
    try:
        return decode(ModelShape, about.shape, "shape")
    except ValueError as error:
        why = brief(error, 300)
        raise CheckpointError(f"cannot read {folder / manifest.NAME}: {why}") from error


def base_in(about: Manifest, folder: Path) -> tuple[str, str] | None:
    """Return folder and checksum of the weights that a checkpoint's adapters belong to, if any.

    Raises:
        CheckpointError: the manifest has adapters without them.
    """
    if not about.shape.get("lora"):
        return None
    try:
        return decode(tuple[str, str], about.state.get("base"), "its base")
    except ValueError as error:
        raise CheckpointError(f"cannot read {folder / manifest.NAME}: {error}") from error


def sizes_of(shape: ModelShape) -> dict[str, torch.Size]:
    """Return the size of each trained parameter and buffer of `Decoder(shape)`, by name."""
    with torch.device("meta"):
        model = Decoder(shape)
    trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    return trained | {name: buffer.shape for name, buffer in model.named_buffers()}


@torch.no_grad()
def load_decoder(weights: Weights, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Return a decoder with `weights`, unsharded on one device, for inference in `dtype`."""
    with torch.device("meta"):
        model = Decoder(weights.shape).to(dtype=dtype)
    model.to_empty(device=device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(weights.read(name))
    return model.eval()
