"""The files that go with the weights of a model, of which the tokenizer is the first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from phalanx.checkpoint import manifest
from phalanx.storage import replace_file

TOKENIZER: Final = "tokenizer.json"

COMPANIONS: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is copied from folder to folder; nothing of it is read."""


def tokenizer_of(folder: Path) -> Path | None:
    """Return the tokenizer.json of a checkpoint: in its own folder, or in that of its run."""
    run = manifest.run_of(folder)
    for each in (folder, *([] if run is None else [run])):
        if (each / TOKENIZER).is_file():
            return each / TOKENIZER
    return None


def keep_tokenizer(source: Path, run: Path) -> None:
    """Put a tokenizer into a run's folder, where whoever uses its checkpoints looks for it.

    One that is there stays whole until the new one is: a resumed run has no other.
    """
    content, kept = source.read_bytes(), run / TOKENIZER
    if not kept.is_file() or kept.read_bytes() != content:
        replace_file(kept, content)


def copy_companions(source: Path, destination: Path) -> list[str]:
    """Copy what goes with the weights in `source`, and return the names of the files.

    A run's checkpoint shares its run's tokenizer.
    """
    files = {name: source / name for name in COMPANIONS if (source / name).is_file()}
    if (tokenizer := tokenizer_of(source)) is not None:
        files[TOKENIZER] = tokenizer
    for name, file in files.items():
        shutil.copyfile(file, destination / name)
    return sorted(files)
