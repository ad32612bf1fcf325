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
        num_ranks: ranks that wrote it.
        strategy: text of the strategy that wrote it.
        shape: the model's shape.
        stream: what fixes the order of the samples, by name.
    """

    steps_done: int
    num_steps: int
    consumed: int
    num_ranks: int
    strategy: str
    shape: dict[str, Any]
    stream: dict[str, Any]
    format: int = FORMAT

    def check(self, shape: ModelShape, stream: dict[str, Any]) -> None:
        """Refuse to go on with another model, or in another order of samples.

        Raises:
            CheckpointError: names the first thing that differs.
        """
        ours = {"shape": dataclasses.asdict(shape), "stream": stream}
        ours = json.loads(json.dumps(ours))  # as it was written: tuples become lists
        for what, words in (("shape", "model"), ("stream", "stream of samples")):
            theirs = getattr(self, what)
            for name, value in ours[what].items():
                if value != theirs.get(name):
                    raise CheckpointError(
                        f"the checkpoint is of another {words}: its {name} is "
                        f"{theirs.get(name)}, this run's is {value}; resume with the settings it "
                        "was made with"
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
