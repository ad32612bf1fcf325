"""Read which tensor of a checkpoint lies where, without running code that the file may hold."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from phalanx.checkpoint.agree import root_of
from phalanx.errors import CheckpointError

INDEX = ".metadata"
"""Name of the file in which torch.distributed.checkpoint says which tensor lies where."""

_KNOWN: dict[tuple[str, str], Callable[..., Any] | type[Any]] = {
    **{
        (torch_metadata.__name__, name): getattr(torch_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (torch_files.__name__, "_StorageInfo"): torch_files._StorageInfo,  # pyright: ignore[reportPrivateUsage]
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # pyright: ignore[reportPrivateUsage]
    # Where it was written, by a system of another kind perhaps.
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""What an index may name, apart from data types: classes that hold values, and nothing that acts.

Collections and numbers have codes of their own in a pickle.
"""


class Reader(FileSystemReader):
    """Reads the tensors of a checkpoint folder, as torch's own reader does.

    For whoever reads a checkpoint, `state` and `tensors` alike: torch's own reader unpickles the
    index, and so runs what a stranger's file asks for. It reads the tensors themselves safely.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the folder's index says.

        Raises:
            CheckpointError: it is damaged, or holds what is no part of an index.
        """
        metadata = read_index(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(folder: Path) -> Metadata:
    """Return which tensor of the checkpoint in `folder` lies where.

    Raises:
        CheckpointError: it is missing or damaged, or holds what is no part of an index.
    """
    try:
        with (folder / INDEX).open("rb") as file:
            index = _Unpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"its file {INDEX} cannot be read: {root_of(error)}") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(
            f"its file {INDEX} holds a {type(index).__name__}, expected an index of tensors"
        )
    return index


class _Unpickler(pickle.Unpickler):
    """Makes nothing but the parts of an index (Python's library reference, pickle, Restricting)."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = _KNOWN.get((module_name, global_name))
        if known is None and module_name == "torch":
            known = getattr(torch, global_name, None)
            known = known if isinstance(known, torch.dtype) else None
        if known is None:
            raise CheckpointError(
                f"its file {INDEX} asks for {module_name}.{global_name}, which is no part of an "
                "index of tensors; it may be meant to run code, so nothing of it was used"
            )
        return known
