"""Open a folder for generation: weights, tokenizer, chat templates, begin and end tokens.

The folder is a run, a checkpoint of any strategy, or a Hugging Face model: a run needs no export.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.checkpoint import manifest
from phalanx.checkpoint.untrusted import brief, decode, read_json
from phalanx.checkpoint.weights import Weights, open_checkpoint
from phalanx.data.tokenizer import load_tokenizer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.companions import (
    GENERATION,
    TOKENIZER_CONFIG,
    check_ids,
    ids_of,
    is_of_run,
    tokenizer_of,
)
from phalanx.hugging_face.config import IDS
from phalanx.hugging_face.convert import kind_of, open_hugging_face
from phalanx.hugging_face.folder import CONFIG, read_config
from phalanx.storage import read_text

TEMPLATE = "chat_template.jinja"

DEFAULT = "default"
"""Name of the chat template that is used if a model has several."""


@dataclass(frozen=True)
class Served:
    """A model on disk, with its tokenizer and chat templates.

    Attributes:
        name: name of the run or model folder.
        weights: reader of full, unsharded weights, whatever strategy wrote them.
        tokenizer: tokenizer; text that spells a special token is encoded as plain text.
        begin_ids: ids to put before each text; None if the tokenizer itself adds them.
        end_ids: ids of the tokens that end a text.
        chat_templates: name -> Jinja source of a chat template; see `DEFAULT`.
        template_names: variables for a template, such as `bos_token`.
    """

    name: str
    weights: Weights
    tokenizer: Tokenizer
    begin_ids: tuple[int, ...] | None
    end_ids: tuple[int, ...]
    chat_templates: dict[str, str]
    template_names: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with `begin_ids`.

        Raises:
            ConfigError: the tokenizer, or the model, has no token for a part of the text.
        """
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=self.begin_ids is None).ids
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(f"the tokenizer cannot encode the prompt: {error}") from error
        tokens = [*(self.begin_ids or ()), *ids]
        if (most := max(tokens, default=0)) >= self.weights.shape.vocab_size:
            raise ConfigError(
                f"the tokenizer returns token {most:,}, but the model has tokens from 0 to "
                f"{self.weights.shape.vocab_size - 1:,}; put the model's tokenizer.json into the "
                "folder of its weights"
            )
        return tokens


def open_served(path: Path) -> Served:
    """Open a run, a checkpoint of a run, or a Hugging Face folder.

    Raises:
        CheckpointError: `path` is none of these, is damaged, or has no tokenizer.
        ConfigError: its config.json describes a model that is not supported.
    """
    is_foreign = kind_of(path) == "hugging face"
    weights = open_hugging_face(path) if is_foreign else open_checkpoint(path)
    file = tokenizer_of(weights.folder)
    if file is None:
        raise CheckpointError(f"{weights.folder} has no tokenizer.json; put the model's file there")
    tokenizer = load_tokenizer(file)
    if is_foreign:
        given, of = read_config(path), path / CONFIG
        if (path / GENERATION).is_file():
            more = read_json(path / GENERATION, may_be_link=True)
            given, of = given | more, path / GENERATION if "eos_token_id" in more else of
        check_ids(given, of, ["eos_token_id"])  # the other ids are not used
        ids: dict[str, Any] = {name: given.get(name) for name in IDS}
    else:
        ids = dict(ids_of(weights.folder))
    # A run starts each text with its one separator token; for a published model the tokenizer adds
    # the begin tokens.
    is_run = not is_foreign and is_of_run(weights.folder)
    run = manifest.run_of(weights.folder)
    templates, names = _templates(weights.folder, may_be_link=is_foreign)
    return Served(
        name=(run or path).resolve().name,
        weights=weights,
        tokenizer=tokenizer,
        begin_ids=_several(ids["bos_token_id"]) if is_run else None,
        end_ids=_several(ids["eos_token_id"]),
        chat_templates=templates,
        template_names=names,
    )


def _several(ids: Any) -> tuple[int, ...]:
    """Return an id entry of config.json, which is an id, a list or None, as a tuple."""
    if isinstance(ids, list):
        return tuple(cast("list[int]", ids))
    return () if ids is None else (ids,)


def _templates(folder: Path, *, may_be_link: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates of a folder, and the special tokens that they may use."""
    file = folder / TOKENIZER_CONFIG
    config = read_json(file, may_be_link=may_be_link) if file.is_file() else {}
    names: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token: Any = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            names[name] = text
    given: Any = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        given = read_text(folder / TEMPLATE)
    if isinstance(given, list):
        try:
            several = {each["name"]: each["template"] for each in cast("list[Any]", given)}
            return decode(dict[str, str], several), names
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: chat_template is {brief(given)}; expected a string, or a list of objects "
                "with name and template"
            ) from error
    return {DEFAULT: given} if isinstance(given, str) else {}, names


def fill_from(weights: Weights) -> Any:
    """Return a `parallel.plan.FirstWeights` function that fills weight shards from `weights`."""

    @torch.no_grad()
    def fill(shard: Tensor, name: str, full: tuple[int, ...], offset: tuple[int, ...]) -> None:
        del full
        held = zip(offset, shard.shape, strict=True)
        shard.copy_(weights.read(name)[tuple(slice(at, at + size) for at, size in held)])

    return fill
