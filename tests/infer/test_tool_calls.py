"""Calls of tools in the formats of model families: parsed from any cut, streamed, forced."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Generator
from typing import Any

import pytest
from served_model import Client, ascii_bytes, long_published, serving
from tokenizers import Tokenizer

from phalanx.infer.grammar import Grammars
from phalanx.infer.protocol import Function
from phalanx.infer.tool_calls import CALL_FORMATS, CallParser, format_of, grammar_of

TEXTS = [  # format, text, content, calls
    (
        "hermes",
        'Well. \n\n<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        "Well.",
        [("f", '{"x": "a}\\"{"}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": [1]}, "name": "h"}</tool_call>', "",
     [("h", '{"x": [1]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>', "", [("f", "{}")]),
    ("hermes", "3 < 4 <tool_x  \n", "3 < 4 <tool_x  \n", []),
    ("hermes", "<tool_call>no</tool_call> yes", "<tool_call>no</tool_call> yes", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
    ("hermes", '<tool_call>{"name": "f", "ar', '<tool_call>{"name": "f", "ar', []),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {"y": {"z": []}}}',
        "",
        [("f", '{"x": 1}'), ("g", '{"y": {"z": []}}')],
    ),
    (
        "llama3_json",
        ' <|python_tag|>{"type": "function", "name": "h", "parameters": {"x": 1}}',
        "",
        [("h", '{"x": 1}')],
    ),
    ("llama3_json", '{"name": "b", "parameters": {}} a', '{"name": "b", "parameters": {}} a', []),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", 'So {"name": "f"}', 'So {"name": "f"}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"x": [1]}'), ("g", "{}")],
    ),
    (
        "mistral",
        'hi[TOOL_CALLS]f[ARGS]{"x": [1]}[TOOL_CALLS]g{"y": 2}',
        "hi",
        [("f", '{"x": [1]}'), ("g", '{"y": 2}')],
    ),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": "{\\"x\\": 1}"}]',
        "",
        [("f", '{"x": 1}')],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), TEXTS)
def test_calls_are_parsed_however_the_text_is_cut(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    draw = random.Random(0)
    for number in range(30):
        num = min(draw.randint(0, 9), len(text)) if number else len(text) + 1
        cuts = [0, *sorted(draw.sample(range(len(text) + 1), num)), len(text)]
        parser = CallParser(CALL_FORMATS[family], ["f", "g"])
        deltas = [
            delta
            for begin, end in itertools.pairwise(cuts)
            for delta in parser.take(text[begin:end])
        ]
        deltas += parser.take("", is_last=True)
        found = list[tuple[str, str]]()
        for delta in deltas:
            for each in delta.get("tool_calls", ()):
                if "id" in each:
                    assert each["index"] == len(found) and each["type"] == "function"
                    found.append((each["function"]["name"], ""))
                name, arguments = found[each["index"]]
                found[each["index"]] = name, arguments + each["function"]["arguments"]
        assert "".join(delta.get("content", "") for delta in deltas) == content
        assert found == calls and len(parser.calls) == len(calls)


def test_a_whole_message_has_all_calls_or_the_first() -> None:
    text = TEXTS[0][1]
    message = CallParser(CALL_FORMATS["hermes"], ["f"]).whole(text)
    assert message["content"] == "Well."
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": "a}\\"{"}'},
        {"name": "g", "arguments": "{}"},
    ]
    single = CallParser(CALL_FORMATS["hermes"], ["f"], is_single=True).whole(text)
    assert [each["function"]["name"] for each in single["tool_calls"]] == ["f"]


def test_the_format_is_the_templates() -> None:
    for template, name in (
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} {{ '\"parameters\"' }}", "llama3_json"),
        ("{{ messages }} <tool_call>", None),
        ("{{ tools }}", None),
    ):
        family = format_of(template)
        assert family == CALL_FORMATS.get(name or "")


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}},
                                 "$defs": {"n": {"enum": [1, 2]}}, "required": ["x"],
                                 "additionalProperties": False}},
    {"name": "g"},
]  # fmt: skip


@pytest.mark.parametrize("name", [*CALL_FORMATS, "mistral [ARGS]"])
@pytest.mark.parametrize("is_single", [True, False])
def test_a_forced_call_is_in_the_format_that_is_parsed(name: str, is_single: bool) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    family, tokenizer = CALL_FORMATS[name.split()[0]], Tokenizer.from_str(ascii_bytes())
    tokenizer.add_special_tokens([family.begin, *name.split()[1:]])
    lark = grammar_of(
        family, [Function(**each) for each in FUNCTIONS], tokenizer, is_single=is_single
    )
    matcher = Grammars(tokenizer, [96]).compile("tools", "lark", lark).copy()
    draw, tokens, is_whole = random.Random(1), list[int](), False
    while not is_whole and len(tokens) < 4000:
        tokens.append(draw.choice(matcher.masks()[0].nonzero()[:, 0].tolist()))
        is_whole = matcher.take(tokens[-1])
    assert is_whole and matcher.failure is None
    text = tokenizer.decode([each for each in tokens if each != 96], skip_special_tokens=False)
    message = CallParser(family, ["f", "g"]).whole(text)
    assert message["content"] is None and (not is_single or len(message["tool_calls"]) == 1)
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert name != "mistral" or re.fullmatch("[0-9a-zA-Z]{9}", call["id"])
        assert call["function"]["name"] == "g" or arguments["x"] in (1, 2)
    if family.begin in tokenizer.get_vocab() and not family.is_bare:  # the token, not its letters
        assert tokenizer.token_to_id(family.begin) in tokens


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} as <tool_call>;{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    "max_tokens": 400,
    "seed": 1,
}


@pytest.fixture(name="client", scope="module")
def _client(tmp_path_factory: pytest.TempPathFactory) -> Generator[Client]:
    with serving(long_published(tmp_path_factory.mktemp("served"), TEMPLATE)) as client:
        yield client


def test_a_forced_call_whole_and_as_a_stream(client: Client) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    for choice in (named, required):
        body = {**CHAT, **choice, "return_token_ids": True}
        status, answer = client.ask("/v1/chat/completions", body)
        (whole,) = answer["choices"]
        assert status == 200 and whole["finish_reason"] == "tool_calls", answer
        (call,) = whole["message"]["tool_calls"]
        assert whole["message"]["content"] is None
        if choice is named:
            assert json.loads(call["function"]["arguments"])["x"] in (1, 2)
        pieces = client.events("/v1/chat/completions", {**body, "stream": True})
        deltas = [each["choices"][0]["delta"] for each in pieces]
        parts = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
        assert (
            deltas[0]["role"] == "assistant"
            and parts[0]["function"]["name"] == (call["function"]["name"])
        )
        text = "".join(each["function"]["arguments"] for each in parts)
        assert text == call["function"]["arguments"] and len(parts) > 2
        assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
        ids = [id for each in pieces for id in each["choices"][0]["token_ids"]]
        assert ids == whole["token_ids"]
        assert [each["choices"][0].get("prompt_token_ids") for each in pieces] == [
            answer["prompt_token_ids"],
            *[None] * (len(pieces) - 1),
        ]
    wrong = {"tool_choice": {"type": "function", "function": {"name": "h"}}}
    status, answer = client.ask("/v1/chat/completions", {**CHAT, **wrong})
    assert status == 400 and "the tools are f, g" in answer["error"]["message"]
    for choice in ("required", "auto", None):
        wrong = {**CHAT, "tool_choice": choice, "response_format": {"type": "json_object"}}
        status, answer = client.ask("/v1/chat/completions", wrong)
        assert status == 400 and answer["error"]["param"] == "tools", answer
    status, _ = client.ask("/v1/chat/completions", {**wrong, "tool_choice": "none"})
    assert status == 200


def test_tools_and_their_answers_are_in_the_prompt(client: Client) -> None:
    body: dict[str, Any] = {**CHAT, "max_tokens": 1}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 12345}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "a"},
    ]
    longer = {**body, "messages": [*body["messages"], *turns]}
    nums = [
        client.ask("/v1/chat/completions", each)[1]["usage"]["prompt_tokens"]
        for each in ({**body, "tool_choice": "none"}, body, longer)
    ]
    assert nums[0] == len("[user]a")
    assert nums[1] - nums[0] == len("f as <tool_call>;g as <tool_call>;")
    assert nums[2] - nums[1] == len("[assistant]12345[tool]b")
    for each, num in zip(({**body, "tool_choice": "none"}, body), nums, strict=False):
        assert client.ask("/tokenize", each)[1]["count"] == num
