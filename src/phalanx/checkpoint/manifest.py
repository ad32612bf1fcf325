"""The manifest of a checkpoint: written last, so that a folder with a manifest is whole.

<run>/checkpoints/step-00000200/         a checkpoint after 200 steps
    manifest.json                        what it is a checkpoint of, and the checksum of each file
    index.json                           the shape of each tensor, and which file holds what of it
    rank-00000.safetensors ...           the tensors, one file for each rank that wrote
<run>/checkpoints/step-00000300.partial/ one that is being written, or was when the run was killed
<run>/checkpoints/step-00000100.removed/ one that is being removed, or replaced, likewise
<run>/checkpoints/.lock                  held by the process that saves to the folder
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.checkpoint.foreign import (
    brief,
    decode,
    harmless,
    is_plain_name,
    read_json,
    write_json,
)
from phalanx.checkpoint.position import ScriptPosition
from phalanx.errors import CheckpointError
from phalanx.models.shape import ModelShape
from phalanx.storage import Checksum, hint_of_missing

NAME = "manifest.json"

FORMAT = 3
"""What a reader must know; another number is refused."""

STEP_FOLDER = re.compile(r"step-([0-9]+)")
"""Name of a checkpoint's folder; one that is still being written, or being removed, has another."""

REMOVED = ".removed"
"""What the name of a checkpoint ends with while it is removed."""

LOCK = ".lock"
"""Name of the file beside the checkpoints that is locked by the process that saves them."""

EARLIER_LENGTHS = "earlier lengths"
"""Name in the stream of a run that changed the length of its samples within an epoch."""

NUM_NAMED = 3
"""How many older checkpoints the message of a damaged one names."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, apart from tensors.

    Attributes:
        steps_done: optimizer steps taken.
        num_steps: optimizer steps the run was to take.
        consumed: samples of the global order that were used up; with `first_epoch` the whole state
            of the data.
        num_ranks: ranks that wrote it.
        strategy: text of the strategy that wrote it.
        shape: the model's shape.
        stream: what fixes the order of the samples, by name.
        first_epoch: number of the epoch at which that order begins.
        settings: other settings of the run that a resumed run keeps, by name.
        script: the position of a training script in its data; None for a run of `phalanx train`.
        registered: states of registered objects by their names, see checkpoint/registered.py.
        best: which evaluation was the best so far, see train/best.py; None if none was looked for.
        scaler: state of the scaler of the loss, or None if the precision needs none.
        has_optimizer: whether it holds the optimizer's state, so that a run can resume from it; one
            with weights alone can only begin a run.
        is_passing: whether it was made by the clock or at a signal, and is to be removed
            once a later one is whole.
        files: checksum of each file but the manifest, by name.
        format: of the checkpoint.
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
    script: ScriptPosition | None = None
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
    best: dict[str, Any] | None = None
    scaler: dict[str, float] | None = None
    has_optimizer: bool = True
    is_passing: bool = False
    files: dict[str, Checksum] = field(default_factory=dict[str, Checksum])
    format: int = FORMAT

    def check_shape(self, shape: ModelShape) -> None:
        """Refuse to resume with another model.

        Two values are no property of weights and may differ: dropout, and the longest row of a
        model whose positions are rotary.
        """
        ours = json.loads(json.dumps(dataclasses.asdict(shape)))  # as it was written: no tuples
        defaults = {each.name: each.default for each in dataclasses.fields(shape)}
        free = ("dropout", "max_seq_len") if shape.position == "rope" else ("dropout",)
        for name, value in ours.items():
            was = self.shape.get(name, defaults[name])  # it may be older than the choice
            if value == was or name in free:
                continue
            if name == "max_seq_len" and self.shape.get("position") == "learned":
                raise CheckpointError(
                    f"shape.max_seq_len is {value}, but the run's model has learned a table of "
                    f"{was} positions, which cannot change; leave it out, and set corpus.seq_len "
                    f"to at most {was}"
                )
            raise CheckpointError(
                f"the checkpoint is of another model: its {name} is {was}, and --model or --shape "
                f"asks for {value}; leave them out, and the run has the model of its checkpoint"
            )

    def check_optimizer(self) -> None:
        """Refuse to resume from weights alone."""
        if not self.has_optimizer:
            raise CheckpointError(
                "the checkpoint holds weights alone, without an optimizer's state, so no run can "
                "be resumed from it; begin a run with its weights by --init"
            )


class Checkpoint(NamedTuple):
    """The folder of a whole checkpoint, and its manifest."""

    folder: Path
    about: Manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the checkpoint in `folder` whole.

    Control characters, as a path among the settings may have, are spelled out.

    Raises:
        CheckpointError: it would be too large to be read.
        OSError: the disk is full, say.
    """
    values = harmless(dataclasses.asdict(manifest))
    values["sha256"] = _sha256(values)
    write_json(folder / NAME, values, indent=2)


