"""Fields of requests: each row of the table as it says, and the effect of those that are taken."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_model import Client, published, serving

import phalanx
from phalanx.errors import ConfigError
from phalanx.infer.app import Limits
from phalanx.infer.assembly import engine_of
from phalanx.infer.options import EngineConfig
from phalanx.infer.protocol import described_fields
from phalanx.infer.served import open_served

PATHS = {"completions": "/v1/completions", "chats": "/v1/chat/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Once"},
    "chats": {"messages": [{"role": "user", "content": "Once"}]},
}
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}({{ m.role[:1] }}){{ m.content }}</s>{% endfor %}"
    "{{ documents[0].text if documents }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}(a){% endif %}"
)
ANY = '1 "a" {}'
VALUES = (
    ("completions", "prompt", '"a" ["a","b"] [5,6] [[5],[6,7]]', "taken"),
    ("", "max_tokens", "1", "taken"),
    ("", "max_tokens", "0", "refused"),
    ("chats", "max_completion_tokens", "2", "taken"),
    ("", "min_tokens", "0 2", "taken"),
    ("", "min_tokens", "9", "refused"),
    ("", "temperature", "0 0.7", "taken"),
    ("", "temperature", "-1", "refused"),
    ("", "top_p", "0 0.9 1", "taken"),
    ("", "top_p", "1.5", "refused"),
    ("", "top_k", "-1 0 5", "taken"),
    ("", "top_k", "-2", "refused"),
    ("", "min_p", "0 0.1", "taken"),
    ("", "seed", "-1 3", "taken"),
    ("", "n", "1 2", "taken"),
    ("", "n", "0 65", "refused"),
    ("completions", "best_of", "1 3", "taken"),
    ("chats", "best_of", "1", "ignored"),
    ("chats", "best_of", "2", "refused"),
    ("", "presence_penalty", "0 -2 2", "taken"),
    ("", "presence_penalty", "3", "refused"),
    ("", "frequency_penalty", "0 -2 2", "taken"),
    ("", "frequency_penalty", "-3", "refused"),
    ("", "repetition_penalty", "1 1.3", "taken"),
    ("", "repetition_penalty", "0", "refused"),
    ("", "length_penalty", "1", "ignored"),
    ("", "length_penalty", "2", "refused"),
    ("", "use_beam_search", "false", "ignored"),
    ("", "use_beam_search", "true", "refused"),
    ("", "early_stopping", "false", "ignored"),
    ("", "logit_bias", '{} {"5":-100} {"5":200}', "taken"),
    ("", "logit_bias", '{"a":1} {"97":1} {"5":"b"} {"5":NaN}', "refused"),
    ("", "allowed_token_ids", "[5,6]", "taken"),
    ("", "allowed_token_ids", "[] [97]", "refused"),
    ("", "bad_words", '[] ["a","bc"]', "taken"),
    ("", "bad_words", '[""]', "refused"),
    ("", "stop", '"a" ["a","b"] []', "taken"),
    ("", "stop_token_ids", "[] [5]", "taken"),
    ("", "stop_token_ids", "[-1]", "refused"),
    ("", "ignore_eos", "true false", "taken"),
    ("", "include_stop_str_in_output", "true false", "taken"),
    ("", "skip_special_tokens", "true false", "taken"),
    ("", "spaces_between_special_tokens", "true false", "ignored"),
    ("", "truncate_prompt_tokens", "-1 2", "taken"),
    ("", "truncate_prompt_tokens", "0", "refused"),
    ("", "add_special_tokens", "true false", "taken"),
    ("", "echo", "true false", "taken"),
    ("completions", "logprobs", "0 3", "taken"),
    ("completions", "logprobs", "-1 21", "refused"),
    ("chats", "logprobs", "true false", "taken"),
    ("chats", "top_logprobs", "0", "refused"),
    ("", "prompt_logprobs", "0 2", "taken"),
    ("", "prompt_logprobs", "-1", "refused"),
    ("", "return_token_ids", "true false", "taken"),
    ("", "return_tokens_as_token_ids", "true", "taken"),
    ("", "request_id", '"a"', "taken"),
    ("", "stream", "false", "taken"),
    ("", "stream_options", '{"include_usage":true}', "taken"),
    ("chats", "add_generation_prompt", "true false", "taken"),
    ("chats", "continue_final_message", "false", "taken"),
    ("chats", "chat_template_kwargs", '{} {"enable_thinking":false}', "taken"),
    ("chats", "chat_template", '"a"', "refused"),
    ("chats", "documents", '[] [{"text":"a"}]', "taken"),
    ("chats", "reasoning_effort", '"low"', "taken"),
    ("chats", "include_reasoning", ANY, "ignored"),
    ("chats", "modalities", '["text"]', "ignored"),
    ("chats", "modalities", '["audio"]', "refused"),
    ("chats", "audio", '{"voice":"a"}', "refused"),
    ("", "mm_processor_kwargs", "{}", "ignored"),
    ("", "mm_processor_kwargs", '{"a":1}', "refused"),
    ("chats", "functions", "[]", "ignored"),
    ("chats", "functions", '[{"name":"a"}]', "refused"),
    ("chats", "function_call", '"none" "auto"', "ignored"),
    ("chats", "function_call", '{"name":"a"}', "refused"),
    ("chats", "tools", "[]", "taken"),
    ("chats", "tool_choice", '"none" "auto"', "taken"),
    ("chats", "tool_choice", '"required"', "refused"),
    ("chats", "parallel_tool_calls", "true false", "taken"),
    ("", "response_format", '{"type":"text"}', "taken"),
    ("", "response_format", '{"type":"json_schema"}', "refused"),
    ("", "structured_outputs", "{}", "taken"),
    ("", "structured_outputs", '{"structural_tag":"a"}', "refused"),
    ("", "guided_json", '{"type":"a"}', "refused"),
    ("", "guided_regex", '"("', "refused"),
    ("", "guided_choice", "[]", "refused"),
    ("", "guided_grammar", '"a"', "refused"),
    ("chats", "web_search_options", "{}", "refused"),
    ("", "suffix", '""', "ignored"),
    ("", "suffix", '"a"', "refused"),
    ("", "prompt_embeds", '"a"', "refused"),
    ("", "logits_processors", '["a"]', "refused"),
    ("", "priority", "0", "ignored"),
    ("", "priority", "1", "refused"),
    ("", "cache_salt", '"a"', "refused"),
    ("", "kv_transfer_params", '{"a":1}', "refused"),
    ("", "vllm_xargs", "{}", "ignored"),
    ("", "vllm_xargs", '{"a":1}', "refused"),
    ("", "user", ANY, "ignored"),
    ("", "safety_identifier", ANY, "ignored"),
    ("", "prompt_cache_key", ANY, "ignored"),
    ("", "prediction", ANY, "ignored"),
    ("", "metadata", ANY, "ignored"),
    ("", "store", ANY, "ignored"),
    ("", "service_tier", ANY, "ignored"),
    ("chats", "verbosity", ANY, "ignored"),
)
"""(whose field, field, values in JSON, what happens)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"chat_template": TEMPLATE, "bos_token": "<s>"}
    return published(tmp_path_factory.mktemp("served"), tokenizer_config=config)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with serving(folder, Limits(max_waiting=64)) as found:
        yield found


