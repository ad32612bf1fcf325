"""`/v1/responses`, whole and as a stream, and through the client of OpenAI."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from served_model import Client, long_published, serving

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BODY: dict[str, Any] = {"input": "Once", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(name="client", scope="module")
def _client(tmp_path_factory: pytest.TempPathFactory) -> Generator[Client]:
    with serving(long_published(tmp_path_factory.mktemp("served"), TEMPLATE)) as client:
        yield client


def test_a_response_is_the_chat(client: Client) -> None:
    parts = [{"type": "input_text", "text": "On"}, {"type": "input_text", "text": "ce"}]
    message = {"type": "message", "role": "user", "content": parts}
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "Once"}]
    chat = {"messages": turns, "max_tokens": 12, "temperature": 0}
    _, expected = client.ask("/v1/chat/completions", chat)
    for given in ("Once", [message], [{"role": "user", "content": "Once"}]):
        body = {**BODY, "input": given, "instructions": "s", "store": True, "tools": []}
        status, found = client.ask("/v1/responses", body)
        assert status == 200 and found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        (content,) = found["output"][0]["content"]
        assert content["text"] == expected["choices"][0]["message"]["content"]
        assert found["usage"]["output_tokens"] == 12
        assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    for wrong, why in (
        ({"previous_response_id": "a"}, "previous_response_id is not supported"),
        ({"input": [{"type": "function_call"}]}, "input.0"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema.schema"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"max_output_tokens": 0}, "max_completion_tokens is 0"),
        ({"model": "other"}, "there is no model"),
    ):
        status, answer = client.ask("/v1/responses", {**BODY, **wrong})
        assert status in (400, 404) and why in answer["error"]["message"]


def test_the_events_of_a_stream_make_the_response(client: Client) -> None:
    _, whole = client.ask("/v1/responses", BODY)
    _, text = client.ask("/v1/responses", {**BODY, "stream": True})
    events = [json.loads(each.split("\ndata: ")[1]) for each in text.split("\n\n")[:-1]]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.incomplete"
    deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    last = events[-1]["response"]
    assert "".join(deltas) == last["output"][0]["content"][0]["text"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == 12


@pytest.mark.slow
def test_the_client_of_openai_reads_responses(client: Client) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    theirs = openai.OpenAI(api_key="a", base_url=f"http://127.0.0.1:{client.port}/v1")
    options: dict[str, Any] = {"model": "hf", **BODY, "instructions": "Say."}
    whole = theirs.responses.create(**options)
    assert len(whole.output_text) > 0 and whole.usage.output_tokens == 12
    openai.types.responses.Response.model_validate(whole.model_dump(), strict=True)
    events = list(theirs.responses.create(**options, stream=True))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    schema = {"type": "json_schema", "name": "p", "strict": True, "schema": {"enum": ["a", "b"]}}
    assert theirs.responses.create(**options, text={"format": schema}).output_text in ('"a"', '"b"')
    theirs.close()


@pytest.mark.slow
def test_the_client_of_openai_calls_tools(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    template = "{{ tools | length if tools }}<tool_call>" + TEMPLATE
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    function = {"name": "f", "parameters": {**schema, "additionalProperties": False}}
    with serving(long_published(tmp_path, template)) as server:
        theirs = openai.OpenAI(api_key="a", base_url=f"http://127.0.0.1:{server.port}/v1")
        options: dict[str, Any] = {
            "model": "hf",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_completion_tokens": 300,
            "seed": 1,
        }
        whole = theirs.chat.completions.create(**options)
        (call,) = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["x"] in (1, 2)
        openai.types.chat.ChatCompletion.model_validate(whole.model_dump(), strict=True)
        with theirs.chat.completions.stream(**options) as stream:
            stream.until_done()
            (again,) = stream.get_final_completion().choices[0].message.tool_calls
        assert again.function.arguments == call.function.arguments
        turns = [
            whole.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        options |= {"messages": [*options["messages"], *turns], "tool_choice": "auto"}
        assert theirs.chat.completions.create(**options).usage.prompt_tokens > 10
        theirs.close()
