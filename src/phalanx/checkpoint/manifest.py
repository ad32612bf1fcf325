"""The manifest of a checkpoint: written last, so that a folder with a manifest is complete.

<run>/checkpoints/step-00000200/         a checkpoint after 200 steps
    manifest.json                        settings and state of the run, checksum of each file
    index.json                           shape and dtype of each tensor, file of each shard
    rank-00000.safetensors ...           the tensors, one file for each rank that wrote any
<run>/checkpoints/step-00000300.partial/ a save in progress, or interrupted by a kill
<run>/checkpoints/step-00000100.removed/ a removal or replacement in progress, or interrupted
<run>/checkpoints/step-00000400.damaged/ a damaged one; the run resumed from an older one
<run>/checkpoints/weights-00000300/      the weights alone, of a save that could not store the rest
<run>/checkpoints/.lock                  lock file of the process that saves to the folder
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from phalanx.checkpoint.untrusted import (
    brief,
    decode,
    escape_control,
    is_plain_name,
    read_json,
    write_json,
)
from phalanx.errors import CheckpointError
from phalanx.models.shape import IN_EVALUATION, ModelShape
from phalanx.object_store import address_of, fetch, put, refresh, remove
from phalanx.storage import Checksum, hint_of_missing

T = TypeVar("T")

NAME = "manifest.json"

FORMAT = 3
"""Version of the checkpoint format; a checkpoint with another version is refused."""

STEP_FOLDER = re.compile(r"step-([0-9]+)")
"""Name of a complete checkpoint's folder; folders being written or removed have a suffix."""

REMOVED = ".removed"
"""Suffix of the name of a checkpoint folder while it is being removed or replaced."""

DAMAGED = ".damaged"
"""Suffix of the name of a damaged checkpoint folder, once the run resumed from an older one."""

LOCK = ".lock"
"""Name of the file in the checkpoints folder that the saving process locks."""

EARLIER_LENGTHS = "earlier lengths"
"""Key in `Manifest.stream` of a run that changed its sample length within an epoch."""

NUM_NAMED = 3
"""Number of older checkpoints that the error message for a damaged one lists."""

IN_MEMORY: Final = "states-in-memory"
"""Folder in `Launched.folder`: states in memory of the run /a/b are in states-in-memory/a/b."""

RECOVERED: Final = dict[Path, Path]()
"""Run -> its state in memory that the ranks before a restart have left, see `in_memory.recover`."""

OLDER: Final = "; older checkpoints that can be used instead: "

