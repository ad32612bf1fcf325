"""Read and write the weights of a checkpoint one tensor at a time, in a single process.

These are the files that `state` writes and reads; here no process group is needed, and never more
than one tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.agree import root_of
from phalanx.checkpoint.files import TensorWriter
from phalanx.checkpoint.manifest import Checksum
from phalanx.checkpoint.reader import Reader
from phalanx.errors import CheckpointError

_MODEL = "model."
"""What stands before the name of each weight in a checkpoint."""


class WeightReader:
    """Reads the weights of a checkpoint folder, each when it is asked for.

    Attributes:
        sizes: size of each weight by the name of its parameter.

    Raises:
        CheckpointError: the folder's index of tensors is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = Reader(folder)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        except Exception as error:  # a damaged pickle may raise anything
            raise self._unreadable(error) from error
        self._stored = {
            name.removeprefix(_MODEL): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }
        self.sizes = {name: tuple(entry.size) for name, entry in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """Return one weight, whole, in the dtype it was saved in.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self._stored[name]
        target = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({_MODEL + name: target}, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # torch.load names a damaged file in many ways
            raise self._unreadable(error) from error
        return target

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"cannot read the weights in {self._folder}: {root_of(error)}")


def write_weights(
    folder: Path,
    sizes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
) -> dict[str, Checksum]:
    """Write weights alone as a checkpoint's tensors, each made just before it is written.

    Each gets a file of its own: torch keeps all tensors of a file in memory until it is written.

    Args:
        folder: where to; made if it is not there.
        sizes: size of each weight by the name of its parameter.
        dtype: of all weights on disk.
        read: gives a weight by name.

    Returns:
        The checksum of each file, by name.

    Raises:
        OSError: a file cannot be written; what was written stays.
    """
    with torch.device("meta"):
        model = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    planner = _LazyPlanner(read)
    planner.set_up_planner({"model": model}, is_coordinator=True)
    writer = TensorWriter(folder, single_file_per_rank=False)
    try:
        writer.finish(*_write(writer, planner))
    except RuntimeError as error:  # torch's words for a disk that is full
        if writer.files.failure is None:
            raise
        raise writer.files.failure from error
    return writer.files.checksums


def _write(
    writer: TensorWriter, planner: DefaultSavePlanner
) -> tuple[Metadata, list[list[WriteResult]]]:
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(plans)
    return metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()]


class _LazyPlanner(DefaultSavePlanner):
    """Plans with meta tensors, and asks for the data of each when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the weight that the plan calls `index`, in the dtype that was planned."""
        planned = self.state_dict[index.fqn]
        return self._read(index.fqn.removeprefix(_MODEL)).to(planned.dtype).contiguous()
