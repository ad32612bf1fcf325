"""The manifest of a checkpoint: written last, so that a folder with a manifest is whole.

<run>/checkpoints/step-00000200/         a checkpoint after 200 steps
    manifest.json                        what it is a checkpoint of
    *.distcp, .metadata                  the tensors (torch.distributed.checkpoint)
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.models.shape import ModelShape

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, apart from tensors.

    Attributes:
        steps_done: optimizer steps taken.
        num_steps: optimizer steps the run was to take.
        consumed: samples of the global order that were used up; the whole state of the data.
        seed: seed of the run.
        num_ranks: ranks that wrote it.
        strategy: text of the strategy that wrote it.
        shape: the model's shape.
        tokens: fingerprint of the tokens it was trained on.
        global_batch_size: sequences in one step.
    """

    steps_done: int
    num_steps: int
    consumed: int
    seed: int
    num_ranks: int
    strategy: str
    shape: dict[str, Any]
    tokens: str
    global_batch_size: int
    format: int = FORMAT

    def check_shape(self, shape: ModelShape) -> None:
        """Raise CheckpointError unless the checkpoint is of a model of this shape."""
        ours = json.loads(json.dumps(dataclasses.asdict(shape)))
        names = [name for name in ours if ours[name] != self.shape.get(name)]
        if names:
            name = names[0]
            raise CheckpointError(
                f"the checkpoint is of another model: its {name} is {self.shape.get(name)}, this "
                f"model's is {ours[name]}; resume with the settings it was made with"
            )


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the checkpoint in `folder` whole."""
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")


def read(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        values = json.loads((folder / NAME).read_text())
        return Manifest(**values)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no whole checkpoint: no {NAME}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {folder / NAME}: {error}") from error


def folder_of(run: Path, steps_done: int) -> Path:
    """Return where a run keeps the checkpoint after `steps_done` steps."""
    return run / "checkpoints" / f"step-{steps_done:08d}"


def find(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the latest whole one of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / NAME).exists():
        return path
    whole = sorted(p.parent for p in (path / "checkpoints").glob(f"step-*/{NAME}"))
    if not whole:
        raise CheckpointError(
            f"no checkpoint in {path}: expected a run folder with checkpoints/step-*/{NAME}, or "
            "such a step folder itself"
        )
    return whole[-1]
