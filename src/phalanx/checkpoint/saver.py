"""Save checkpoints asynchronously: copy the state, then write the copy in a background thread.

    main thread    begin: copy this rank's shards into host memory      steps continue ... finish
    writer thread  write, hash, sync -> rank 0: index, manifest -> rename -> remove older

Every rank computes the same write plan from the shardings (sharding.py), which pipeline stages
gather when they change; else ranks exchange only progress (progress.py). On Linux the writer
thread has a lower priority, so that it uses processor time that training leaves idle. A failure on
any rank is raised on every rank as a CheckpointError at its next call of the saver. So is a
timeout: `timeout_s` without progress on any rank. If a rank is lost, the error is a PeerLost, and
the job reports the failure of that rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import index, manifest, tensor_file
from phalanx.checkpoint.files import make_partial, partial_of, publish, remove_older
from phalanx.checkpoint.host_copy import HostCopy, InPieces
from phalanx.checkpoint.lock import RunLock
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.optimizer_state import AnyOptimizer
from phalanx.checkpoint.progress import SaveProgress
from phalanx.checkpoint.sharding import Sharding, WritePlan, file_of
from phalanx.checkpoint.state import (
    LocalShard,
    is_on_all_stages,
    local_shards,
    local_shards_with_moments,
)
from phalanx.checkpoint.tensor_file import NAMES, TensorInfo
from phalanx.comm.join import job_timeout
from phalanx.comm.together import all_or_none, gather_objects, on_first_rank, reason_of
from phalanx.errors import CheckpointError, PeerLost
from phalanx.launch.failure import is_lost_peer
from phalanx.launch.heartbeat import PULSE
from phalanx.object_store import address_of, upload_run
from phalanx.report.units import size_text
from phalanx.storage import Checksum

NICENESS = 10
"""Added niceness of the writer thread: Linux gives it a tenth of an ordinary thread's time."""


class Save(NamedTuple):
    """One save: its number, its folder and manifest, the write plan, and this rank's tensors."""

    number: int
    final: Path
    partial: Path
    about: Manifest
    plan: WritePlan
    infos: dict[str, TensorInfo]
    pieces: Iterable[torch.Tensor]
    replaces: bool
    best: int | None


