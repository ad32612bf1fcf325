"""Fields of vLLM's and OpenAI's requests that `phalanx serve` does not support.

`protocol.py` declares the others. A field that is neither here nor there is unknown: it is ignored
with a line in the log, or refused with `--strict`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple

ANY: Final = "any"
"""In the column of ignored values: all values."""


class Unsupported(NamedTuple):
    """An unsupported field, whose values without effect are ignored, and all others refused.

    Attributes:
        name: name.
        ignored: values without effect in JSON, separated by spaces; or ANY.
        about: why, or what the values are for.
        where: whose field it is: "" for completions and chats.
    """

    name: str
    ignored: str
    about: str = ""
    where: Literal["", "completions", "chats"] = ""


UNSUPPORTED: Final = (
    Unsupported("best_of", "1", "", "chats"),
    Unsupported("length_penalty", "1", "no beam search"),
    Unsupported("use_beam_search", "false", "no beam search"),
    Unsupported("early_stopping", "false", "no beam search"),
    Unsupported("spaces_between_special_tokens", "true false", "of slow tokenizers"),
    Unsupported("chat_template", "", "--chat-template is the server's", "chats"),
    Unsupported("include_reasoning", ANY, "reasoning is a part of the content", "chats"),
    Unsupported("modalities", '["text"]', "", "chats"),
    Unsupported("audio", "", "", "chats"),
    Unsupported("mm_processor_kwargs", "{}", "only text"),
    Unsupported("functions", "[]", "OpenAI replaced it by tools", "chats"),
    Unsupported("function_call", '"none" "auto"', "OpenAI replaced it", "chats"),
    Unsupported("web_search_options", "", "no search", "chats"),
    Unsupported("suffix", '""', "no insertion"),
    Unsupported("prompt_embeds", "", "only tokens"),
    Unsupported("logits_processors", "", "no code of a client runs"),
    Unsupported("priority", "0", "requests run as they arrive"),
    Unsupported("cache_salt", "", "requests share prefixes"),
    Unsupported("kv_transfer_params", "", "one server"),
    Unsupported("vllm_xargs", "{}"),
    Unsupported("user", ANY),
    Unsupported("safety_identifier", ANY),
    Unsupported("prompt_cache_key", ANY, "prefixes are found by their tokens"),
    Unsupported("prediction", ANY, "no answer depends on it"),
    Unsupported("metadata", ANY, "nothing is stored"),
    Unsupported("store", ANY, "nothing is stored"),
    Unsupported("service_tier", ANY),
    Unsupported("verbosity", ANY, "", "chats"),
)


def neutral_of(where: str) -> dict[str, tuple[Any, ...] | None]:
    """Return the unsupported fields of a body -> values that are ignored; None for all."""
    return {
        row.name: None if row.ignored == ANY else tuple(map(json.loads, row.ignored.split()))
        for row in UNSUPPORTED
        if row.where in ("", where)
    }