def _sha256(values: dict[str, Any]) -> str:
    """Return the checksum of the manifest's own values, however they are laid out in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / NAME
    try:
        return _decode(read_json(path))
    except FileNotFoundError as error:
        others = others_than(folder)
        raise CheckpointError(f"{folder} holds no whole checkpoint: no {NAME}{others}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}{others_than(folder)}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}{others_than(folder)}") from error


def _decode(values: dict[str, Any]) -> Manifest:
    """Return the manifest that the values of a file make, or raise ValueError."""
    for name in ("format", "sha256"):
        if name not in values:
            raise ValueError(f"it has no '{name}'")
    if values["format"] == 2:
        raise ValueError(
            f"it is of format 2, of an earlier Phalanx, whose files could run code when they were "
            f"read; this version reads format {FORMAT}. Take the weights out with the version that "
            "wrote it: `phalanx convert` to a Hugging Face folder, and back with this one"
        )
    if values["format"] != FORMAT:
        found = brief(values["format"])
        raise ValueError(f"it is of format {found}; this version reads format {FORMAT}")
    sha256, expected = values.pop("sha256"), _sha256(values)
    # An earlier version kept the lengths of the samples before, and read the rest of the epoch in
    # which they changed before whole ones.
    if values.pop("parts", None) and isinstance(values.get("stream"), dict):
        values["stream"][EARLIER_LENGTHS] = True
    manifest: Manifest = decode(Manifest, values)
    for name in manifest.files:
        if not is_plain_name(name):
            raise ValueError(f"it names the file {brief(name)}, expected one of the folder itself")
    if sha256 != expected:
        raise ValueError("it is damaged: its sha256 is not the written one")
    return manifest


def folder_of(run: Path, steps_done: int) -> Path:
    """Return where a run keeps the checkpoint after `steps_done` steps."""
    return run / "checkpoints" / f"step-{steps_done:08d}"


def run_of(folder: Path) -> Path | None:
    """Return the run folder that holds a checkpoint, or None if no run folder does."""
    for path in (Path(os.path.abspath(folder)), folder.resolve()):  # "checkpoints" may be a link
        if path.parent.name == "checkpoints":
            return path.parent.parent
    return None


def whole(run: Path) -> dict[int, Path]:
    """Return the whole checkpoints of a run folder by the steps done, in rising order.

    A checkpoint that is being replaced loses its name before the next one gets it, so a kill
    between the two leaves `step-N.removed` alone: it counts as long as there is no whole `step-N`.
    A kill may leave so what `remove_older` has renamed; the next save removes it.
    """
    found: list[tuple[int, bool, Path]] = []
    for folder in (path.parent for path in (run / "checkpoints").glob(f"*/{NAME}")):
        has_name = folder.suffix != REMOVED
        if (step := _step_of(folder if has_name else folder.with_suffix(""))) is not None:
            found.append((step, has_name, folder))
    return {step: folder for step, _, folder in sorted(found)}


def _step_of(folder: Path) -> int | None:
    """Return the steps done, by the name of a checkpoint's folder; None for any other folder."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def not_whole_after(folder: Path) -> str | None:
    """Say which later checkpoints of a run are not whole, so that it goes back to `folder`."""
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


def passing(run: Path) -> list[Path]:
    """Return the whole checkpoints of a run folder that the next one replaces."""
    found: list[Path] = []
    for folder in whole(run).values():
        with suppress(CheckpointError):  # one that cannot be read is not for us to remove
            if read(folder).is_passing:
                found.append(folder)
    return found


def others_than(folder: Path) -> str:
    """Return words that name what can be used instead of a damaged checkpoint, to end a message.

    Those are the latest of the older checkpoints of its run; there are no words if there are none.
    """
    run, steps_done = run_of(folder), _step_of(folder)
    if run is None or steps_done is None:
        return ""
    older = [str(path) for step, path in reversed(whole(run).items()) if step < steps_done]
    named = ", ".join(older[:NUM_NAMED])
    return f"; older checkpoints that can be used instead: {named}" if named else ""


def find(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the latest whole one of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / NAME).exists():
        return path
    if not path.exists():
        raise CheckpointError(f"no checkpoint in {path}: it does not exist{hint_of_missing(path)}")
    found = whole(path)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}: expected a run folder with checkpoints/step-*/{NAME}, or "
            "such a step folder itself"
        )
    return found[max(found)]


def find_and_read(path: Path) -> Checkpoint:
    """Return the checkpoint that `path` means, see `find`, with its manifest.

    Raises:
        CheckpointError: there is none, or its manifest cannot be read.
    """
    folder = find(path)
    return Checkpoint(folder, read(folder))
