"""The files that go with the weights of a model: the tokenizer, the ids of tokens, the origin.

tokenizer.json, vocab.json, ...        copied from folder to folder, and not read
config.json, generation_config.json    ids of the tokens that begin and end a text, and that pad
tokenizer_config.json                  the same tokens as texts, and how tokenizer.json is loaded
hugging_face.json                      model_type: several compute the same, under other names; and
                                       the ids, as the config.json of the origin had them

A run that begins with a converted checkpoint keeps the model type alone: the tokenizer that it is
trained with says which token ends a text. The export of a run encodes a prompt as the run does.
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
from phalanx.checkpoint.foreign import brief, read_json, write_json
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
"""The files that are copied from folder to folder."""

Ids = dict[str, int | list[int] | None]


def _find(checkpoint: Path, name: str) -> Path | None:
    """Return a file of a checkpoint: in its own folder, or in the folder of its run."""
    run = manifest.run_of(checkpoint)
    paths = [folder / name for folder in (checkpoint, *([] if run is None else [run]))]
    return next((path for path in paths if path.is_file()), None)


def tokenizer_of(checkpoint: Path) -> Path | None:
    """Return the tokenizer.json of a checkpoint, or of its run."""
    return _find(checkpoint, TOKENIZER)


def keep_tokenizer(source: Path, run: Path) -> None:
    """Put a tokenizer into a run's folder, where whoever uses its checkpoints looks for it.

    One that is there stays whole until the new one is: a resumed run has no other.
    """
    content, kept = source.read_bytes(), run / TOKENIZER
    if not kept.is_file() or kept.read_bytes() != content:
        replace_file(kept, content)


def copy_companions(source: Path, destination: Path) -> list[str]:
    """Copy the files beside the weights in `source`, and return their names.

    A run's checkpoint has its run's tokenizer.

    Raises:
        CheckpointError: one is too large to be such a file.
    """
    files = {name: source / name for name in COMPANIONS if (source / name).is_file()}
    if (tokenizer := tokenizer_of(source)) is not None:
        files[TOKENIZER] = tokenizer
    for name, file in files.items():
        if (num_bytes := file.stat().st_size) > MOST_BYTES:
            raise CheckpointError(
                f"{file} has {num_bytes:,} bytes; expected a file beside weights of at most "
                f"{MOST_BYTES:,}"
            )
        shutil.copyfile(file, destination / name)
    return sorted(files)


def keep_origin(config: Mapping[str, Any], folder: Path) -> None:
    """Write the model type and ids of a config.json into the folder of a checkpoint."""
    ids = {name: config[name] for name in IDS if _is_id(config.get(name))}
    write_json(folder / ORIGIN, {"model_type": config["model_type"], **ids})


def keep_family(source: Path, run: Path) -> None:
    """Put the model type of a checkpoint, if it has one, into the folder of a run."""
    if (family := family_in(source)) is not None:
        replace_file(run / ORIGIN, json.dumps({"model_type": family}).encode())


def family_in(checkpoint: Path) -> str | None:
    """Return the model type that a checkpoint, or its run, was made from; None if unknown."""
    path = _find(checkpoint, ORIGIN)
    family = None if path is None else read_json(path).get("model_type")
    return family if isinstance(family, str) else None


def is_of_run(checkpoint: Path) -> bool:
    """Return whether training wrote a checkpoint, and no conversion.

    A run puts its separator before each text, whatever its tokenizer puts there.
    """
    return not (checkpoint / ORIGIN).is_file()


def ids_of(checkpoint: Path) -> Ids:
    """Return the ids that begin, end and pad texts: as converted, else of the tokenizer.

    A run puts one token between documents, which begins, ends and pads texts. All are None without
    a tokenizer, or if it has no token of a known name for that.
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
    """Refuse a value of a file that is no id of a token.

    Raises:
        CheckpointError: names the entry.
    """
    for name in names:
        if not _is_id(content.get(name)):
            raise CheckpointError(
                f"{path}: {name} is {brief(content[name])}; expected a whole number, a list of "
                "whole numbers or null"
            )


def write_missing(folder: Path, ids: Ids, max_seq_len: int) -> list[str]:
    """Write the configurations of generation and tokenizer that are missing; return their names.

    A file that came with the weights stays as it is. None is written where no token is known to end
    a text.
    """
    written: list[str] = []
    if ids["eos_token_id"] is None:
        return written
    if not (folder / GENERATION).exists():
        write_json(folder / GENERATION, ids, indent=2)
        written.append(GENERATION)
    if (folder / TOKENIZER).is_file() and not (folder / TOKENIZER_CONFIG).exists():
        tokens = _texts(folder / TOKENIZER, ids)
        # The class that takes tokenizer.json as it is, whatever the model type.
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
        write_json(folder / TOKENIZER_CONFIG, content | tokens, indent=2)
        written.append(TOKENIZER_CONFIG)
    return written


def encode_as_run(folder: Path, separator_id: int) -> None:
    """Let an exported tokenizer begin each text with the separator, as the run of the export does.

    In transformers and vLLM, text that spells a special token then stays text too: tokenizer.json
    has no place for that, tokenizer_config.json has.
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
    write_json(folder / TOKENIZER_CONFIG, config, indent=2)


def _texts(tokenizer: Path, ids: Ids) -> dict[str, Any]:
    """Return the tokens of the ids as texts; of several that end a text, the first."""
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
