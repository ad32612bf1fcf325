"""Save a run while it goes on: copy the state, then write it behind the training's back.

    main thread    begin: who writes what -> copy into buffers on the CPU   steps go on ... finish
    writer thread  write, hash, sync -> manifest -> rename -> remove older

The writer has a process group of its own, so its collectives never meet those of the training, and
a lower priority, so it takes what processor time the training leaves (on Linux). What goes wrong
on any rank reaches every rank as one CheckpointError, at its next call here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import manifest
from phalanx.checkpoint.agree import agree, agree_on_first, root_of
from phalanx.checkpoint.files import RunLock, TensorWriter, make_partial, publish, remove_older
from phalanx.checkpoint.manifest import Checksum, Manifest
from phalanx.checkpoint.state import state_of
from phalanx.comm.objects import gather_objects
from phalanx.errors import CheckpointError
from phalanx.mesh import writer_group

NICENESS = 10
"""How far the writer stands back: beside a thread of ordinary priority, Linux gives it a tenth."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor of the checkpoint.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        offsets: where this part begins in it.
        local: this part.
    """

    name: str
    shape: torch.Size
    offsets: torch.Size
    local: torch.Tensor


class Saver:
    """Saves the checkpoints of a run; as a context it ends with the last of them on the disk.

    Every rank makes one, and calls `begin` and `finish` together with the others. For what it does
    to `torch.serialization.set_crc32_options` see `TensorWriter`.
    """

    def __init__(self, run: Path, *, keep: int | None = None) -> None:
        """Keep other processes from saving to the same run, as long as the context or this lasts.

        Args:
            run: folder of the run, the same on all hosts.
            keep: checkpoints to keep, the latest; all if None.

        Raises:
            CheckpointError: another process saves to it, its folder cannot be made, or is not the
                same on all hosts.
        """
        self._run = run
        self._keep = keep
        self._lock = RunLock(run)
        doing = f"cannot save in {run}"
        mark = agree_on_first(self._lock.take, doing)
        agree(lambda: self._lock.check_shared(mark), doing)
        self._group = writer_group()
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, about: Manifest) -> None:
        """Copy the state and begin to write it; it may change as soon as this returns.

        Args:
            model: the model, split or not.
            optimizer: of the model.
            about: the manifest, whose `files` are yet to be filled in.

        Raises:
            CheckpointError: the save before this one failed, or the state cannot be saved.
        """
        self.finish()
        # Of the main thread, so by the job's own group: the writer's waits far longer for a rank.
        doing = f"cannot save {self._final(about)} (older checkpoints stand)"
        held = list(_parts(state_of(model, optimizer)))
        ours = _dealt([(part.name, part.offsets, part.local.nbytes) for part in held])
        parts: list[Part] = []
        agree(lambda: parts.extend(self._copy(held, ours)), doing)
        self._thread = threading.Thread(
            target=self._write, args=(parts, about, doing), name="checkpoint writer"
        )
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong with a save that has ended; never waits.

        Raises:
            CheckpointError: the save failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is published.

        Raises:
            CheckpointError: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after an error of the training: the state was good when it was copied.
        try:
            self.finish()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._lock.release()

    def _final(self, about: Manifest) -> Path:
        return manifest.folder_of(self._run, about.steps_done)

    def _copy(self, held: list[Part], ours: set[str]) -> list[Part]:
        """Copy the parts that this rank writes into buffers that last from save to save."""
        copies: list[Part] = []
        buffers: dict[str, torch.Tensor] = {}
        for part in held:
            if part.name not in ours:
                continue
            local, buffer = part.local, self._buffers.get(part.name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(
                    local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda
                )
            buffers[part.name] = buffer.copy_(local, non_blocking=True)
            copies.append(Part(part.name, part.shape, part.offsets, buffer))
        if any(part.local.is_cuda for part in held):
            torch.cuda.synchronize()
        self._buffers = buffers
        return copies

    def _write(self, parts: list[Part], about: Manifest, doing: str) -> None:
        """Write and publish; the body of the writer thread."""
        try:
            _stand_back()
            self._save(parts, about, doing)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # another rank is gone
            self._failure = CheckpointError(f"{doing}: {root_of(error)}")

    def _save(self, parts: list[Part], about: Manifest, doing: str) -> None:
        final = self._final(about)
        partial = final.with_name(final.name + manifest.PARTIAL)
        group = self._group
        agree_on_first(lambda: make_partial(final), doing, group)
        try:
            written = agree(lambda: _write_tensors(partial, parts, group), doing, group)
            files = {name: checksum for each in written for name, checksum in each.items()}
            whole = dataclasses.replace(about, files=files)
            agree_on_first(lambda: publish(partial, final, whole), doing, group)
        except CheckpointError:
            if dist.get_rank(group) == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        doing = f"{final} is saved, but older checkpoints cannot be removed"
        agree_on_first(lambda: remove_older(self._run, self._keep), doing, group)


def _parts(state: dict[str, torch.Tensor]) -> Iterable[Part]:
    """Yield what this rank holds; a shard without rows is nothing."""
    for name, tensor in state.items():
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            yield Part(name, tensor.shape, torch.Size([0] * tensor.ndim), tensor)
            continue
        local = tensor.to_local()
        # What torch.distributed.checkpoint itself asks of a DTensor (torch/distributed/
        # _checkpointable.py).
        (chunk,) = tensor.__create_chunk_list__()
        if local.numel() or not tensor.numel():
            yield Part(name, tensor.shape, chunk.offsets, local)


def _dealt(held: list[tuple[str, torch.Size, int]]) -> set[str]:
    """Deal the parts that several ranks hold out over them; return the names this rank writes.

    The largest first, each to the rank among its holders that has the fewest bytes so far.

    Args:
        held: name, offsets and bytes of each part that this rank holds.
    """
    holders: dict[tuple[str, torch.Size, int], list[int]] = defaultdict(list)
    for rank, parts in enumerate(gather_objects(held)):
        for part in parts:
            holders[part].append(rank)
    loads_bytes = [0] * dist.get_world_size()
    ours: set[str] = set()
    for (name, _, num_bytes), ranks in sorted(
        holders.items(), key=lambda item: (-item[0][2], item[0])
    ):
        writer = min(ranks, key=lambda rank: loads_bytes[rank])
        loads_bytes[writer] += num_bytes
        if writer == dist.get_rank():
            ours.add(name)
    return ours


def _write_tensors(
    partial: Path, parts: list[Part], group: dist.ProcessGroup
) -> dict[str, Checksum]:
    """Write this rank's parts; return the checksums of the files that it wrote.

    Raises:
        CheckpointException: a rank failed; on every rank alike.
    """
    writer = TensorWriter(partial)
    dcp.save({}, storage_writer=writer, planner=_Planner(parts), process_group=group)
    return writer.files.checksums


class _Planner(DefaultSavePlanner):
    """Tells torch.distributed.checkpoint what this rank writes: its own parts and nothing else."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._locals = {part.name: part.local for part in parts}
        self.plan = SavePlan([_item(part) for part in parts])

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._locals[write_item.index.fqn]


def _item(part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(part.name, part.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(part.offsets, part.local.shape),
            properties=TensorProperties.create_from_tensor(part.local),
            size=part.shape,
        ),
    )


def _stand_back() -> None:
    """Lower the priority of the calling thread, where the system keeps one for each thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
