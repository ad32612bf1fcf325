"""The client of OpenAI, and its own description of each answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served_model import published, serving

from phalanx.infer.app import Limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("served"))


@pytest.mark.slow
def test_the_client_of_openai(folder: Path) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    with serving(folder, Limits(api_key="secret")) as server:
        client = openai.OpenAI(api_key="secret", base_url=f"http://127.0.0.1:{server.port}/v1")
        assert [each.id for each in client.models.list()] == ["hf"]
        assert client.models.retrieve("hf").id == "hf"
        options: dict[str, Any] = {"model": "hf", "temperature": 0, "max_tokens": 12}
        whole = client.completions.create(prompt="Once upon", **options)
        pieces = client.completions.create(prompt="Once upon", stream=True, **options)
        assert "".join(each.choices[0].text for each in pieces) == whole.choices[0].text
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], **options}
        message = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        parts = client.chat.completions.create(
            **chat, stream=True, stream_options={"include_usage": True}
        )
        texts, usage = list[str](), None
        for part in parts:
            usage = part.usage or usage
            texts += [choice.delta.content or "" for choice in part.choices]
        assert "".join(texts) == message.choices[0].message.content
        assert usage.completion_tokens == message.usage.completion_tokens
        said = message.choices[0].message
        for answer in (said, said.model_dump(), said.model_dump(exclude_none=True)):
            again = {**chat, "messages": [*chat["messages"], answer]}
            assert client.chat.completions.create(**again).usage.prompt_tokens > 12
        with pytest.raises(openai.BadRequestError, match="the nearest that fits"):
            client.completions.create(prompt="a", model="hf", max_tokens=1000)
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.completions.create(prompt="a", model="other")
        client.close()


@pytest.mark.slow
def test_answers_are_as_openai_describes_them(folder: Path) -> None:
    types = pytest.importorskip("openai.types", reason="the openai client is not installed")
    options: dict[str, Any] = {"max_tokens": 4, "n": 2, "ignore_eos": True}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], **options}
    chat |= {"logprobs": True, "top_logprobs": 2}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    with serving(folder) as server:
        text = {"prompt": "Once", "logprobs": 2, **options}
        _, whole = server.ask("/v1/completions", text)
        pieces = server.events("/v1/completions", {**text, **stream})
        for each in pieces:  # the description has no null there, and OpenAI's streams do
            for choice in each["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "length"
        for each in (whole, *pieces):
            types.Completion.model_validate(each, strict=True)
        _, whole = server.ask("/v1/chat/completions", chat)
        types.chat.ChatCompletion.model_validate(whole, strict=True)
        for each in server.events("/v1/chat/completions", {**chat, **stream}):
            types.chat.ChatCompletionChunk.model_validate(each, strict=True)
        for each in server.ask("/v1/models")[1]["data"]:
            types.Model.model_validate(each, strict=True)
        _, refused = server.ask("/v1/completions", {"prompt": []})
        types.ErrorObject.model_validate(refused["error"])
