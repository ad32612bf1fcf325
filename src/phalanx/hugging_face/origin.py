"""What a checkpoint keeps of the Hugging Face folder that it was made from.

hugging_face.json    model_type: several compute the same, under other names of weights
                     bos_token_id, eos_token_id, pad_token_id: as its config.json had them

A run that begins with such a checkpoint keeps the type alone: which token ends a text is a matter
of the tokenizer that it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from phalanx.checkpoint import manifest
from phalanx.checkpoint.foreign import read_json, write_json
from phalanx.errors import CheckpointError
from phalanx.hugging_face.config import IDS
from phalanx.storage import replace_file

NAME: Final = "hugging_face.json"

Ids = dict[str, int | list[int] | None]


def keep(config: Mapping[str, Any], folder: Path) -> None:
    """Write what is kept of a config.json into the folder of a checkpoint."""
    ids = {name: config[name] for name in IDS if _is_id(config.get(name))}
    write_json(folder / NAME, {"model_type": config["model_type"], **ids})


def keep_family(source: Path, run: Path) -> None:
    """Put the model type of a checkpoint, if it has one, into the folder of a run."""
    family = family_in(source)
    if family is not None:
        replace_file(run / NAME, json.dumps({"model_type": family}).encode())


def family_in(checkpoint: Path) -> str | None:
    """Return the model type that a checkpoint, or its run, was made from; None if unknown."""
    run = manifest.run_of(checkpoint)
    for folder in (checkpoint, *([] if run is None else [run])):
        if (folder / NAME).is_file():
            family = read_json(folder / NAME).get("model_type")
            return family if isinstance(family, str) else None
    return None


def ids_in(checkpoint: Path) -> Ids | None:
    """Return the ids that a checkpoint itself was made with; None if it was not converted."""
    if not (checkpoint / NAME).is_file():
        return None
    content = read_json(checkpoint / NAME)
    for name in IDS:
        if not _is_id(content.get(name)):
            raise CheckpointError(
                f"{checkpoint / NAME}: {name} is {content[name]!r}; expected a whole number, a "
                "list of such or null"
            )
    return {name: content.get(name) for name in IDS}


def _is_id(value: Any) -> bool:
    several = cast("list[Any]", value) if isinstance(value, list) else [value]
    return value is None or all(type(each) is int and each >= 0 for each in several)