class Saver:
    """Saves the checkpoints of a run; leaving its context waits for the save in progress.

    Every rank creates a saver, and all ranks call `begin` and `finish` together. `keep` may change
    between saves.

    Attributes:
        after_publish: called on rank 0 with the folder of each checkpoint.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep: int | None = None,
        timeout_s: float | None = None,
        num_stages: int = 1,
    ) -> None:
        """Lock the run folder against other saving processes until the context or object ends.

        Args:
            run: folder of the run, the same on all hosts.
            keep: number of latest checkpoints to keep; None keeps all.
            timeout_s: longest time without progress of a save; None takes the timeout of the job's
                collectives.
            num_stages: number of pipeline stages; each is a block of consecutive ranks.

        Raises:
            CheckpointError: another process saves to the run, or its folder cannot be created, or
                the folder is not the same on all hosts.
        """
        self.run = run
        self.keep = keep
        self.after_publish: Callable[[Path], None] = lambda _: None
        self._lock = RunLock(run)
        doing = f"cannot save in {run}"
        mark = on_first_rank(self._claim, doing)
        limit_s = job_timeout().total_seconds() if timeout_s is None else timeout_s
        self._mark, self._progress = mark, SaveProgress(mark, limit_s)
        all_or_none(lambda: self._check_shared(mark), doing)  # also a barrier
        self._copy = HostCopy()
        self._plan = WritePlan({}, dist.get_world_size())
        self._num_stages = num_stages
        self._own: dict[str, Sharding] = {}
        self._thread: threading.Thread | None = None
        self._final = run
        self._failures: list[CheckpointError | PeerLost] = []  # of the save in progress

    def reserve(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, free_bytes: int | None = None
    ) -> str | None:
        """Allocate the host memory for the copy of this rank's shards, before the first step.

        The size includes the moments of the optimizer, which exist only after the first step.
        `free_bytes` limits the allocation; None sets no limit. Return a warning to show the user if
        the memory is too small, in which case steps wait for each save; None otherwise.
        """
        held = local_shards_with_moments(model, optimizer)
        tensors = [held[name].local for name in self._ours(held)]
        if self._copy.reserve(tensors, free_bytes):
            return None
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        left = "" if free_bytes is None else f", but only {size_text(free_bytes)} are free"
        return (
            f"the copy of a checkpoint takes {size_text(num_bytes)} of host memory per rank"
            f"{left}; training will wait while checkpoints are written"
        )

    def begin(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        about: Manifest,
        beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        replaces: bool = False,
    ) -> None:
        """Copy the state and start to write it; the state may change as soon as this returns.

        The writer fills in the `files` of the manifest `about`, whose `frozen` weights are not
        saved. For the further tensors `beside`
        see `local_shards`. If `replaces` is set, a complete checkpoint after the same step may
        exist; the existing one is kept until the new one is complete.

        Raises:
            CheckpointError: the previous save failed, or the state cannot be saved, for example
                because of its dtype.
            PeerLost: the previous save failed because another rank is lost.
        """
        self.finish()
        held = local_shards(model, optimizer, beside)
        held = {n: e for n, e in held.items() if n.removeprefix("model.") not in about.frozen}
        infos = self._ours(held)
        # Training waits only for the copy to host memory; without room for it, until all is
        # written:
        #
        #     room        step | copy | step | step | ...      writer: write, hash, sync .....
        #     no room     step | copy a piece, write it, copy the next, ... | step
        tensors = [held[name].local for name in infos]
        copied = self._copy.take(tensors)
        pieces = InPieces(tensors) if copied is None else copied
        kind = "step" if about.has_optimizer else "weights"
        self._final = manifest.folder_of(self.run, about.steps_done, kind)
        best = about.state["best"]["step"] if "best" in about.state else None
        number = self._progress.begin()
        save = Save(
            *(number, self._final, partial_of(self._final, f"{self._mark}-{number}"), about),
            *(self._plan, infos, pieces, replaces, best),
        )
        self._failures = []
        self._thread = threading.Thread(
            target=self._write,
            args=(save, self._failures),
            name="checkpoint writer",
            daemon=True,  # a writer blocked by the disk must not keep the process alive
        )
        self._thread.start()
        if copied is None:
            self.finish()

    def poll(self) -> None:
        """Raise the error of a save that has ended; return at once if a save is in progress.

        Raises:
            CheckpointError: the save failed.
            PeerLost: the save failed because another rank is lost.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until the save in progress, if any, is published.

        Raises:
            CheckpointError: the save failed or timed out.
            PeerLost: the save failed because another rank is lost.
        """
        with PULSE.waiting(f"waiting for the writers of {self._final.name}"):
            while self._thread is not None:
                self._thread.join(1.0)
                if not self._thread.is_alive():
                    self._thread = None
                elif self._progress.is_late:
                    self._thread = None
                    self._copy = HostCopy()  # the stuck writer still uses the old buffer
                    self._failures = [self._failed(self._progress.timeout_error())]
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # Finish the save after an error of the training too: the copied state was valid.
        if error is not None and is_lost_peer(error):
            self._progress.expect_loss()
        try:
            self.finish()
        except (CheckpointError, PeerLost) as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._copy.release()
            self._lock.release()

    # What differs if each host has a folder of its own (in_memory.py).

    def _claim(self) -> str:
        """Claim the folder on rank 0; return a name that is unique to this saver."""
        return self._lock.take()

    def _check_shared(self, mark: str) -> None:
        self._lock.check_shared(mark)

    def _open(self, save: Save) -> None:
        """Make the folder of a save on this rank, before its file is written."""
        if self._progress.rank == 0:
            self.upload()  # whoever reads a manifest has the tokenizer and settings, too
            make_partial(save.final, save.partial.name, replaces=save.replaces)

    def _publish(self, save: Save, about: Manifest) -> None:
        """Publish a save on rank 0, once all ranks have written their files."""
        moved = partial(self._progress.report_publishing, save.number)
        moved()
        self._lock.fence()
        publish(save.partial, save.final, about, moved)
        self.after_publish(save.final)
        # Before the others are notified, so that an error is raised on every rank.
        remove_older(self.run, self.keep, save.best, moved)

    def upload(self) -> None:
        """Upload this host's records and settings of a run that has an address.

        Raises:
            CheckpointError: another process has saved to the run, whose records stay.
            StoreError: the store failed each time.
        """
        if self._progress.rank == 0:
            self._lock.fence()
        upload_run(self.run)

    def _conclude(self, save: Save) -> None:
        """End a save on this rank, once rank 0 has published it."""

    def _ours(self, held: dict[str, LocalShard]) -> dict[str, TensorInfo]:
        """Return the tensors that this rank writes; recompute the plan if the shardings change."""
        shardings = {name: each.sharding for name, each in held.items()}
        if shardings != self._own:
            self._own = shardings
            for name, sharding in shardings.items():
                if sharding.dtype not in NAMES:
                    raise CheckpointError(
                        f"cannot save {name}: its dtype is {sharding.dtype}; expected one of "
                        f"{', '.join(map(str, NAMES))}"
                    )
            if self._num_stages > 1:
                # A tensor that two stages have, as a tied embedding, has the first one's sharding.
                size = self._plan.num_ranks // self._num_stages
                stage, number = divmod(self._progress.rank, size)
                ranks = range(stage * size, (stage + 1) * size)
                of_stage = {
                    name: each if is_on_all_stages(name) else dataclasses.replace(each, ranks=ranks)
                    for name, each in shardings.items()
                }
                shardings = {}
                for theirs in gather_objects(of_stage if number == 0 else None):
                    shardings = {**(theirs or {}), **shardings}
            self._plan = WritePlan(shardings, self._plan.num_ranks)
        return self._plan.writes_of(self._progress.rank)

    def _failed(self, error: Exception) -> CheckpointError | PeerLost:
        """Return the error of a failed save, with the run's last checkpoint in its message."""
        last = "this run has no checkpoint yet"
        with suppress(OSError):
            if older := manifest.complete_checkpoints(self.run):
                last = f"the last checkpoint is {older[max(older)]}"
        kind = PeerLost if isinstance(error, PeerLost) else CheckpointError
        return kind(f"cannot save {self._final} ({last}): {reason_of(error)}")

    def _write(self, save: Save, failures: list[CheckpointError | PeerLost]) -> None:
        """Write this rank's file and publish the save: the target of the writer thread.

        An error is appended to `failures`, which nobody reads if the save has been given up.
        """
        try:
            if sys.platform == "linux":  # where each thread has a priority of its own
                thread = threading.get_native_id()
                niceness = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, niceness + NICENESS)
            if self._progress.rank == 0:
                self._save_first(save)
            else:
                self._save_other(save)
            self._conclude(save)
        except (CheckpointError, PeerLost) as error:
            failures.append(error)
        except TimeoutError:
            failures.append(self._failed(self._progress.timeout_error()))
        except dist.DistError as error:
            gone = PeerLost(f"the job's store on rank 0 cannot be reached: {reason_of(error)}")
            failures.append(self._failed(gone))
        except Exception as error:
            failed = CheckpointError(f"the writer failed: {reason_of(error)}")
            failures.append(self._failed(failed))

    def _save_first(self, save: Save) -> None:
        """Create the folder, write this rank's file, and publish once all ranks have written."""
        # The commit of a checkpoint:
        #
        #     rank 0    make .partial, "open" | write | wait for all | index, manifest | rename
        #     rank r    wait for "open"       | write | "written"    | wait for "published" ...
        #
        #     killed before the rename      a .partial folder, which the next save removes
        #     killed after it               a complete checkpoint
        #     error or lost rank            rank 0 publishes "failed", and every rank raises it
        #
        # The manifest is the last file written, and has the checksums of all others.
        progress, number = self._progress, save.number
        try:
            self._open(save)
            progress.publish_outcome(number, "open")
            progress.report(number, "written", _write_file(save, progress))
            written = [*itertools.chain(*progress.wait(number))]
            files = {name: tuple(checksum) for name, checksum, _ in written}
            files[index.NAME] = index.write(save.partial, save.plan)
            blocks = {name: tuple(each) for name, _, each in written if each}
            where = save.partial.name if blocks else ""
            about = dataclasses.replace(save.about, files=files, blocks=blocks, save=where)
            self._publish(save, about)
        except Exception as error:  # after any error other ranks must stop waiting
            failure = self._failed(error)
            progress.publish_outcome(number, "failed", failure)
            # The save is still the current one. Objects stay: a manifest whose answer was lost may
            # name them.
            shutil.rmtree(save.partial, ignore_errors=True)
            raise failure from error
        progress.publish_outcome(number, "published")

    def _save_other(self, save: Save) -> None:
        """Write this rank's file, and wait until rank 0 has published the checkpoint."""
        progress = self._progress
        progress.wait_to_begin(save.number)
        try:
            try:
                self._open(save)
                progress.report(save.number, "written", _write_file(save, progress))
            except (CheckpointError, PeerLost, dist.DistError):
                raise
            except Exception as error:  # after any error rank 0 must stop waiting
                progress.report(save.number, "failed", reason_of(error))
            progress.wait(save.number)
        except (CheckpointError, PeerLost):  # rank 0 may have removed the folder already
            with suppress(OSError):
                (save.partial / file_of(progress.rank)).unlink(missing_ok=True)
                save.partial.rmdir()
            raise


def _write_file(save: Save, progress: SaveProgress) -> list[tuple[str, Checksum, list[str]]]:
    """Write this rank's file; return its name, checksum and blocks, or [] without tensors."""
    if not save.infos:
        return []
    path, blocks = save.partial / file_of(progress.rank), list[str]()
    moved = partial(progress.report_bytes, save.number)
    hashed = None if address_of(path) is None else blocks
    return [(path.name, tensor_file.write(path, save.infos, save.pieces, moved, hashed), blocks)]
