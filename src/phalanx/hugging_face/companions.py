"""Files next to the weights of a model: tokenizer, special token ids, original model type.

tokenizer.json, vocab.json, ...        copied from folder to folder
config.json, generation_config.json    ids of the begin, end and padding tokens
tokenizer_config.json                  the same tokens as texts, and the tokenizer class
hugging_face.json                      model_type and token ids of the original folder; several
                                       model types compute the same with other tensor names

A run that starts from a converted checkpoint keeps only the model type, because the tokenizer of
the run determines the end token. An exported run encodes prompts in the same way as the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import AddedToken, processors

from phalanx.checkpoint import manifest
from phalanx.checkpoint.untrusted import brief, decode, read_json, write_json
from phalanx.data.tokenizer import MOST_BYTES, end_of_text_id, load_tokenizer
from phalanx.errors import CheckpointError, DataError
from phalanx.hugging_face.config import CONFIG, IDS
from phalanx.object_store import fetch
from phalanx.storage import read_text, replace_file

TOKENIZER: Final = "tokenizer.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
GENERATION: Final = "generation_config.json"
ORIGIN: Final = "hugging_face.json"

COMPANIONS: Final = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *("tokenizer.model", "vocab.json", "merges.txt", CHAT_TEMPLATE, GENERATION),
)
"""Files that are copied from folder to folder."""

DEFAULT: Final = "default"
"""Name of the chat template that is used if a model has several."""

Ids = dict[str, int | list[int] | None]


def _find(checkpoint: Path, name: str) -> Path | None:
    """Return the file `name` in a checkpoint folder or else in its run folder; None if absent."""
    run = manifest.run_of(checkpoint)
    paths = [folder / name for folder in (checkpoint, *([] if run is None else [run]))]
    return next((path for path in paths if fetch(path).is_file()), None)


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

    The tokenizer of a run's checkpoint, and what `keep_chat` wrote, are in the run folder.

    Raises:
        CheckpointError: a file has more than MOST_BYTES.
    """
    files = {name: file for name in COMPANIONS if (file := _find(source, name)) is not None}
    for name, file in files.items():
        if (num_bytes := file.stat().st_size) > MOST_BYTES:
            raise CheckpointError(
                f"{file} has {num_bytes:,} bytes; expected at most {MOST_BYTES:,} for a file that "
                "accompanies weights"
            )
        shutil.copyfile(file, destination / name)
    return sorted(files)


def keep_origin(family: str, ids: Ids, folder: Path) -> None:
    """Write the model type and token ids of a Hugging Face folder into a checkpoint folder."""
    write_json(folder / ORIGIN, {"model_type": family, **ids})


def keep_family(source: Path, run: Path) -> None:
    """Write the model type of the checkpoint `source`, if it has one, into the folder of a run."""
    if (family := family_in(source)) is not None:
        replace_file(run / ORIGIN, json.dumps({"model_type": family}).encode())


def family_in(checkpoint: Path) -> str | None:
    """Return the Hugging Face model type of a folder, or of what a run started from, or None."""
    is_foreign = (checkpoint / CONFIG).is_file()
    path = checkpoint / CONFIG if is_foreign else _find(checkpoint, ORIGIN)
    family = None if path is None else read_json(path, may_be_link=is_foreign).get("model_type")
    return family if isinstance(family, str) else None


def is_of_run(checkpoint: Path) -> bool:
    """Return whether a checkpoint is of a run on text, not of a conversion or a run on chats.

    A run on text puts its separator before each text, and ignores the begin tokens of its
    tokenizer. A run on chats has the ids of its tokens, as a conversion has.
    """
    path = _find(checkpoint, ORIGIN)
    return path is None or not (path.parent == checkpoint or read_json(path).keys() & {*IDS})


def ids_of(folder: Path) -> Ids:
    """Return the begin, end and padding ids of a Hugging Face folder or a checkpoint.

    As in transformers, generation_config.json, which may name more end tokens, overrides
    config.json. A converted checkpoint has both. A run uses one separator token as begin, end and
    padding token; all ids are None if it has no tokenizer with a known end-of-text token.

    Raises:
        CheckpointError: a file is damaged, or has an end token that is not an id.
    """
    is_foreign = (folder / CONFIG).is_file()
    if not is_foreign and is_of_run(folder):
        end, tokenizer = None, tokenizer_of(folder)
        with suppress(DataError):
            end = None if tokenizer is None else end_of_text_id(load_tokenizer(tokenizer))
        return dict.fromkeys(IDS, end)
    ids: Ids = dict.fromkeys(IDS)
    for name in (CONFIG if is_foreign else ORIGIN, GENERATION):
        content = _read_if_there(_find(folder, name))
        # Only the end tokens are always used: some published files have padding token -1.
        for key in IDS if name == ORIGIN else ["eos_token_id"]:
            if not _is_id(content.get(key)):
                raise CheckpointError(
                    f"{folder / name}: {key} is {brief(content[key])}; expected a whole number, a "
                    "list of whole numbers or null"
                )
        ids |= {key: content[key] for key in IDS if key in content and _is_id(content[key])}
    return ids


