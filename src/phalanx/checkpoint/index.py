"""The index of a checkpoint: the shape and data type of each tensor, and which file holds what.

index.json
    layouts   [{"shape": [...], "shards": [[offsets, sizes, file], ...]}, ...]
    tensors   {name: [data type, number of its layout]}

Tensors of one shape mostly lie alike, so a layout is written once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError

from phalanx.checkpoint.foreign import brief, decode, read_json, write_json
from phalanx.checkpoint.sharding import (
    Box,
    ShardLayout,
    WritePlan,
    check_cover,
    plan_reads,
)
from phalanx.checkpoint.tensor_file import DTYPES, NAMES, SUFFIX, open_file
from phalanx.errors import CheckpointError
from phalanx.storage import Checksum, checksum, sync

NAME: Final = "index.json"


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    layout: ShardLayout


Index = dict[str, SavedTensor]
"""The tensors of a checkpoint by name."""


def write(folder: Path, plan: WritePlan) -> Checksum:
    """Write the index of planned tensors, and have the disk hold it; return its checksum.

    Raises:
        CheckpointError: it would be too large to be read.
        OSError: the disk is full, say.
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
    """Read the index of a checkpoint, and check that it describes tensors that can be there.

    Only the files of the manifest, `files`, are ever read.

    Raises:
        CheckpointError: it is missing or damaged, or names a file or layout that is not there.
    """
    if NAME not in files:
        raise CheckpointError(f"its manifest does not list {NAME}")
    try:
        return _index(decode(_Content, read_json(folder / NAME)), files)
    except FileNotFoundError as error:
        raise CheckpointError(f"its file {NAME} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"its file {NAME} is no index of tensors: {error}") from error


@dataclass(frozen=True)
class _Content:
    """What the file holds."""

    layouts: tuple[ShardLayout, ...]
    tensors: dict[str, Any]
    """Checked one by one below, since there may be a million."""


def _index(content: _Content, files: Mapping[str, Checksum]) -> Index:
    for layout in content.layouts:
        if (problem := check_cover(layout)) is not None:
            raise ValueError(f"a layout of shape {brief(list(layout.shape))}: {problem}")
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
                    raise ValueError(f"{brief(shard.file)} is no file of tensors in the manifest")
                if math.prod(shard.sizes) * dtype.itemsize > files[shard.file][0]:
                    raise ValueError(f"tensor {brief(name)} is larger than the file {shard.file}")
            fitting.add((number, dtype.itemsize))
        index[name] = SavedTensor(dtype, layout)
    return index


def load(folder: Path, index: Index, wanted: Mapping[str, tuple[torch.Tensor, Box]]) -> None:
    """Read parts of tensors, by name: into which tensor, and which part of the full one.

    Raises:
        CheckpointError: a file does not hold what the index says.
    """
    layouts = {name: index[name].layout for name in wanted}
    for file, parts in plan_reads(
        layouts, {name: box for name, (_, box) in wanted.items()}
    ).items():
        with open_file(folder / file) as tensors:
            for name, (shard, source, target) in parts:
                try:
                    found = tensors.get_slice(name)
                    described = (found.get_dtype(), tuple(found.get_shape()))
                    if described != (NAMES[index[name].dtype], shard.sizes):
                        raise CheckpointError(
                            f"its file {file} has {brief(name)} as {brief(described)}, not as "
                            f"{NAME} says"
                        )
                    part = found[source if shard.sizes else ...]
                except SafetensorError as error:
                    raise CheckpointError(
                        f"its file {file} cannot be read: {brief(error, 200)}"
                    ) from error
                wanted[name][0][target if shard.sizes else ...] = part


def load_full(folder: Path, index: Index, name: str) -> torch.Tensor:
    """Return one tensor, whole, in the data type it was saved in.

    Raises:
        CheckpointError: a file does not hold what the index says.
    """
    dtype, layout = index[name]
    tensor = torch.empty(layout.shape, dtype=dtype)
    load(folder, index, {name: (tensor, Box((0,) * len(layout.shape), layout.shape))})
    return tensor
