"""The table of vLLM's and OpenAI's request fields: what `phalanx serve` does with their values.

`phalanx serve --fields` prints it, `protocol.py` refuses and ignores by it, and a test posts every
row. A field that is in no row, and that no class of `protocol.py` declares, is unknown: it is
ignored with a line in the log, or refused with `--strict`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Final, Literal, NamedTuple

ANY: Final = "any"
"""In the column of values: all values."""


class FieldRow(NamedTuple):
    """What the server does with some values of a field.

    Attributes:
        field: name.
        values: values in JSON, separated by spaces; or ANY.
        outcome: a refused value is answered by 400; an ignored one changes nothing.
        about: what a taken field does, or why not.
        where: whose field it is: "" for completions and chats.
    """

    field: str
    values: str
    outcome: Literal["taken", "ignored", "refused"]
    about: str
    where: Literal["", "completions", "chats"] = ""


FIELDS: Final = (
    FieldRow("prompt", '"a" ["a","b"] [5,6] [[5],[6,7]]', "taken", "", "completions"),
    FieldRow("max_tokens", "1", "taken", "16 in completions, all positions left in chats"),
    FieldRow("max_tokens", "0", "refused", "0 needs echo or prompt_logprobs"),
    FieldRow("max_completion_tokens", "2", "taken", "as max_tokens", "chats"),
    FieldRow(
        "min_tokens",
        "0 2",
        "taken",
        "before it no end token or text ends the answer; a whole grammar may",
    ),
    FieldRow("min_tokens", "9", "refused", "at most max_tokens"),
    FieldRow("temperature", "0 0.7", "taken", "0 is greedy"),
    FieldRow("temperature", "-1", "refused", ""),
    FieldRow("top_p", "0 0.9 1", "taken", ""),
    FieldRow("top_p", "1.5", "refused", ""),
    FieldRow("top_k", "-1 0 5", "taken", "-1 and 0: among all"),
    FieldRow("top_k", "-2", "refused", ""),
    FieldRow("min_p", "0 0.1", "taken", "after top_k and top_p, as in transformers"),
    FieldRow("seed", "-1 3", "taken", "choice i draws with seed + i"),
    FieldRow("n", "1 2", "taken", ""),
    FieldRow("n", "0 65", "refused", "1 to 64 choices of all prompts"),
    FieldRow("best_of", "1 3", "taken", "the n of the largest mean log-probability", "completions"),
    FieldRow("best_of", "1", "ignored", "", "chats"),
    FieldRow("best_of", "2", "refused", "", "chats"),
    FieldRow("presence_penalty", "0 -2 2", "taken", "of generated tokens"),
    FieldRow("presence_penalty", "3", "refused", "-2 to 2"),
    FieldRow("frequency_penalty", "0 -2 2", "taken", "of generated tokens, by their number"),
    FieldRow("frequency_penalty", "-3", "refused", "-2 to 2"),
    FieldRow("repetition_penalty", "1 1.3", "taken", "of tokens of the prompt and generated ones"),
    FieldRow("repetition_penalty", "0", "refused", "above 0"),
    FieldRow("length_penalty", "1", "ignored", "of beams"),
    FieldRow("length_penalty", "2", "refused", "no beam search"),
    FieldRow("use_beam_search", "false", "ignored", ""),
    FieldRow("use_beam_search", "true", "refused", "no beam search"),
    FieldRow("early_stopping", "false", "ignored", ""),
    FieldRow("logit_bias", '{} {"5":-100} {"5":200}', "taken", "added, within -100 and 100"),
    FieldRow(
        "logit_bias", '{"a":1} {"97":1} {"5":"b"} {"5":NaN}', "refused", "keys are ids of tokens"
    ),
    FieldRow("allowed_token_ids", "[5,6]", "taken", "only these are generated"),
    FieldRow("allowed_token_ids", "[] [97]", "refused", ""),
    FieldRow("bad_words", '[] ["a","bc"]', "taken", "not generated, alone or after a space"),
    FieldRow("bad_words", '[""]', "refused", ""),
    FieldRow("stop", '"a" ["a","b"] []', "taken", "at most 16"),
    FieldRow("stop_token_ids", "[] [5]", "taken", "end the generation; not in the text"),
    FieldRow("stop_token_ids", "[-1]", "refused", ""),
    FieldRow("ignore_eos", "true false", "taken", ""),
    FieldRow("include_stop_str_in_output", "true false", "taken", "also the token that ends it"),
    FieldRow("skip_special_tokens", "true false", "taken", ""),
    FieldRow("spaces_between_special_tokens", "true false", "ignored", "of slow tokenizers"),
    FieldRow("truncate_prompt_tokens", "-1 2", "taken", "the last ones; -1: as many as fit"),
    FieldRow("truncate_prompt_tokens", "0", "refused", ""),
    FieldRow("add_special_tokens", "true false", "taken", "true in completions, false in chats"),
    FieldRow("echo", "true false", "taken", "with the prompt; in chats with a last assistant turn"),
    FieldRow("logprobs", "0 3", "taken", "the model's own, before penalties", "completions"),
    FieldRow("logprobs", "-1 21", "refused", "0 to 20", "completions"),
    FieldRow("logprobs", "true false", "taken", "", "chats"),
    FieldRow("top_logprobs", "0", "refused", "needs logprobs: true", "chats"),
    FieldRow("prompt_logprobs", "0 2", "taken", "not with stream"),
    FieldRow("prompt_logprobs", "-1", "refused", "0 to 20"),
    FieldRow("return_token_ids", "true false", "taken", "token_ids and prompt_token_ids"),
    FieldRow("return_tokens_as_token_ids", "true", "taken", "logprobs name tokens token_id:5"),
    FieldRow("request_id", '"a"', "taken", "ends the id of the response"),
    FieldRow("stream", "false", "taken", ""),
    FieldRow("stream_options", '{"include_usage":true}', "taken", "also continuous_usage_stats"),
    FieldRow("add_generation_prompt", "true false", "taken", "for the template", "chats"),
    FieldRow("continue_final_message", "false", "taken", "true leaves the last turn open", "chats"),
    FieldRow("chat_template_kwargs", '{} {"enable_thinking":false}', "taken", "", "chats"),
    FieldRow("chat_template", '"a"', "refused", "--chat-template is the server's", "chats"),
    FieldRow("documents", '[] [{"text":"a"}]', "taken", "for the template", "chats"),
    FieldRow("reasoning_effort", '"low"', "taken", "for the template", "chats"),
    FieldRow("include_reasoning", ANY, "ignored", "reasoning is a part of the content", "chats"),
    FieldRow("modalities", '["text"]', "ignored", "", "chats"),
    FieldRow("modalities", '["audio"]', "refused", "", "chats"),
    FieldRow("audio", '{"voice":"a"}', "refused", "", "chats"),
    FieldRow("mm_processor_kwargs", "{}", "ignored", ""),
    FieldRow("mm_processor_kwargs", '{"a":1}', "refused", "only text"),
    FieldRow("functions", "[]", "ignored", "", "chats"),
    FieldRow("functions", '[{"name":"a"}]', "refused", "OpenAI replaced it by tools", "chats"),
    FieldRow("function_call", '"none" "auto"', "ignored", "", "chats"),
    FieldRow("function_call", '{"name":"a"}', "refused", "OpenAI replaced it", "chats"),
    FieldRow("tools", "[]", "taken", "rendered and parsed as the chat template has them", "chats"),
    FieldRow("tool_choice", '"none" "auto"', "taken", "also required, or a function", "chats"),
    FieldRow("tool_choice", '"required"', "refused", "without tools", "chats"),
    FieldRow("parallel_tool_calls", "true false", "taken", "false: one call", "chats"),
    FieldRow("response_format", '{"type":"text"}', "taken", "also json_object and json_schema"),
    FieldRow("response_format", '{"type":"json_schema"}', "refused", "without a schema"),
    FieldRow("structured_outputs", "{}", "taken", "json, regex, choice, grammar, json_object"),
    FieldRow("structured_outputs", '{"structural_tag":"a"}', "refused", ""),
    FieldRow("guided_json", '{"type":"a"}', "refused", "schemas that llguidance does not support"),
    FieldRow("guided_regex", '"("', "refused", "a broken regex"),
    FieldRow("guided_choice", "[]", "refused", "no choice"),
    FieldRow("guided_grammar", '"a"', "refused", "neither GBNF nor Lark"),
    FieldRow("web_search_options", "{}", "refused", "no search", "chats"),
    FieldRow("suffix", '""', "ignored", ""),
    FieldRow("suffix", '"a"', "refused", "no insertion"),
    FieldRow("prompt_embeds", '"a"', "refused", "only tokens"),
    FieldRow("logits_processors", '["a"]', "refused", "no code of a client runs"),
    FieldRow("priority", "0", "ignored", ""),
    FieldRow("priority", "1", "refused", "requests run as they arrive"),
    FieldRow("cache_salt", '"a"', "refused", "requests share prefixes"),
    FieldRow("kv_transfer_params", '{"a":1}', "refused", "one server"),
    FieldRow("vllm_xargs", "{}", "ignored", ""),
    FieldRow("vllm_xargs", '{"a":1}', "refused", ""),
    FieldRow("user", ANY, "ignored", ""),
    FieldRow("safety_identifier", ANY, "ignored", ""),
    FieldRow("prompt_cache_key", ANY, "ignored", "prefixes are found by their tokens"),
    FieldRow("prediction", ANY, "ignored", "no answer depends on it"),
    FieldRow("metadata", ANY, "ignored", "nothing is stored"),
    FieldRow("store", ANY, "ignored", "nothing is stored"),
    FieldRow("service_tier", ANY, "ignored", ""),
    FieldRow("verbosity", ANY, "ignored", "", "chats"),
)


def values_of(row: FieldRow) -> list[Any]:
    """Return the values of a row; of any value, some examples."""
    return [
        json.loads(text)
        for text in (["1", '"a"', "{}"] if row.values == ANY else row.values.split())
    ]


def neutral_of(where: str) -> dict[str, tuple[Any, ...] | None]:
    """Return the unsupported fields of a body -> values that are ignored; None for all."""
    outcomes = defaultdict[str, set[str]](set)
    neutral: dict[str, tuple[Any, ...] | None] = {}
    for row in FIELDS:
        if row.where in ("", where):
            outcomes[row.field].add(row.outcome)
            ignored = values_of(row) if row.outcome == "ignored" else ()
            neutral[row.field] = (*(neutral.get(row.field) or ()), *ignored)
            if row.values == ANY:
                neutral[row.field] = None
    return {field: neutral[field] for field, found in outcomes.items() if "taken" not in found}