NUM_TRIES: Final = 3
"""Most checkpoints that `read_found` tries; a run has to save once for each that it removes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint that is not tensors.

    Attributes:
        steps_done: optimizer steps taken.
        num_steps: total optimizer steps the run was configured for.
        consumed: samples consumed from the global order of text; with `first_epoch`, the complete
            position. It is no state of an object, because the steps of a run follow from it.
        num_ranks: number of ranks of the job that saved.
        strategy: strategy of the job that saved, as text.
        shape: the decoder's shape; empty for a module of a script.
        stream: values that determine the order of the samples of text, by name.
        first_epoch: number of the epoch at which the order of the samples begins.
        settings: other settings of the run that a resumed run keeps, by name.
        state: states of objects of the run, by name, see checkpoint/run_state.py.
        registered: states of registered objects by their names, see checkpoint/registered.py.
        frozen: checksums of the weights that are left out, by name, see checkpoint/frozen.py.
        has_optimizer: whether optimizer state is included, so that a run can resume; a checkpoint
            with weights only can initialize a new run.
        is_passing: whether a time interval, a signal or a new best evaluation triggered the save;
            it is removed once a later one is complete, unless its evaluation is the best.
        files: checksum of each file except the manifest, by name.
        save: folder of these files within the checkpoint's, of a save to an object store; on disk
            they are in the checkpoint's folder itself.
        blocks: sha256 of each block of a tensor file in an object store, by name.
        format: version of the checkpoint format.
    """

    steps_done: int
    num_steps: int
    consumed: int
    num_ranks: int
    strategy: str
    shape: dict[str, Any]
    stream: dict[str, Any]
    first_epoch: int = 0
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
    frozen: dict[str, str] = field(default_factory=dict[str, str])
    has_optimizer: bool = True
    is_passing: bool = False
    files: dict[str, Checksum] = field(default_factory=dict[str, Checksum])
    save: str = ""
    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    format: int = FORMAT

    def check_shape(self, shape: ModelShape) -> None:
        """Raise CheckpointError unless `shape` is the shape of the checkpoint's model.

        Three do not affect weights and may differ: dropout, the maximum sequence length of a model
        with rotary position embeddings, and what acts on experts in training alone.
        """
        fixed = dataclasses.replace(shape, experts=shape.experts and shape.experts.as_evaluated)
        ours = json.loads(json.dumps(dataclasses.asdict(fixed)))  # as JSON: lists for tuples
        defaults = {each.name: each.default for each in dataclasses.fields(shape)}
        free = ("dropout", "max_seq_len") if shape.position == "rope" else ("dropout",)
        for name, value in ours.items():
            was = self.shape.get(name, defaults[name])  # an older file may lack the field
            if name == "experts" and was:
                was = {**was, **IN_EVALUATION}
            if value == was or name in free:
                continue
            if name == "max_seq_len" and self.shape.get("position") == "learned":
                raise CheckpointError(
                    f"shape.max_seq_len is {value}, but the run's model has a learned table of "
                    f"{was} positions, whose size cannot change; leave shape.max_seq_len out, and "
                    f"set corpus.seq_len to at most {was}"
                )
            raise CheckpointError(
                f"the checkpoint is of another model: its {name} is {was}, but --model or --shape "
                f"sets {value}; leave --model and --shape out to use the checkpoint's model"
            )

    @property
    def is_of_decoder(self) -> bool:
        """Whether the model is a decoder of `phalanx train`, not a module of a script."""
        return bool(self.shape)

    def check_optimizer(self) -> None:
        """Raise CheckpointError if the checkpoint has no optimizer state to resume from."""
        if not self.has_optimizer:
            raise CheckpointError(
                "the checkpoint has only weights and no optimizer state, so no run can be resumed "
                "from it; start a run with its weights by --init"
            )


class Checkpoint(NamedTuple):
    """The folder of a complete checkpoint, and its manifest.

    Attributes:
        damaged: later checkpoints of the run, which are damaged, and how; see `files.find_whole`.
    """

    folder: Path
    about: Manifest
    damaged: Mapping[Path, str] = {}

    @property
    def is_in_memory(self) -> bool:
        """Whether it is a state in memory, of which each host has a folder of its own."""
        return IN_MEMORY in self.folder.parts

    def words(self) -> list[str]:
        """Return a line for each checkpoint in `damaged`."""
        return [
            f"resumes from {self.folder.name}: {why}; the run renames {folder.name} to "
            f"{folder.name}{DAMAGED}"
            for folder, why in self.damaged.items()
        ]

    def set_aside(self) -> None:
        """Rename the checkpoints in `damaged`, so that the run can save after the same steps."""
        for folder in self.damaged:
            aside = folder.with_name(folder.name + DAMAGED)
            with suppress(FileNotFoundError):  # another host has renamed it
                if address_of(folder) is None:
                    folder.rename(aside)
                else:
                    put(aside / NAME, (folder / NAME).read_bytes())
                    remove([folder / NAME])


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which marks the checkpoint in `folder` as complete.

    Control characters, for example in a path among the settings, are escaped.

    Raises:
        CheckpointError: the file would be too large for `read_json`.
        OSError: the write failed, for example because the disk is full.
    """
    values = escape_control(vars(manifest))  # `asdict` would copy each value
    values = {name: each for name, each in values.items() if each or name not in ("save", "blocks")}
    values["sha256"] = _sha256(values)
    write_json(folder / NAME, values)


def _sha256(values: dict[str, Any]) -> str:
    """Return the sha256 of the manifest's values, independent of key order and whitespace."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    path = folder / NAME
    try:
        return _decode(read_json(path if path.exists() else fetch(path)))
    except FileNotFoundError as error:
        others = older_checkpoints_hint(folder)
        raise CheckpointError(f"{folder} has no complete checkpoint: no {NAME}{others}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}{older_checkpoints_hint(folder)}") from error
    except ValueError as error:
        raise CheckpointError(
            f"cannot read {path}: {error}{older_checkpoints_hint(folder)}"
        ) from error


