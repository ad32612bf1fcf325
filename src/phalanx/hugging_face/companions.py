"""Files next to the weights of a model: tokenizer, special token ids, original model type.

tokenizer.json, vocab.json, ...        copied from folder to folder
config.json, generation_config.json    ids of the begin, end and padding tokens
tokenizer_config.json                  the same tokens as texts, and the tokenizer class
hugging_face.json                      model_type and token ids of the original config.json; several
                                       model types compute the same with other tensor names

A run that starts from a converted checkpoint keeps only the model type, because the tokenizer of
the run determines the end token. An exported run encodes prompts in the same way as the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import processors

from phalanx.checkpoint import manifest
from phalanx.checkpoint.untrusted import brief, read_json, write_json
from phalanx.data.tokenizer import MOST_BYTES, end_of_text_id, load_tokenizer
from phalanx.errors import CheckpointError, DataError
from phalanx.hugging_face.config import IDS
from phalanx.storage import replace_file

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
GENERATION: Final = "generation_config.json"
ORIGIN: Final = "hugging_face.json"

COMPANIONS: Final = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", GENERATION),
)
"""Files that are copied from folder to folder."""

Ids = dict[str, int | list[int] | None]


def _find(checkpoint: Path, name: str) -> Path | None:
    """Return the file `name` in a checkpoint folder or else in its run folder; None if absent."""
    run = manifest.run_of(checkpoint)
    paths = [folder / name for folder in (checkpoint, *([] if run is None else [run]))]
    return next((path for path in paths if path.is_file()), None)


def tokenizer_of(checkpoint: Path) -> Path | None:
    """Return the tokenizer.json of a checkpoint, or of its run; None if there is none."""
    return _find(checkpoint, TOKENIZER)


def keep_tokenizer(source: Path, run: Path) -> None:
    """Copy a tokenizer into a run folder, where users of its checkpoints look for it.

    The copy is atomic, because a resumed run may have only this tokenizer.
    """
    content, kept = source.read_bytes(), run / TOKENIZER
    if not kept.is_file() or kept.read_bytes() != content:
        replace_file(kept, content)


def copy_companions(source: Path, destination: Path) -> list[str]:
    """Copy the COMPANIONS in `source` to `destination`, and return their names.

    The tokenizer of a run's checkpoint is in the run folder.

    Raises:
        CheckpointError: a file has more than MOST_BYTES.
    """
    files = {name: source / name for name in COMPANIONS if (source / name).is_file()}
    if (tokenizer := tokenizer_of(source)) is not None:
        files[TOKENIZER] = tokenizer
    for name, file in files.items():
        if (num_bytes := file.stat().st_size) > MOST_BYTES:
            raise CheckpointError(
                f"{file} has {num_bytes:,} bytes; expected at most {MOST_BYTES:,} for a file that "
                "accompanies weights"
            )
        shutil.copyfile(file, destination / name)
    return sorted(files)


def keep_origin(config: Mapping[str, Any], folder: Path) -> None:
    """Write the model type and token ids of a config.json into a checkpoint folder."""
    ids = {name: config[name] for name in IDS if _is_id(config.get(name))}
    write_json(folder / ORIGIN, {"model_type": config["model_type"], **ids})


def keep_family(source: Path, run: Path) -> None:
    """Write the model type of the checkpoint `source`, if it has one, into the folder of a run."""
    if (family := family_in(source)) is not None:
        replace_file(run / ORIGIN, json.dumps({"model_type": family}).encode())


def family_in(checkpoint: Path) -> str | None:
    """Return the Hugging Face model type that a checkpoint, or its run, started from, or None."""
    path = _find(checkpoint, ORIGIN)
    family = None if path is None else read_json(path).get("model_type")
    return family if isinstance(family, str) else None


def is_of_run(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written by training and not by a conversion.

    A run puts its separator before each text, and ignores the begin tokens of its tokenizer.
    """
    return not (checkpoint / ORIGIN).is_file()


def ids_of(checkpoint: Path) -> Ids:
    """Return the begin, end and padding ids: of the origin if converted, else of the tokenizer.

    A run uses one separator token as begin, end and padding token. All ids are None if the run has
    no tokenizer, or the tokenizer has no known end-of-text token.
    """
    if not is_of_run(checkpoint):
        path = checkpoint / ORIGIN
        content = read_json(path)
        check_ids(content, path)
        return {name: content.get(name) for name in IDS}
    end, tokenizer = None, tokenizer_of(checkpoint)
    with suppress(DataError):
        end = None if tokenizer is None else end_of_text_id(load_tokenizer(tokenizer))
    return dict.fromkeys(IDS, end)


def check_ids(content: Mapping[str, Any], path: Path, names: Iterable[str] = IDS) -> None:
    """Check that the entries `names` of a file are token ids, lists of token ids or null.

    Raises:
        CheckpointError: an entry is something else; the message names it.
    """
    for name in names:
        if not _is_id(content.get(name)):
            raise CheckpointError(
                f"{path}: {name} is {brief(content[name])}; expected a whole number, a list of "
                "whole numbers or null"
            )


def write_missing(folder: Path, ids: Ids, max_seq_len: int) -> list[str]:
    """Write generation_config.json and tokenizer_config.json if missing; return the names written.

    A file that came with the weights is kept. Nothing is written if there is no end token.
    """
    written: list[str] = []
    if ids["eos_token_id"] is None:
        return written
    if not (folder / GENERATION).exists():
        write_json(folder / GENERATION, ids)
        written.append(GENERATION)
    if (folder / TOKENIZER).is_file() and not (folder / TOKENIZER_CONFIG).exists():
        tokens = _texts(folder / TOKENIZER, ids)
        # This class loads tokenizer.json unchanged for every model type.
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
        write_json(folder / TOKENIZER_CONFIG, content | tokens)
        written.append(TOKENIZER_CONFIG)
    return written


def prepend_separator(folder: Path, separator_id: int) -> None:
    """Make an exported tokenizer start each text with the separator, as in the run.

    Set split_special_tokens in tokenizer_config.json, so that transformers and vLLM encode text
    that spells a special token as plain text; tokenizer.json has no such setting.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER)
    token = tokenizer.id_to_token(separator_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", token, "$B"],
        special_tokens=[(token, separator_id)],
    )
    tokenizer.save(str(folder / TOKENIZER))
    config = read_json(folder / TOKENIZER_CONFIG) | {"split_special_tokens": True}
    write_json(folder / TOKENIZER_CONFIG, config)


def _texts(tokenizer: Path, ids: Ids) -> dict[str, Any]:
    """Return the texts of the special tokens; if an entry has several ids, of the first."""
    known = load_tokenizer(tokenizer)
    texts: dict[str, Any] = {}
    for name, value in ids.items():
        first = value[0] if isinstance(value, list) and value else value
        text = known.id_to_token(first) if isinstance(first, int) else None
        if text is not None:
            texts[name.removesuffix("_id")] = text
    return texts


def _is_id(value: Any) -> bool:
    several = cast("list[Any]", value) if isinstance(value, list) else [value]
    return value is None or all(type(each) is int and 0 <= each < 1 << 32 for each in several)
