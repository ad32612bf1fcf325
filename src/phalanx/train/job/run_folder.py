"""Choose, create and check the folder of a run: its path, other runs' checkpoints, disk space."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.account.parameters import num_parameters
from phalanx.checkpoint import manifest
from phalanx.checkpoint.lock import RunLock
from phalanx.checkpoint.manifest import Checkpoint
from phalanx.config import TrainConfig
from phalanx.config.file import RUN_FILE, to_toml
from phalanx.config.save_policy import SavePolicy
from phalanx.config.schema import JobConfig, RunConfig
from phalanx.errors import ConfigError, PhalanxError, TrainingError
from phalanx.hugging_face.companions import keep_chat, keep_family, keep_tokenizer
from phalanx.launch import debug_net, rank_log
from phalanx.launch.launched import launched
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.measure.logs import has_steps
from phalanx.models.shape import ModelShape
from phalanx.object_store import address_of, fetch_run, path_of, put, remove
from phalanx.report.units import size_text
from phalanx.storage import existing, free_bytes, remove_folder, replace_file
from phalanx.strategy import Strategy
from phalanx.train.job.resume import stored_settings
from phalanx.train.precision import Precision

if TYPE_CHECKING:
    from phalanx.train.job.resolve import Job

TENSORS_PER_PARAMETER: Final = 3
"""Tensors in a checkpoint for each parameter: the weight and the two moments of AdamW."""


def out_folder(config: TrainConfig, strategy: Strategy, name: str) -> Path:
    """Return the folder to write to: `out`, else the resumed run's folder, else a new one.

    Raises:
        ConfigError: the checkpoint to resume from is not in a run folder.
    """
    if config.out is not None:
        return path_of(config.out)
    if config.resume is not None:
        return resumed_folder(path_of(config.resume))
    return new_folder(name, strategy)


def resumed_folder(path: Path) -> Path:
    """Return the folder of the run to resume, which `path` names, see `manifest.run_folder`.

    Raises:
        ConfigError: `path` is a checkpoint that is not in a run folder.
    """
    run = manifest.run_folder(path)
    if run == path and (path / manifest.NAME).exists():
        raise ConfigError(
            f"resume is {path}, a checkpoint outside the folder of its run; give the folder in "
            "which to resume by --out"
        )
    return run


def new_folder(name: str, strategy: Strategy) -> Path:
    """Return the folder of a new run without `out`: runs/ and name, strategy and time."""
    new = f"{name}-{strategy}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path("runs") / new.replace(":", "_").replace("/", "_").replace(",", "-")


def net_files(config: RunConfig, out: Path) -> AbstractContextManager[None]:
    """Return a context in which a job begins, and writes the files of `debug_net` to `out`.

    Raises:
        ConfigError: each rank would name the new folder of the run itself.
    """
    if not config.debug_net:
        return nullcontext()
    is_new = isinstance(config, JobConfig) and config.out is config.resume is None
    if is_new and is_under_torchrun():
        raise ConfigError(
            "debug_net writes to the folder of the run before the ranks can agree on its name; "
            "give --out FOLDER"
        )
    return debug_net.into(out / rank_log.FOLDER)


def claim(job: Job) -> Job:
    """Create the folder of a run, and return the job with its path; one process calls this.

    A new run without `out` gets a number appended if another run has the name already.
    """
    out = job.out
    out.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        try:
            out.mkdir()
            return dataclasses.replace(job, out=out, is_new=True)
        except FileExistsError:
            if job.config.out is not None or job.start is not None:
                if not out.is_dir():
                    raise
                break
            # A run that started in the same second.
            out = job.out.with_name(f"{job.out.name}-{number}")
    return dataclasses.replace(job, out=out)


@contextmanager
def removed_if_refused(out: Path, *, is_new: bool) -> Generator[None]:
    """Remove the new folder of a run if the block raises a PhalanxError before a step.

    After a crash, a TrainingError, a folder with logs stays. A folder that another process saves to
    stays, too. One process of a job calls this; under torchrun that is the first rank, and the
    others may still run. The records of a run that has an address are fetched first.
    """
    fetch_run(out)
    try:
        yield
    except PhalanxError as error:
        is_kept = isinstance(error, TrainingError) and (out / rank_log.FOLDER).exists()
        lock = RunLock(out)
        if is_new and not is_kept and out.is_dir():
            with suppress(OSError):
                if lock.take_if_free() and not has_steps(out):
                    remove_folder(out)
        lock.release()
        raise


def keep_origin(job: Job) -> None:
    """Write the settings, the tokenizer and the model type of a run into its folder.

    Raises:
        OSError: a write failed, for example because the disk is full.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    keep_tokenizer(job.tokens.tokenizer, job.out)
    if (chat := job.tokens.chat) is not None:
        words = (chat["template"], chat["names"], chat["end_ids"])
        keep_chat(job.weights_folder, job.out, *words)
    elif job.weights_folder is not None:
        keep_family(job.weights_folder, job.out)
    file, state = job.out / RUN_FILE, launched()
    if state is None or state.run is None or not file.exists():  # else the first generation's stay
        replace_file(file, (_HEAD + to_toml(stored_settings(job.config))).encode())


