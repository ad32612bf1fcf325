"""The index of a checkpoint: the shape and dtype of each tensor, and the file of each shard.

index.json
    layouts   [{"shape": [...], "shards": [[offsets, sizes, file], ...]}, ...]
    tensors   {name: [dtype, number of its layout]}

Most tensors of the same shape have the same layout, so each distinct layout is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError

from phalanx.checkpoint.sharding import (
    Box,
    ShardLayout,
    WritePlan,
    check_cover,
    plan_reads,
)
from phalanx.checkpoint.tensor_file import DTYPES, NAMES, SUFFIX, ObjectFile
from phalanx.checkpoint.untrusted import brief, decode, read_json, write_json
from phalanx.errors import CheckpointError
from phalanx.object_store import fetch
from phalanx.storage import Checksum, checksum, sync

NAME: Final = "index.json"


class SavedTensor(NamedTuple):
    """dtype and layout of a tensor in a checkpoint."""

    dtype: torch.dtype
    layout: ShardLayout


Index = dict[str, SavedTensor]
"""The tensors of a checkpoint by name."""


def write(folder: Path, plan: WritePlan) -> Checksum:
    """Write the index of the planned tensors and sync it to disk; return its checksum.

    Raises:
        CheckpointError: the file would be too large for `read_json`.
        OSError: the write failed, for example because the disk is full.
    """
    layouts = plan.layouts()
    distinct = {id(layout): layout for layout in layouts.values()}
    numbers = {key: number for number, key in enumerate(distinct)}
    content = {
        "layouts": [vars(layout) for layout in distinct.values()],
        "tensors": {
            name: [NAMES[plan.shardings[name].dtype], numbers[id(layout)]]
            for name, layout in layouts.items()
        },
    }
    path = folder / NAME
    write_json(path, content)
    sync(path)
    return checksum(path)


def read(folder: Path, files: Mapping[str, Checksum]) -> Index:
    """Read the index of a checkpoint, and check that its layouts are complete and fit the files.

    Files that the manifest's `files` does not list are refused, so they are never read.

    Raises:
        CheckpointError: the index is missing or damaged, or refers to a missing file or layout.
    """
    if NAME not in files:
        raise CheckpointError(f"its manifest does not list {NAME}")
    try:
        return _index(decode(_Content, read_json(fetch(folder / NAME))), files)
    except FileNotFoundError as error:
        raise CheckpointError(f"its file {NAME} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"its file {NAME} is not an index of tensors: {error}") from error


@dataclass(frozen=True)
class _Content:
    """The decoded content of index.json."""

    layouts: tuple[ShardLayout, ...]
    tensors: dict[str, Any]
    """Values are checked in `_index` instead, because there may be a million of them."""


def _index(content: _Content, files: Mapping[str, Checksum]) -> Index:
    for layout in content.layouts:
        if (problem := check_cover(layout)) is not None:
            raise ValueError(f"a layout of shape {brief(list(layout.shape))}: {problem}")
    # A million tensors share few layouts: a layout is checked against the files once for each size
    # of an element.
    fitting: set[tuple[int, int]] = set()
    index: Index = {}
    for name, entry in content.tensors.items():
        match entry:
            case [str(dtype_name), int(number)] if (
                dtype_name in DTYPES
                and not isinstance(number, bool)
                and 0 <= number < len(content.layouts)
            ):
                pass
            case _:
                raise ValueError(
                    f"tensor {brief(name)} is {brief(entry)}, expected a data type and the number "
                    f"of one of {len(content.layouts)} layouts"
                )
        dtype, layout = DTYPES[dtype_name], content.layouts[number]
        if (number, dtype.itemsize) not in fitting:
            for shard in layout.shards:
                if shard.file not in files or not shard.file.endswith(SUFFIX):
                    raise ValueError(f"{brief(shard.file)} is not a tensor file in the manifest")
                if math.prod(shard.sizes) * dtype.itemsize > files[shard.file][0]:
                    raise ValueError(f"tensor {brief(name)} is larger than the file {shard.file}")
            fitting.add((number, dtype.itemsize))
        index[name] = SavedTensor(dtype, layout)
    return index


def load(
    files: Callable[[str], Any], index: Index, wanted: Mapping[str, tuple[torch.Tensor, Box]]
) -> None:
    """Fill tensors from the files of a checkpoint.

    Args:
        files: returns a tensor file of the checkpoint by its name, opened by `open_file`.
        index: the index of the checkpoint.
        wanted: by name, the tensor to fill and the box of the saved tensor to read.

    Raises:
        CheckpointError: a file does not match the index.
    """
    layouts = {name: index[name].layout for name in wanted}
    for file, parts in plan_reads(
        layouts, {name: box for name, (_, box) in wanted.items()}
    ).items():
        # All reads of a file come together, so that a file is opened once and read in its order.
        tensors = files(file)
        for name, (shard, source, target) in parts:
            try:
                rows = (source[0],) if isinstance(tensors, ObjectFile) and source else ()
                stored = tensors.get_slice(name, *rows)
                described = (stored.get_dtype(), tuple(stored.get_shape()))
                if described != (NAMES[index[name].dtype], shard.sizes):
                    raise CheckpointError(
                        f"its file {file} has {brief(name)} as {brief(described)}, which differs "
                        f"from {NAME}"
                    )
                part = stored[source if shard.sizes else ...]
            except SafetensorError as error:
                raise CheckpointError(
                    f"its file {file} cannot be read: {brief(error, 200)}"
                ) from error
            wanted[name][0][target if shard.sizes else ...] = part


def load_full(files: Callable[[str], Any], index: Index, name: str) -> torch.Tensor:
    """Return one full tensor, in the dtype in which it was saved; for `files` see `load`.

    Raises:
        CheckpointError: a file does not match the index.
    """
    dtype, layout = index[name]
    tensor = torch.empty(layout.shape, dtype=dtype)
    load(files, index, {name: (tensor, Box((0,) * len(layout.shape), layout.shape))})
    return tensor