def _decode(values: dict[str, Any]) -> Manifest:
    """Return the manifest decoded from the JSON `values` of a file, or raise ValueError."""
    for name in ("format", "sha256"):
        if name not in values:
            raise ValueError(f"it has no '{name}'")
    if values["format"] == 2:
        raise ValueError(
            f"it is of format 2, of an earlier Phalanx, whose files could run code when they were "
            f"read; this version reads format {FORMAT}. Convert it to a Hugging Face folder with "
            "the version that wrote it (`phalanx convert`), and that folder back with this one"
        )
    if values["format"] != FORMAT:
        found = brief(values["format"])
        raise ValueError(f"it is of format {found}; this version reads format {FORMAT}")
    sha256, expected = values.pop("sha256"), _sha256(values)
    # An earlier version stored previous sample lengths in "parts", and finished the epoch in which
    # the length changed before it began a new epoch.
    if values.pop("parts", None) and isinstance(values.get("stream"), dict):
        values["stream"][EARLIER_LENGTHS] = True
    # Earlier versions stored the states of some objects in a field each.
    try:
        states = {name: values.pop(name, None) for name in ("scaler", "best")}
        if (script := values.pop("script", None)) is not None:
            states |= {name: script[name] for name in ("loaders", "schedulers", "draws")}
            states["settings"] = script["groups"]
            values["registered"] = values.get("registered") or script.get("registered", {})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its position of a script is not valid: {brief(error)}") from error
    if states := {name: each for name, each in states.items() if each is not None}:
        values["state"] = states
    manifest: Manifest = decode(Manifest, values)
    for name in (*manifest.files, manifest.save or NAME):
        if not is_plain_name(name):
            raise ValueError(f"it names the file {brief(name)}, expected one in its own folder")
    if sha256 != expected:
        raise ValueError("it is damaged: its sha256 differs from the recorded one")
    return manifest


def folder_of(run: Path, steps_done: int, kind: str = "step") -> Path:
    """Return the folder of a run's checkpoint, or of its `weights`, after `steps_done` steps."""
    return run / "checkpoints" / f"{kind}-{steps_done:08d}"


def run_of(folder: Path) -> Path | None:
    """Return the run of the checkpoint `folder`; None if there is none.

    The run of a state in memory is its folder on disk.
    """
    if IN_MEMORY in (parts := folder.parts):
        folder = Path("/", *parts[parts.index(IN_MEMORY) + 1 :])
    named = [folder] if len(folder.parts) > 2 else []  # else the run is the working folder
    for path in (*named, Path(os.path.abspath(folder)), folder.resolve()):  # there may be links
        if path.parent.name == "checkpoints":
            return path.parent.parent
    return None


def run_folder(path: Path) -> Path:
    """Return the run that `path` names: a run, its folder of checkpoints, or a checkpoint of it.

    A new run may have any name, so `path` itself is returned if it is none of the three.
    """
    if (path / NAME).exists() or _step_of(path) is not None:
        return run_of(path) or path
    if path.name == "checkpoints":
        refresh(path, NAME)
    has_steps = any(_step_of(each.parent) is not None for each in path.glob(f"*/{NAME}"))
    return (run_of(path / "step") if has_steps else None) or path