def completed(client: Client, **fields: Any) -> dict[str, Any]:
    """Return the response to a completion of "Once" with further fields."""
    status, answer = client.ask(PATHS["completions"], {**BODIES["completions"], **SHORT, **fields})
    assert status == 200, answer
    return answer


def told(client: Client, *turns: str, **fields: Any) -> dict[str, Any]:
    """Return the response to a chat whose turns alternate between user and assistant."""
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": r, "content": turn} for r, turn in zip(roles, turns, strict=False)]
    status, answer = client.ask(PATHS["chats"], {"messages": messages, **SHORT, **fields})
    assert status == 200, answer
    return answer


def ids(text: str) -> list[int]:
    return [ord(letter) - 32 for letter in text]


@pytest.mark.parametrize("where", ["completions", pytest.param("chats", marks=pytest.mark.slow)])
def test_each_row_of_the_table(client: Client, where: str) -> None:
    described = {name for name, of, *_ in described_fields() if of in ("", where)}
    rows = [row for row in VALUES if row[0] in ("", where)]
    assert described - {"model", "messages"} == {field for _, field, *_ in rows}
    plain = client.ask(PATHS[where], {**BODIES[where], **SHORT})[1]["choices"]
    for _, field, values, outcome in rows:
        for value in map(json.loads, values.split()):
            body = {**BODIES[where], **SHORT, field: value}
            if field == "max_completion_tokens":
                del body["max_tokens"]
            status, answer = client.ask(PATHS[where], body)
            found = (field, value, answer)
            assert status == (400 if outcome == "refused" else 200), found
            if outcome == "ignored":
                assert answer["choices"] == plain, found
            if outcome == "refused":
                assert answer["error"]["param"] == field, found
                assert field in answer["error"]["message"], found
    client.wait_until_idle()