_HEAD: Final = """\
# The settings of this run, as they were resolved. `phalanx train --resume` on this folder resumes
# with them; `phalanx train --config` on this file starts a new run with the same settings.

"""


def check_unused(out: Path, start: Checkpoint | None) -> None:
    """Check that `out` has no checkpoints that a later --resume would confuse with this run's.

    Raises:
        ConfigError: `out` has checkpoints of another run, or later ones than `start`; or the run of
            `start` has removed it.
    """
    if start is not None and start.is_in_memory:
        start.set_aside()  # the state is of this run, and saves in memory may have replaced it
        return
    ours = None if start is None else manifest.identity(start.folder)
    if start is not None and ours is None:
        raise ConfigError(
            f"{start.folder}, the checkpoint to resume from, no longer exists"
            f"{manifest.removed_hint(start.folder)}; start again"
        )
    checkpoints = manifest.complete_checkpoints(out)
    if not checkpoints:
        return
    if start is not None and ours in map(manifest.identity, checkpoints.values()):
        start.set_aside()
        checkpoints = manifest.complete_checkpoints(out)
    last = max(checkpoints)
    if start is None or ours not in map(manifest.identity, checkpoints.values()):
        raise ConfigError(
            f"{out} holds checkpoints of another run, the last after step {last}; give another "
            f"--out, or resume that run by --resume {out}"
        )
    if last > start.about.steps_done:
        raise ConfigError(
            f"resume is from step {start.about.steps_done}, but {out} holds a checkpoint after "
            f"step {last}; give another folder (--out), resume from the last one, "
            f"{checkpoints[last]}, or remove it"
        )


STARTED: Final = ".served"
"""File in a run folder: the address of the coordinator whose job is not over; by worker 0."""


def continues_served(out: Path, coordinator: str | None) -> bool:
    """Return whether `out` is the folder of the job of a coordinator that worker 0 has begun."""
    mark = out / STARTED
    return coordinator is not None and mark.exists() and mark.read_text() == coordinator


def check_writable(out: Path) -> None:
    """Check that the folder can be created and written to, by a temporary file that is removed.

    Raises:
        ConfigError: it cannot; the message has the reason.
    """
    try:
        if address_of(out) is not None:
            put(probe := out / ".probe", b"")
            remove([probe])
        with tempfile.TemporaryFile(dir=existing(out)) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}; give another --out") from error


def checkpoint_bytes(shape: ModelShape, precision: Precision) -> int:
    """Return the approximate bytes of a checkpoint: its tensors, without the small other files."""
    return TENSORS_PER_PARAMETER * precision.master.itemsize * num_parameters(shape).trained


def check_space(out: Path, num_checkpoints: int, policy: SavePolicy, one_bytes: int) -> None:
    """Check the disk space for the `num_checkpoints` to come, and one more saved by time.

    Raises:
        ConfigError: the space is too small; the message has the bytes needed and left.
    """
    if address_of(out) is not None:
        return
    if policy.keep is not None:  # the next is complete before the oldest is removed
        num_kept = len(manifest.complete_checkpoints(out)) - len(
            manifest.temporary_checkpoints(out)
        )
        num_checkpoints = min(num_checkpoints, max(1, policy.keep + 1 - num_kept))
    if policy.minutes > 0 and num_checkpoints > 0:
        num_checkpoints += 1  # removed only after the next is complete
    left_bytes = free_bytes(out)
    if left_bytes < num_checkpoints * one_bytes:
        raise ConfigError(
            f"the run's checkpoints ({num_checkpoints}, of {size_text(one_bytes)} each) need "
            f"{size_text(num_checkpoints * one_bytes)}, but {out} has "
            f"{size_text(left_bytes)} left; give another --out, make room, save less often "
            "(--save every=STEPS), keep fewer (keep=NUMBER), or do not save by time (minutes=0)"
        )