def complete_checkpoints(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run folder by steps done, in ascending order.

    `publish` renames the checkpoint that it replaces to `step-N.removed` before the new one gets
    the name `step-N`. A kill between the two renames leaves only `step-N.removed`, so that folder
    counts while there is no complete `step-N`. So does a folder that `remove_older` had renamed
    when the run was killed; the next save restores its name, and may then remove it.
    """
    found: list[tuple[int, bool, Path]] = []
    refresh(run / "checkpoints", NAME)
    for folder in (path.parent for path in (run / "checkpoints").glob(f"*/{NAME}")):
        has_name = folder.suffix != REMOVED
        if (step := _step_of(folder if has_name else folder.with_suffix(""))) is not None:
            found.append((step, has_name, folder))
    return {step: folder for step, _, folder in sorted(found)}


def saved_states(run: Path) -> dict[int, Path]:
    """Return `complete_checkpoints` of a run, and its state in memory if this is a restart."""
    states = complete_checkpoints(run)
    folder = RECOVERED.get(Path(os.path.abspath(run)))
    if folder is not None and (folder / NAME).exists():  # else a later save has removed it
        states[_step_of(folder) or 0] = folder
    return dict(sorted(states.items()))


def _step_of(folder: Path) -> int | None:
    """Return the steps in the name of a checkpoint folder; None for any other folder."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def incomplete_after(folder: Path) -> str | None:
    """Return a message that names incomplete checkpoints later than `folder`; None without any."""
    steps_done = _step_of(folder)
    later = sorted(
        path.name
        for path in (folder.parent.iterdir() if steps_done is not None else ())
        if (_step_of(path) or 0) > (steps_done or 0) and not (path / NAME).exists()
    )
    if not later:
        return None
    have = "have" if len(later) > 1 else "has"
    return f"resumes from {folder.name}: {', '.join(later)} {have} no {NAME}, so not all was saved"


def temporary_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder that are `is_passing`."""
    found: list[Path] = []
    for folder in complete_checkpoints(run).values():
        with suppress(CheckpointError):  # an unreadable checkpoint must not be removed
            if read(folder).is_passing:
                found.append(folder)
    return found


def older_checkpoints_hint(folder: Path) -> str:
    """Return the end of a message on a damaged checkpoint: older ones of the run to use instead.

    At most NUM_NAMED checkpoints are named, latest first; the text is empty if there are none.
    """
    run, steps_done = run_of(folder), _step_of(folder)
    if run is None or steps_done is None:
        return ""
    older = [
        str(path) for step, path in reversed(complete_checkpoints(run).items()) if step < steps_done
    ]
    named = ", ".join(older[:NUM_NAMED])
    return f"{OLDER}{named}" if named else ""


def removed_hint(folder: Path) -> str:
    """Return the end of a message on a missing checkpoint: the latest one of its run.

    The text is empty if `folder` has not the name of a checkpoint, or the run has none.
    """
    run = run_of(folder)
    if run is None or _step_of(folder) is None or not (found := complete_checkpoints(run)):
        return ""
    return f"; a run removes older checkpoints, and the latest of this run is {found[max(found)]}"


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the latest complete one of `run_folder(path)`.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if fetch(path / NAME).exists():
        return path
    if not path.exists() and address_of(path) is None:
        hint = removed_hint(path) or hint_of_missing(path)
        raise CheckpointError(f"no checkpoint in {path}: it does not exist{hint}")
    is_step = run_of(path) is not None and _step_of(path) is not None
    found = {} if is_step else complete_checkpoints(run_folder(path))
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}: expected a run folder with checkpoints/step-*/{NAME}, or "
            f"such a step folder itself{older_checkpoints_hint(path)}"
        )
    return found[max(found)]


def read_found(
    path: Path,
    read: Callable[[Path], T],
    decide: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> T:
    """Return what `read` returns for the checkpoint that `find` returns for `path`.

    If the run removes or replaces that checkpoint while it is read, find and read again.

    Args:
        path: a checkpoint, or the folder of a run.
        read: reads the checkpoint in a folder, or raises a CheckpointError.
        decide: calls a function and returns its result; if several ranks read together, the result
            of the first rank on every rank.

    Raises:
        CheckpointError: there is no complete checkpoint, `read` raised it for a checkpoint that is
            still there, or the run removed NUM_TRIES checkpoints, each while it was read.
    """
    failure: CheckpointError | None = None
    for _ in range(NUM_TRIES):
        folder, before = decide(lambda: (folder := find(path), identity(folder)))
        try:
            return read(folder)
        except CheckpointError as error:
            if before is not None and before == decide(lambda folder=folder: identity(folder)):
                raise
            failure = error
    raise CheckpointError(
        f"the run of {path} removed {NUM_TRIES} checkpoints, each while it was read; read a "
        f"checkpoint that the run keeps, or copy one first: {failure}"
    ) from failure


def identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder; None if it does not exist.

    In an object store the identity of a checkpoint is the content of its manifest.
    """
    try:
        if address_of(folder) is not None:
            content = fetch(folder / NAME).read_bytes()
            return 0, int.from_bytes(hashlib.sha256(content).digest()[:7])
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def find_and_read(path: Path) -> Checkpoint:
    """Return the checkpoint that `find` returns for `path`, with its manifest.

    Raises:
        CheckpointError: there is no complete checkpoint, or its manifest cannot be read.
    """
    found = read_found(path, lambda folder: Checkpoint(folder, read(folder)))
    if _step_of(found.folder) not in (None, steps := found.about.steps_done):
        raise CheckpointError(f"{found.folder} has another number than its {steps} steps")
    return found
