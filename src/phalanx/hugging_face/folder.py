"""Read and write Hugging Face folders: config.json and safetensors files, tensor by tensor.

config.json
model.safetensors                             or, in several files,
model-00001-of-00003.safetensors ...
model.safetensors.index.json                  tensor name -> file

In the cache of the Hugging Face hub, these are symbolic links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from phalanx.checkpoint import tensor_file
from phalanx.checkpoint.tensor_file import TensorInfo, open_file
from phalanx.checkpoint.untrusted import decode, is_plain_name, read_json, write_json
from phalanx.errors import CheckpointError
from phalanx.hugging_face.config import CONFIG

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final = ("F64", "F32", "BF16", "F16")
"""Supported dtypes of weights, as safetensors names them."""


class TensorFiles:
    """The tensors in the safetensors files of a folder.

    Each read maps the file into memory again, so that the pages of earlier tensors are freed.
    """

    def __init__(self, folder: Path) -> None:
        self.sizes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        index = _index(folder)
        for file in weight_files(folder):
            with open_file(file) as tensors:
                for name in tensors.keys():
                    self._add(name, file, tensors.get_slice(name))
        for name, file in index.items():
            if self._files.get(name) != folder / file:
                raise CheckpointError(
                    f"{folder / INDEX} lists '{name}' in {file}, which does not contain it; "
                    "is the folder complete?"
                )

    def _add(self, name: str, file: Path, entry: Any) -> None:
        if entry.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{file}: '{name}' is of type {entry.get_dtype()}; only {', '.join(_DTYPES)} are "
                "read, not quantized weights"
            )
        if name in self._files:
            raise CheckpointError(
                f"'{name}' is both in {self._files[name].name} and in {file.name} of {file.parent}"
            )
        self.sizes[name] = tuple(entry.get_shape())
        self._files[name] = file

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype of the file."""
        with open_file(self._files[name]) as tensors:
            return tensors.get_tensor(name)


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has a config.json, as `save_pretrained` writes it."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's config.json."""
    try:
        return read_json(folder / CONFIG, may_be_link=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {CONFIG}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the weights of a folder, sorted by name.

    As in transformers, model.safetensors is preferred to the files that the index lists.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = _index(folder)
    for name in sorted(set(index.values())):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX} names {name}, which is missing")
    # Without an index every safetensors file of the folder counts.
    names = set(index.values()) or {file.name for file in folder.glob("*.safetensors")}
    if names:
        return [folder / name for name in sorted(names)]
    if old := sorted(file.name for file in folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in {old[0]}, a pickle, which can run any code when it is "
            "read; expected safetensors, which "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` of transformers "
            "writes"
        )
    raise CheckpointError(
        f"{folder} has a {CONFIG} but no weights; expected {WEIGHTS}, or {INDEX} and its shards"
    )


def _index(folder: Path) -> dict[str, str]:
    """Return the index: tensor name -> file name; empty for a single file or without an index."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return {}
    with suppress(ValueError):
        content = read_json(folder / INDEX, may_be_link=True)
        files: dict[str, str] = decode(dict[str, str], content.get("weight_map"))
        if all(map(is_plain_name, files.values())):
            return files
    raise CheckpointError(
        f"{folder / INDEX} has no weight_map from tensor names to file names in this folder"
    )


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    max_shard_bytes: int,
) -> None:
    """Write a folder that `from_pretrained` loads, with one tensor in memory at a time.

    Tensors are obtained from `read`, cast and written in the order of `tensors`. A file has at most
    `max_shard_bytes`, unless one tensor is larger.

    Raises:
        OSError: a file cannot be written; files written before are not removed.
    """
    num_bytes = {name: tensor.num_bytes for name, tensor in tensors.items()}
    # Sizes 3 3 5 and 4 GB, at most 5: [3] [3] [5] [4]. The names of files have their number, so all
    # are cut before the first is written.
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name, size_bytes in num_bytes.items():
        if shards[-1] and filled_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += size_bytes
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) > 1
        else WEIGHTS: names
        for number, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        infos = {name: tensors[name] for name in names}
        pieces = (read(name).to(tensors[name].dtype).contiguous() for name in names)
        tensor_file.write(folder / file, infos, pieces)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(num_bytes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config)
