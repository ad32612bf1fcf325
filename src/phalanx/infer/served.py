"""Open a folder for generation: weights, tokenizer, chat templates, begin and end tokens.

The folder is a run, a checkpoint of any strategy, or a Hugging Face model: a run needs no export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from phalanx.checkpoint import manifest
from phalanx.checkpoint.untrusted import read_json
from phalanx.checkpoint.weights import Weights
from phalanx.config.fields import check_value, settings
from phalanx.data.tokenizer import count_ids, load_tokenizer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.companions import (
    GENERATION,
    chat_templates_of,
    ids_of,
    is_of_run,
    special_tokens_of,
    tokenizer_of,
)
from phalanx.hugging_face.convert import open_weights
from phalanx.hugging_face.folder import is_hugging_face
from phalanx.infer.lora_modules import AdapterSet, stacked
from phalanx.infer.options import RequestError, SamplingSettings


@dataclass(frozen=True)
class Served:
    """A model on disk, with its tokenizer and chat templates.

    Attributes:
        name: name of the run or model folder.
        weights: reader of full, unsharded weights, whatever strategy wrote them.
        tokenizer: tokenizer; text that spells a special token is encoded as plain text.
        begin_ids: ids to put before each text; None if the tokenizer itself adds them.
        end_ids: ids of the tokens that end a text.
        chat_templates: name -> Jinja source of a chat template; see `companions.DEFAULT`.
        template_names: variables for a template, such as `bos_token`.
        adapters: adapters in `weights` that requests name; None without any.
    """

    name: str
    weights: Weights
    tokenizer: Tokenizer
    begin_ids: tuple[int, ...] | None
    end_ids: tuple[int, ...]
    chat_templates: dict[str, str]
    template_names: dict[str, str]
    adapters: AdapterSet | None = None

    def encode(
        self,
        text: str,
        most: int | None = None,
        rendered: Tokenizer | None = None,
        *,
        has_begin: bool | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt, with `begin_ids`.

        Args:
            text: prompt.
            most: most tokens of a prompt; a text that surely has more is refused unencoded.
            rendered: tokenizer of a text that a chat template has rendered, with begin tokens.
            has_begin: whether to add begin tokens; if None, all texts but rendered ones get them.

        Raises:
            ConfigError: the tokenizer, or the model, has no token for a part of the text.
            RequestError: the text has more than `most` tokens.
        """
        tokenizer = rendered or self.tokenizer
        begin_ids = self.begin_ids if (rendered is None if has_begin is None else has_begin) else ()
        try:
            if most is not None and (longest := self._longest_token_bytes) is not None:
                normalizer: Any = self.tokenizer.normalizer
                plain = text if normalizer is None else normalizer.normalize_str(text)
                if (least := len(plain.encode()) // longest) > most:
                    raise RequestError(
                        f"the prompt has at least {least:,} tokens; model and cache have {most:,} "
                        "positions",
                        code="context_length_exceeded",
                    )
            # Unlike `encode`, which is as exact, this releases the interpreter lock.
            encoded = tokenizer.encode_batch_fast([text], add_special_tokens=begin_ids is None)
        except RequestError:
            raise
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(f"the tokenizer cannot encode the prompt: {error}") from error
        tokens = [*(begin_ids or ()), *encoded[0].ids]
        if (most_id := max(tokens, default=0)) >= self.weights.shape.vocab_size:
            raise ConfigError(
                f"the tokenizer returns token {most_id:,}, but the model has tokens from 0 to "
                f"{self.weights.shape.vocab_size - 1:,}; put the model's tokenizer.json into the "
                "folder of its weights"
            )
        return tokens

    @cached_property
    def num_ids(self) -> int:
        """Number of ids that both the model and the tokenizer have."""
        return min(self.weights.shape.vocab_size, count_ids(self.tokenizer))

    @cached_property
    def _longest_token_bytes(self) -> int | None:
        """Most bytes that a token spells; None if text may be lost, or one token spell any text."""
        tokens = self.tokenizer.get_vocab(with_added_tokens=True).keys()
        # A long prompt is refused by its bytes, before the tokenizer spends seconds on it: a token
        # spells a bounded number of bytes, so n bytes of text are at least n / that number of
        # tokens.
        if "<0x00>" in tokens:  # SentencePiece's byte fallback
            return max(len(token.encode()) for token in tokens)
        letters = set(pre_tokenizers.ByteLevel.alphabet())  # each stands for a byte
        if not tokens >= letters:
            return None
        return max(len(t) if letters.issuperset(t) else len(t.encode()) for t in tokens)


def open_served(path: Path, lora_modules: Sequence[str] = ()) -> Served:
    """Open a run, a checkpoint of a run, a Hugging Face folder, or adapters of PEFT.

    `lora_modules` are adapters beside it, see `adapters.stacked`.

    Raises:
        CheckpointError: `path` is none of these, is damaged, or has no tokenizer.
        ConfigError: its config.json describes a model that is not supported.
    """
    weights, adapters = open_weights(path), None
    if lora_modules:
        weights, adapters = stacked(weights, lora_modules)
    file = tokenizer_of(weights.folder)
    if file is None:
        raise CheckpointError(f"{weights.folder} has no tokenizer.json; put the model's file there")
    tokenizer, ids = load_tokenizer(file), ids_of(weights.folder)
    names, added = special_tokens_of(weights.folder)
    tokenizer.add_tokens(added)
    # A run starts each text with its one separator token; for a published model the tokenizer adds
    # the begin tokens.
    is_run = not is_hugging_face(weights.folder) and is_of_run(weights.folder)
    run = manifest.run_of(weights.folder)
    return Served(
        name=(run or path).resolve().name,
        weights=weights,
        tokenizer=tokenizer,
        begin_ids=_several(ids["bos_token_id"]) if is_run else None,
        end_ids=_several(ids["eos_token_id"]),
        chat_templates=chat_templates_of(weights.folder),
        template_names=names,
        adapters=adapters,
    )


def _several(ids: int | list[int] | None) -> tuple[int, ...]:
    """Return an id entry of config.json, which is an id, a list or None, as a tuple."""
    if isinstance(ids, list):
        return tuple(ids)
    return () if ids is None else (ids,)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the options of `SamplingSettings` that generation_config.json of a folder sets.

    As in vLLM, `do_sample` counts for nothing.

    Raises:
        CheckpointError: the file is damaged, or an option has an illegal value.
    """
    file = folder / GENERATION
    content = read_json(file, may_be_link=True) if file.is_file() else {}
    names = {
        each: each for each in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    names["max_new_tokens"] = "max_tokens"
    chosen = {key: content[name] for name, key in names.items() if content.get(name) is not None}
    for setting in settings(SamplingSettings):
        try:
            if setting.key in chosen:
                check_value(setting, chosen[setting.key])
        except ConfigError as error:
            raise CheckpointError(f"{file}: {error}") from error
    return chosen


def fill_from(weights: Weights) -> Any:
    """Return a `parallel.plan.FirstWeights` function that fills weight shards from `weights`."""

    @torch.no_grad()
    def fill(shard: Tensor, name: str, full: tuple[int, ...], offset: tuple[int, ...]) -> None:
        del full
        held = zip(offset, shard.shape, strict=True)
        shard.copy_(weights.read(name)[tuple(slice(at, at + size) for at, size in held)])

    return fill