def test_an_unknown_field_is_ignored_with_one_line_or_refused(
    client: Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = completed(client)["choices"]
    body = {**BODIES["chats"], "zzz": 1, "stream_options": {"include_usage": False, "yyy": 2}}
    body["messages"] = [{**body["messages"][0], "xxx": 3}]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert completed(client, nonsense={"a": 1})["choices"] == plain
            assert client.ask(PATHS["chats"], {**body, **SHORT})[0] == 200
    assert [record.getMessage() for record in caplog.records] == [
        "ignored the unknown fields nonsense",
        "ignored the unknown fields xxx, yyy, zzz",
    ]
    with serving(folder, Limits(is_strict=True)) as strict:
        for field in ("nonsense", "zzz"):
            status, answer = strict.ask(PATHS["chats"], {**BODIES["chats"], field: 1})
            assert (status, answer["error"]["param"]) == (400, field)
        assert strict.ask(PATHS["chats"], {**BODIES["chats"], **SHORT, "user": "a"})[0] == 200


def test_penalties_and_biases_choose_other_tokens(client: Client) -> None:
    def tokens(**fields: Any) -> list[int]:
        options = {"return_token_ids": True, "ignore_eos": True, "max_tokens": 12, **fields}
        return completed(client, **options)["choices"][0]["token_ids"]

    plain = tokens()
    assert tokens(logit_bias={"40": 100}) == [40] * 12
    assert plain[0] not in tokens(logit_bias={str(plain[0]): -100})
    assert set(tokens(allowed_token_ids=[7, 8], temperature=3)) == {7, 8}
    assert len(set(tokens(frequency_penalty=2, logit_bias={"40": 5, "41": 5}))) > 1
    never = chr(plain[0] + 32) + chr(plain[1] + 32)
    barred = tokens(bad_words=[never])
    assert barred[0] == plain[0] and barred[1] != plain[1]
    scores = completed(client, logprobs=0, logit_bias={"40": 100})["choices"][0]["logprobs"]
    assert max(scores["token_logprobs"]) < -0.1  # the model's own probabilities


def test_what_ends_a_generation_and_what_the_text_has_of_it(client: Client) -> None:
    whole = completed(client, ignore_eos=True, max_tokens=12, return_token_ids=True)["choices"][0]
    token, text = whole["token_ids"][5], whole["text"]
    at = whole["token_ids"].index(token)
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 12, "return_token_ids": True}
    short = completed(client, stop_token_ids=[token], **options)["choices"][0]
    ends = (short["token_ids"][-1], short["finish_reason"], short["stop_reason"])
    assert ends == (token, "stop", token) and len(short["token_ids"]) == at + 1
    with_it = completed(client, stop_token_ids=[token], include_stop_str_in_output=True, **options)[
        "choices"
    ][0]
    assert with_it["text"].startswith(short["text"])
    assert with_it["text"][len(short["text"]) :].strip() == chr(token + 32).strip()
    late = completed(client, stop_token_ids=[token], min_tokens=at + 2, **options)["choices"][0]
    assert len(late["token_ids"]) >= at + 2 and token not in late["token_ids"][: at + 2]
    stop = text[4:7]
    cut = completed(client, stop=[stop], **options)["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == (text[: text.index(stop)], stop)
    kept = completed(client, stop=[stop], include_stop_str_in_output=True, **options)["choices"][0]
    assert kept["text"] == text[: text.index(stop) + 3]
    later = completed(client, stop=[stop], min_tokens=11, **options)["choices"][0]
    assert later["text"].startswith(text[:7]) and len(later["token_ids"]) >= 11
    special = completed(client, logit_bias={"96": 100}, ignore_eos=True, skip_special_tokens=False)[
        "choices"
    ][0]
    assert special["text"].replace(" ", "") == "</s>" * 4
    event = client.events(PATHS["completions"], {"prompt": "Once", "stop": [stop], "stream": True,
                                                 **SHORT, **options})[-1]  # fmt: skip
    assert event["choices"][0]["stop_reason"] == stop


def test_prompts_are_cut_and_begun_as_asked(client: Client) -> None:
    def prompt(**fields: Any) -> list[int]:
        options = {"prompt": "abcdef", "max_tokens": 4, "return_token_ids": True, **fields}
        return completed(client, **options)["choices"][0]["prompt_token_ids"]

    assert prompt() == [95, *ids("abcdef")]
    assert prompt(add_special_tokens=False) == ids("abcdef")
    assert prompt(truncate_prompt_tokens=2) == ids("ef")
    assert len(prompt(prompt="a" * 300, truncate_prompt_tokens=-1)) == 128 - 4
    echoed = completed(client, prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"].replace(" ", "") == "ef"

    def chat(*turns: str, **fields: Any) -> str:
        tokens = told(client, *turns, return_token_ids=True, **fields)["prompt_token_ids"]
        return "".join("<s>" if id == 95 else "</s>" if id == 96 else chr(id + 32) for id in tokens)

    assert chat("hi") == "<s>(u)hi</s>(a)"
    assert chat("hi", add_generation_prompt=False) == "<s>(u)hi</s>"
    assert chat("hi", "yo ", continue_final_message=True) == "<s>(u)hi</s>(a)yo "
    assert chat("hi", add_special_tokens=True) == "<s><s>(u)hi</s>(a)"
    values = {"chat_template_kwargs": {"enable_thinking": 0}, "documents": [{"text": "D"}]}
    assert chat("hi", reasoning_effort="low", **values) == "<s>(u)hi</s>D0low(a)"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    body = {"messages": [{"role": "assistant", "content": "a"}], **both}
    assert client.ask(PATHS["chats"], body)[0] == 400
    answer = told(client, "hi", "yo", continue_final_message=True, echo=True)
    plain = told(client, "hi", "yo", continue_final_message=True)
    texts = [each["choices"][0]["message"]["content"] for each in (answer, plain)]
    assert texts[0] == f"yo{texts[1]}"


def test_the_best_of_several_has_the_largest_mean_score(client: Client) -> None:
    options: dict[str, Any] = {"seed": 3, "temperature": 1.5, "max_tokens": 8, "ignore_eos": True}
    every = completed(client, n=6, logprobs=0, **options)["choices"]
    means = [sum(each["logprobs"]["token_logprobs"]) for each in every]
    best = [every[at]["text"] for at in sorted(range(6), key=lambda at: -means[at])[:2]]
    answer = completed(client, n=2, best_of=6, **options)
    assert [each["text"] for each in answer["choices"]] == best
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6 * 8


def test_a_stream_counts_and_names_tokens_by_id(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Once", **SHORT, "stream": True, "stream_options": options, "logprobs": 0}
    body |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "request_id": "abc"}
    *pieces, last = client.events(PATHS["completions"], body)
    assert all(each["usage"]["prompt_tokens"] == 5 for each in pieces) and not last["choices"]
    tokens = [id for each in pieces for id in each["choices"][0]["token_ids"]]
    names = [name for each in pieces for name in each["choices"][0]["logprobs"]["tokens"]]
    assert names == [f"token_id:{id}" for id in tokens] and len(tokens) == 4
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [95, *ids("Once")]
    assert last["id"] == "cmpl-abc"


def test_a_stream_has_the_tokens_whose_text_is_held_back(client: Client) -> None:
    body = {"prompt": "Once", **SHORT, "max_tokens": 12, "ignore_eos": True}
    body |= {"return_token_ids": True}
    (whole,) = client.ask(PATHS["completions"], body)[1]["choices"]
    # The first letters may begin the stop text, so their text comes with a later token.
    body |= {"stream": True, "stop": whole["text"][:8] + "\0"}
    choices = [each["choices"][0] for each in client.events(PATHS["completions"], body)]
    assert "".join(each["text"] for each in choices) == whole["text"]
    assert [id for each in choices for id in each["token_ids"]] == whole["token_ids"]


def test_other_endpoints_and_what_a_server_takes_for_granted(folder: Path) -> None:
    limits = Limits(
        names=("other",),
        defaults={"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 3},
        allowed_origins=("http://page.example",),
    )
    with serving(folder, limits, max_model_len=64) as client:
        (first, second) = client.ask("/v1/models")[1]["data"]
        assert (first["id"], second["id"], second["root"]) == ("hf", "other", "hf")
        assert first["max_model_len"] == 64 and client.ask("/v1/models/other")[1] == second
        explicit = completed(client, repetition_penalty=1.5, model="other")
        body = {**BODIES["completions"], "max_tokens": 4}
        assert client.ask(PATHS["completions"], body)[1]["choices"] == explicit["choices"]
        body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        assert client.ask(PATHS["chats"], body)[1]["usage"]["completion_tokens"] == 3
        body["max_tokens"] = 5
        assert client.ask(PATHS["chats"], body)[1]["usage"]["completion_tokens"] == 5
        status, answer = client.ask("/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert (status, answer["tokens"], answer["count"]) == (200, [95, *ids("ab")], 3)
        assert (answer["max_model_len"], answer["token_strs"]) == (64, ["<s>", "a", "b"])
        plain = client.ask("/tokenize", {"prompt": "ab", "add_special_tokens": False})[1]
        assert plain["tokens"] == ids("ab")
        chat = client.ask("/tokenize", {"messages": body["messages"]})[1]["tokens"]
        assert chat == told(client, "hi", return_token_ids=True)["prompt_token_ids"]
        assert client.ask("/detokenize", {"tokens": chat})[1]["prompt"].startswith("<s>")
        for wrong in ({}, {"prompt": "a", **body}, {"prompt": 3}):
            assert client.ask("/tokenize", wrong)[0] == 400
        assert client.ask("/detokenize", {"tokens": [97]})[0] == 400
        assert client.ask("/version")[1] == {"version": phalanx.__version__}
        assert client.ask("/ping")[0] == client.ask("/ping", {})[0] == 200
        for origin, allowed in (("http://page.example", "http://page.example"), ("http://x", None)):
            connection = client.connect()
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            connection.request("OPTIONS", PATHS["chats"], headers=asked)
            answer = connection.getresponse()
            assert answer.getheader("Access-Control-Allow-Origin") == allowed
            connection.close()
    with pytest.raises(ConfigError, match="max_model_len is 129; expected at most 128"):
        engine_of(open_served(folder), EngineConfig(max_model_len=129, device="cpu"))
