"""The manifest of a checkpoint: written last, so that a folder with a manifest is whole.

<run>/checkpoints/step-00000200/         a checkpoint after 200 steps
    manifest.json                        what it is a checkpoint of
    *.distcp, .metadata                  the tensors (torch.distributed.checkpoint)
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.models.shape import ModelShape

NAME = "manifest.json"

FORMAT = 1
"""What a reader must know; another number is refused."""

STEP_FOLDER = re.compile(r"step-(\d+)")
"""Name of a checkpoint's folder; one that is still being written has another."""


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
        scaler: state of the scaler of the loss, or None if the precision needs none.
        format: of the checkpoint.
    """

    steps_done: int
    num_steps: int
    consumed: int
    num_ranks: int
    strategy: str
    shape: dict[str, Any]
    stream: dict[str, Any]
    scaler: dict[str, Any] | None = None
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
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / NAME} is of format {values['format']!r}; this version reads format "
                f"{FORMAT}"
            )
        about = Manifest(**values)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no whole checkpoint: no {NAME}") from error
    except KeyError as error:
        raise CheckpointError(f"cannot read {folder / NAME}: it has no {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {folder / NAME}: {error}") from error
    for name in ("steps_done", "num_steps", "consumed", "num_ranks"):
        value = getattr(about, name)
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"cannot read {folder / NAME}: {name} is {value!r}, expected a whole number of at "
                "least 0"
            )
    for name in ("shape", "stream"):
        if not isinstance(getattr(about, name), dict):
            raise CheckpointError(f"cannot read {folder / NAME}: {name} is not an object")
    return about


def folder_of(run: Path, steps_done: int) -> Path:
    """Return where a run keeps the checkpoint after `steps_done` steps."""
    return run / "checkpoints" / f"step-{steps_done:08d}"


def run_of(folder: Path) -> Path | None:
    """Return the run folder that a checkpoint stands in, or None if it stands elsewhere."""
    folder = folder.resolve()  # "." has no parents
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def whole(run: Path) -> dict[int, Path]:
    """Return the whole checkpoints of a run folder by the steps done, in rising order."""
    folders = [path.parent for path in (run / "checkpoints").glob(f"*/{NAME}")]
    matches = [(STEP_FOLDER.fullmatch(folder.name), folder) for folder in folders]
    return dict(sorted((int(match[1]), folder) for match, folder in matches if match))


def find(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the latest whole one of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / NAME).exists():
        return path
    found = whole(path)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}: expected a run folder with checkpoints/step-*/{NAME}, or "
            "such a step folder itself"
        )
    return found[max(found)]