def chat_templates_of(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder, or of its run: name -> Jinja source."""
    file, alone = _find(folder, TOKENIZER_CONFIG), _find(folder, CHAT_TEMPLATE)
    templates: Any = None if file is None else _read_if_there(file).get("chat_template")
    if alone is not None:
        templates = read_text(alone)
    if isinstance(templates, list):
        try:
            by_name = {each["name"]: each["template"] for each in cast("list[Any]", templates)}
            return decode(dict[str, str], by_name)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: chat_template is {brief(templates)}; expected a string, or a list of "
                "objects with name and template"
            ) from error
    return {DEFAULT: templates} if isinstance(templates, str) else {}


def keep_chat(
    source: Path | None, run: Path, template: str, names: Mapping[str, str], end_ids: Sequence[int]
) -> None:
    """Write what serves chats beside the tokenizer of a run on chats: see `is_of_run`.

    Args:
        source: folder of the weights that the run began with, or None.
        run: folder of the run.
        template: Jinja source of the chat template.
        names: its variables, such as `bos_token`.
        end_ids: ids of the tokens that end an answer.
    """
    ids: Ids = dict.fromkeys(IDS)
    family, generation = None, dict[str, Any]()
    if source is not None:
        ids |= ids_of(source)
        family, generation = family_in(source), _read_if_there(_find(source, GENERATION))
    ids["eos_token_id"] = list(end_ids) or None
    contents: dict[str, dict[str, Any]] = {
        TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: token for name, token in names.items() if name.endswith("_token")},
            "extra_special_tokens": {n: t for n, t in names.items() if not n.endswith("_token")},
        },
        GENERATION: generation | ids,
        ORIGIN: {"model_type": family, **ids},
    }
    for name, content in contents.items():
        replace_file(run / name, json.dumps(content, indent=1).encode())
    replace_file(run / CHAT_TEMPLATE, template.encode())


def special_tokens_of(folder: Path) -> tuple[dict[str, str], list[AddedToken]]:
    """Return the special tokens that the files beside tokenizer.json name, and all that they add.

    The names, such as `bos_token`, are variables of a chat template. As in transformers,
    special_tokens_map.json and added_tokens.json count only if tokenizer_config.json has no
    added_tokens_decoder.
    """
    config = _read_if_there(_find(folder, TOKENIZER_CONFIG))
    listed: Any = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        by_id = cast("dict[str, Any]", listed)
        added = [by_id[id] for id in sorted(by_id, key=lambda id: (len(id), id))]
    else:
        config |= _read_if_there(_find(folder, SPECIAL_TOKENS))
        ids = _read_if_there(_find(folder, ADDED_TOKENS))
        added = sorted(ids, key=lambda text: (len(str(ids[text])), str(ids[text])))
    extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    named |= cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}
    special = [*named.values(), *(cast("list[Any]", extra) if isinstance(extra, list) else ())]
    # A token may be listed twice, as added and under a name such as `bos_token`: a named one is
    # special in both entries, the others where their entry says so.
    known = set(map(_text_of, special))
    tokens: list[AddedToken] = []
    for token in [*added, *special]:
        if (text := _text_of(token)) is not None:
            flags = cast("dict[str, Any]", token) if isinstance(token, dict) else {}
            is_special = text in known or flags.get("special") is True
            kinds = ("single_word", "lstrip", "rstrip", "normalized")
            options = {kind: flags[kind] for kind in kinds if isinstance(flags.get(kind), bool)}
            tokens.append(
                AddedToken(text, special=is_special, **{"normalized": not is_special} | options)
            )
    return {name: text for name, token in named.items() if (text := _text_of(token))}, tokens


def _text_of(token: Any) -> str | None:
    """Return the text of a token in a JSON file, which is a string or an object with `content`."""
    text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_if_there(path: Path | None) -> dict[str, Any]:
    return {} if path is None else read_json(path, may_be_link=True)


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
        # This class loads tokenizer.json unchanged for every model type.
        content: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_seq_len,
        }
        tokenizer = load_tokenizer(folder / TOKENIZER)
        for name, value in ids.items():  # the texts of the tokens; of several ids, of the first
            first = value[0] if isinstance(value, list) and value else value
            text = tokenizer.id_to_token(first) if isinstance(first, int) else None
            if text is not None:
                content[name.removesuffix("_id")] = text
        write_json(folder / TOKENIZER_CONFIG, content)
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


def _is_id(value: Any) -> bool:
    several = cast("list[Any]", value) if isinstance(value, list) else [value]
    return value is None or all(type(each) is int and 0 <= each < 1 << 32 for each in several)
