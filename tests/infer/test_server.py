"""The HTTP server: what OpenAI's interface promises, and a reason for every refusal."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_and_prompts import engine, twins
from served_model import Client, published, serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx.infer.answers import Answer
from phalanx.infer.app import Limits
from phalanx.infer.engine import Piece
from phalanx.infer.options import Sampling, TokenScore
from phalanx.infer.protocol import GenerationBody

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    limits = Limits(max_waiting=64, max_body_bytes=5000)
    with serving(folder, limits) as found:
        yield found


def continued(prompt: str) -> str:
    """Return what the engine alone continues a prompt with."""
    model, _ = twins("llama")
    ids = [95, *(ord(letter) - 32 for letter in prompt)]
    sampling = Sampling(max_tokens=12, temperature=0, ignore_end=True)
    (tokens,) = engine(model).generate([ids], sampling)
    return "".join(chr(token + 32) for token in tokens if token < 95)


def test_a_completion_whole_and_as_a_stream(client: Client) -> None:
    body = {"model": "hf", "prompt": "Once upon", **GREEDY}
    status, whole = client.ask("/v1/completions", body)
    (choice,) = whole["choices"]
    assert status == 200 and whole["object"] == "text_completion" and whole["model"] == "hf"
    assert choice["text"].replace(" ", "") == continued("Once upon").replace(" ", "")
    assert choice["finish_reason"] == "length"
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        10,
        12,
        22,
    )
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.events("/v1/completions", {**body, **options})
    assert "".join(each["choices"][0]["text"] for each in pieces) == choice["text"]
    assert [each["choices"][0]["finish_reason"] for each in pieces][-1] == "length"
    assert len({each["id"] for each in [*pieces, last]}) == 1
    assert all(each["usage"] is None for each in pieces)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


def test_requests_of_a_model_with_experts_share_a_step(tmp_path: Path) -> None:
    texts = ["Once", "upon a time", "there was", "a model of experts"]
    with serving(published(tmp_path, of="olmoe")) as client:
        status, whole = client.ask("/v1/completions", {"model": "hf", "prompt": texts, **GREEDY})
        assert client.engine.counts.steps < 2 * 12
    assert status == 200
    _, theirs = twins("olmoe")
    for text, choice in zip(texts, whole["choices"], strict=True):
        ids = torch.tensor([[95, *(ord(letter) - 32 for letter in text)]])
        tokens: Any = theirs.generate(ids, max_new_tokens=12, do_sample=False)  # pyright: ignore[reportCallIssue]
        expected = "".join(chr(token + 32) for token in tokens[0, ids.shape[1] :] if token < 95)
        assert choice["text"].replace(" ", "") == expected.replace(" ", "")


def test_several_prompts_choices_tokens_and_logprobs(client: Client) -> None:
    body = {"prompt": ["Once", "upon a"], "n": 2, "seed": 3, "max_tokens": 6, "logprobs": 2}
    status, whole = client.ask("/v1/completions", body)
    assert status == 200 and [each["index"] for each in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 5 + 7
    scores = whole["choices"][1]["logprobs"]
    num_tokens = len(scores["tokens"])
    assert len(scores["token_logprobs"]) == num_tokens <= 6
    for token, own, top in zip(
        scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
    ):
        assert top[token] == own and len(top) == (2 if own in sorted(top.values())[-2:] else 3)
    ids = [[95, *(ord(letter) - 32 for letter in text)] for text in body["prompt"]]
    assert client.ask("/v1/completions", {**body, "prompt": ids})[1]["choices"] == whole["choices"]
    events = client.events("/v1/completions", {**body, "stream": True})
    texts = ["", "", "", ""]
    for event in events:
        (piece,) = event["choices"]
        texts[piece["index"]] += piece["text"]
    assert texts == [each["text"] for each in whole["choices"]]


def test_offsets_of_tokens_count_the_characters_before(client: Client) -> None:
    body = {"prompt": ["Once", "upon a"], "logprobs": 1, **GREEDY}
    whole = [each["logprobs"] for each in client.ask("/v1/completions", body)[1]["choices"]]
    streamed: list[list[int]] = [[], []]
    for event in client.events("/v1/completions", {**body, "stream": True}):
        (piece,) = event["choices"]
        streamed[piece["index"]] += piece["logprobs"]["text_offset"]
    assert streamed == [scores["text_offset"] for scores in whole]
    for scores in whole:
        ends = itertools.accumulate(map(len, scores["tokens"]), initial=0)
        assert scores["text_offset"] == list(ends)[:-1] and scores["text_offset"][-1] > 0


def test_a_character_of_several_tokens_counts_once() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    served: Any = SimpleNamespace(tokenizer=tokenizer, name="a")
    tokens = tokenizer.encode("a\u2603b").ids
    answer = Answer(served, 0, GenerationBody())
    found = answer.scores(0, tokens, [TokenScore(-1.0)] * 5)
    assert found["text_offset"] == [0, 1, 2, 2, 2]


def test_only_the_last_event_says_what_ended_a_completion() -> None:
    served: Any = SimpleNamespace(tokenizer=None, name="a")
    # The engine may have finished before the first event is written.
    ended: Any = SimpleNamespace(number=0, finish_reason="stop", stop_reason="x", prompt=[1])

    async def pieces() -> AsyncGenerator[Piece]:
        yield Piece(ended, "a", 1, None, None)
        yield Piece(ended, "b", 2, None, "stop")

    async def events() -> list[Any]:
        body = GenerationBody(stream=True)
        stream = Answer(served, None, body).stream(pieces(), [ended])
        return [json.loads(each[6:]) async for each in stream if "DONE" not in each]

    choices = [each["choices"][0] for each in asyncio.run(events())]
    assert [(each["finish_reason"], each["stop_reason"]) for each in choices] == [
        (None, None),
        ("stop", "x"),
    ]


def test_what_asks_for_nothing_is_taken_as_openai_takes_it(client: Client) -> None:
    text = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    greedy = client.ask("/v1/completions", {**text, "temperature": 0})[1]["choices"]
    plain = {"presence_penalty": 0, "min_p": 1, "response_format": {"type": "text"}, "best_of": 1}
    assert client.ask("/v1/completions", {**text, **plain})[1]["choices"] == greedy
    assert client.ask("/v1/completions", {**text, "top_p": 0})[1]["choices"] == greedy
    found = [client.ask("/v1/completions", {**text, "seed": -1})[1] for _ in range(2)]
    assert found[0]["choices"] == found[1]["choices"]
    messages: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "assistant"},
        {"role": "user", "content": "b"},
    ]
    chat = {"messages": messages, "response_format": {"type": "text"}, "max_tokens": 1}
    chat |= {"stream_options": {"include_usage": None}, "tools": [], "tool_choice": "none"}
    chat |= {"parallel_tool_calls": True, "store": False, "metadata": {}, "service_tier": "auto"}
    chat |= {"modalities": ["text"], "prediction": None, "safety_identifier": "a", "top_k": -1}
    calls = messages[1] | {"tool_calls": []}
    messages[1] = calls
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
    usage = client.ask("/v1/chat/completions", chat)[1]["usage"]
    assert usage["prompt_tokens"] == len(["<s>", "a", "b"])  # the tokenizer has no line break
    for wrong, why in (
        ({"response_format": {"type": "json_schema"}}, "type json_schema requires json_schema"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tool_choice": "required"}, "tool_choice is required; the tools are none"),
        ({"messages": [image]}, 'messages.0.content.0.type is "image_url", which is not supported'),
        ({"messages": [{**calls, "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function is mis"),
        ({"messages": [{**calls, "audio": {}}]}, "messages.0.audio is not supported"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens is 0; expected"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21; expected"),
        ({"messages": []}, "messages is []; List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": None}]}, "only a message of role assistant"),
    ):
        status, answer = client.ask("/v1/chat/completions", {**chat, **wrong})
        assert status == 400 and why in answer["error"]["message"]
        assert answer["error"]["param"] == next(iter(wrong))
    _, answer = client.ask("/v1/chat/completions", {**chat, "max_tokens": 1000})
    found = (answer["error"]["param"], answer["error"]["code"])
    assert found == ("messages", "context_length_exceeded")


def test_a_chat_whole_and_as_a_stream(client: Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Once"}]}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1, **GREEDY, "stop": ["\0"]}
    status, whole = client.ask("/v1/chat/completions", body)
    (choice,) = whole["choices"]
    assert status == 200 and choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == 12
    pieces = client.events("/v1/chat/completions", {**body, "stream": True})
    deltas = [each["choices"][0]["delta"] for each in pieces]
    assert deltas[0]["role"] == "assistant" and "role" not in deltas[1]
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


def test_a_template_makes_the_prompt_of_a_chat(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    with serving(published(tmp_path, tokenizer_config=config)) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], **GREEDY}
        status, whole = client.ask("/v1/chat/completions", body)
        assert status == 200 and whole["usage"]["prompt_tokens"] == 1 + len("[user]Hi")
        expected = client.ask("/v1/completions", {"prompt": "[user]Hi", **GREEDY})[1]
        assert whole["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
        body["messages"] = [{"role": "tool", "content": "Hi"}]
        status, refused = client.ask("/v1/chat/completions", body)
        assert status == 400 and "no tools" in refused["error"]["message"]
        assert refused["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        (b"{", 400, "the body is not valid JSON", None),
        (b"[" * 3000, 400, "the body is not valid JSON", None),
        (b'{"prompt": "\\ud800"}', 400, "the body is not valid JSON", None),
        (b"\xff\xfe", 400, "the body is not valid JSON", None),
        (b"[1]", 400, "the body is a list; expected an object", None),
        ({}, 400, "prompt is missing", "prompt"),
        ({"prompt": 3}, 400, "prompt", "prompt"),
        ({"prompt": []}, 400, "0 prompts with n 1 request 0 texts; expected 1 to 64", "prompt"),
        ({"prompt": ["a"] * 65}, 400, "65 prompts with n 1 request 65 texts", "prompt"),
        ({"prompt": None}, 400, "prompt is null; expected a valid string", "prompt"),
        ({"prompt": [1, "a"]}, 400, 'prompt.1 is "a"; expected a valid integer', "prompt"),
        ({"prompt": [-1]}, 400, "prompt has tokens from -1 to -1; expected 0 to 96", "prompt"),
        ({"prompt": [[]]}, 400, "the prompt has no token", "prompt"),
        ({"prompt": [1, 97]}, 400, "has tokens from 1 to 97; expected 0 to 96", "prompt"),
        ({"prompt": "a", "n": 65}, 400, "1 prompts with n 65 request 65 texts; expected 1 to", "n"),
        ({"prompt": "a", "n": -1}, 400, "1 prompts with n -1 request -1 texts; expected 1", "n"),
        ({"prompt": "a", "best_of": 2, "n": 3}, 400, "best_of requires stream: false", "best_of"),
        ({"prompt": "a", "stop": ["a"] * 17}, 400, "should have at most 16 items", "stop"),
        ({"prompt": "a", "stop": ["a", 1]}, 400, "stop.1 is 1; expected a valid string", "stop"),
        (
            {"prompt": "a", "max_tokens": 0},
            400,
            "max_tokens is 0; expected at least 1",
            "max_tokens",
        ),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs is 21; expected", "logprobs"),
        ({"prompt": "a", "temperature": "b" * 90}, 400, f'is "{"b" * 59}...; exp', "temperature"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature is -1", "temperature"),
        (b'{"prompt": "a", "top_p": NaN}', 400, "top_p is nan", "top_p"),
        ({"prompt": "a", "priority": 2}, 400, "not supported; expected 0", "priority"),
        ({"prompt": "a", "min_tokens": 17}, 400, "expected at most max_tokens, 16", "min_tokens"),
        ({"prompt": "a", "logit_bias": {"97": 1}}, 400, "token 97; expected 0 to 96", "logit_bias"),
        ({"prompt": "a", "echo": 0}, 400, "echo is 0; expected a valid boolean", "echo"),
        ({"prompt": "a", "prompt_logprobs": -1}, 400, "is -1; expected", "prompt_logprobs"),
        ({"prompt": "a" * 200}, 400, "has 128 positions; the nearest that fits is 112", "prompt"),
        ({"prompt": "a" * 120, "max_tokens": 20}, 400, "that fits is max_tokens 7", "prompt"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "no model 'gpt-4'; the served model is", "model"),
        ({"prompt": "a" * 6000}, 413, "the body has more than 5,000 bytes", None),
    ],
)
def test_a_refusal_has_a_reason(
    client: Client, body: Any, status: int, words: str, param: str | None
) -> None:
    found, answer = client.ask("/v1/completions", body)
    error = answer["error"]
    assert (found, words in error["message"], error["param"]) == (status, True, param), answer
    code = "context_length_exceeded" if "that fits is" in words else None
    assert error["code"] == ("model_not_found" if status == 404 else code)
    assert client.ask("/health") == (200, {"status": "ok"})


def test_two_names_of_one_limit_are_refused(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    status, answer = client.ask("/v1/chat/completions", {**body, "max_completion_tokens": 3})
    assert status == 400 and "give only one of them" in answer["error"]["message"]


def test_what_can_be_looked_at(client: Client) -> None:
    (model,) = client.ask("/v1/models")[1]["data"]
    created = int(client.gateway.served.weights.folder.stat().st_mtime)
    assert (model["id"], model["created"]) == ("hf", created)
    assert client.ask("/v1/models/hf") == (200, model)
    status, refused = client.ask("/v1/models/gpt-4")
    assert status == 404 and "the served model is 'hf'" in refused["error"]["message"]
    assert (refused["error"]["param"], refused["error"]["code"]) == ("model", "model_not_found")
    assert client.ask("/no/such")[0] == 404 and client.ask("/v1/completions")[0] == 405
    client.wait_until_idle()
    before = client.ask("/stats")[1]
    client.ask("/v1/completions", {"prompt": "abc", **GREEDY})
    after = client.ask("/stats")[1]
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == 12
    status, text = client.ask("/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert status == 200
    assert float(values["phalanx_generated_tokens_total"]) == after["generated_tokens_total"]
    assert float(values["phalanx_first_token_seconds_count"]) > 0
    status, page = client.ask("/")
    assert (
        status == 200
        and "<!doctype html>" in page
        and "http" not in page.lower().replace("httpequiv", "").replace("<!doctype html>", "")
    )


def test_a_prompt_that_choices_share_was_not_cached(folder: Path) -> None:
    prompt = "abcdefghijklmnopqrstuvwxyz"
    with serving(folder) as client:
        for num_found in (0, 16):
            body = {"prompt": [prompt, prompt[::-1]], "n": 3, "max_tokens": 2}
            usage = client.ask("/v1/completions", body)[1]["usage"]
            assert usage["prompt_tokens"] == 2 * 27
            assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * num_found
        stats = client.ask("/stats")[1]
        assert stats["prompt_tokens_total"] == 4 * 27
        assert stats["prefix_hit_tokens_total"] == 2 * 16


def test_logits_that_are_not_finite_are_said_to_be(folder: Path) -> None:
    with serving(folder) as client:
        own = client.engine._logits  # pyright: ignore[reportPrivateUsage]
        client.engine._logits = lambda step: own(step) * torch.nan  # pyright: ignore[reportPrivateUsage]
        body = {"prompt": "a", "max_tokens": 1}
        status, answer = client.ask("/v1/completions", body)
        assert (status, answer["error"]["message"]) == (503, "the model's logits are not finite")
        _, text = client.ask("/v1/completions", {**body, "stream": True})
        assert "the model's logits are not finite" in text and "[DONE]" not in text
        assert client.ask("/health")[0] == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(client: Client, is_stream: bool) -> None:
    client.wait_until_idle()
    scheduler = client.engine.scheduler
    before = client.engine.counts.generated_tokens
    own, may_step = client.engine._logits, threading.Semaphore(0)  # pyright: ignore[reportPrivateUsage]

    def logits(step: Any) -> Any:
        assert may_step.acquire(timeout=60)
        return own(step)

    client.engine._logits = logits  # pyright: ignore[reportPrivateUsage]
    try:
        body = json.dumps(
            {"prompt": "abc", "n": 2, "max_tokens": 100, "ignore_eos": True, "stream": is_stream}
        )
        gone = socket.create_connection(("127.0.0.1", client.port))
        gone.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(5):
            may_step.release()
        while client.engine.counts.generated_tokens < before + 6:
            time.sleep(0.01)
        assert scheduler.pool.num_held > 0
        gone.close()
        while client.gateway.thread._open:  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.01)  # until the event loop hears of it; the engine stands before a step
        for _ in range(2):
            may_step.release()
        client.wait_until_idle()
        assert client.engine.counts.generated_tokens <= before + 2 * 7
    finally:
        client.engine._logits = own  # pyright: ignore[reportPrivateUsage]
        for _ in range(200):
            may_step.release()


def test_of_200_clients_those_beyond_the_queue_are_sent_away(client: Client) -> None:
    client.wait_until_idle()
    found: list[int] = []
    own, may_run = client.engine._logits, threading.Event()  # pyright: ignore[reportPrivateUsage]

    def logits(step: Any) -> Any:
        assert may_run.wait(timeout=120)
        return own(step)

    def ask(number: int) -> None:
        body = {"prompt": f"{number:03d}", "max_tokens": 10, "ignore_eos": True, "seed": number}
        found.append(client.ask("/v1/completions", body)[0])
        if len(found) == 200 - 8 - 64:  # all answers that come before the first token
            may_run.set()

    client.engine._logits = logits  # pyright: ignore[reportPrivateUsage]
    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        client.engine._logits = own  # pyright: ignore[reportPrivateUsage]
        may_run.set()
    assert Counter(found) == {200: 8 + 64, 429: 200 - 8 - 64}  # slots, and the queue
    client.wait_until_idle()


def nonsense(draw: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kinds: list[Any] = [
        None, True, False, 0, 1, -1, 2**63, 1e308, -0.5, 10**400, "", "a", "é☃", "\0", "x" * 50,
        [], {},
    ]  # fmt: skip
    if depth > 3 or draw.random() < 0.6:
        return draw.choice(kinds)
    if draw.random() < 0.5:
        return [nonsense(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {str(n): nonsense(draw, depth + 1) for n in range(draw.randint(0, 3))}


FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "n", "stop", "stream", "stream_options", "logprobs", "echo", "best_of", "suffix"),
    *("logit_bias", "user", "top_logprobs", "max_completion_tokens", "ignore_eos", "other"),
    *("presence_penalty", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words"),
    *("allowed_token_ids", "truncate_prompt_tokens", "prompt_logprobs", "request_id"),
    *("chat_template_kwargs", "documents", "continue_final_message", "add_special_tokens"),
)


def malformed(draw: random.Random) -> bytes:
    """Return a body that is mostly right, or random bytes, or a part of a right one."""
    body: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    body.pop(draw.choice(["prompt", "messages"]))
    body["max_tokens"] = draw.choice([1, 2])
    for field in draw.sample(FIELDS, draw.randint(0, 3)):
        body[field] = nonsense(draw)
    content = json.dumps(body).encode()
    if draw.random() < 0.2:
        content = content[: draw.randint(0, len(content))]
    if draw.random() < 0.2:
        at = draw.randint(0, len(content))
        content = content[:at] + draw.randbytes(draw.randint(1, 9)) + content[at:]
    return content


@pytest.mark.parametrize("num", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_refused_not_suffered(client: Client, num: int) -> None:
    draw, statuses = random.Random(num), Counter[int]()
    connection = client.connect()
    for _ in range(num):
        path = draw.choice(["/v1/completions", "/v1/chat/completions"])
        connection.request("POST", path, malformed(draw), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        statuses[answer.status] += 1
    connection.close()
    assert set(statuses) <= {200, 400, 404}, statuses
    assert statuses[200] and statuses[400]
    assert client.ask("/health") == (200, {"status": "ok"})
    client.wait_until_idle()


def test_broken_http_ends_no_server(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    length = HEAD + b"Content-Length: "
    for content in (b"\0\0\0", length + b"x\r\n\r\n", b"G", length + b"9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
            raw.sendall(content)  # the last one leaves amid its body
            time.sleep(0.1)
    for _ in range(10):
        assert client.ask("/health")[0] == 200
    logger.removeHandler(caplog.handler)
    assert not caplog.text


def test_a_body_that_does_not_come_or_has_no_one_end_is_not_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.infer.app.BODY_TIMEOUT_S", 0.1)
    for rest, status in (
        (b"Content-Length: 100\r\n\r\n{", b"408"),
        (b"Content-Length: 9999999\r\n\r\n" + b" " * 5001, b"413"),
        (
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'f\r\n{"prompt": "a"}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n',
            b"400",
        ),
        (b"Transfer-Encoding: chunked\r\n\r\n" + b"3e8\r\n%b\r\n" % (b" " * 1000) * 6, b"413"),
    ):
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
            raw.sendall(HEAD + rest)
            answer = b"".join(iter(lambda: raw.recv(65536), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 " + status), answer


def test_a_stop_text_of_several_tokens_ends_a_stream_before_it(client: Client) -> None:
    body = {"prompt": "Once", "seed": 5, "max_tokens": 40, "ignore_eos": True}
    whole = client.ask("/v1/completions", body)[1]["choices"][0]["text"]
    body |= {"stop": [whole[9:14], "never"], "stream": True}
    pieces = [event["choices"][0] for event in client.events("/v1/completions", body)]
    assert "".join(piece["text"] for piece in pieces) == whole[: whole.index(whole[9:14])]
    assert pieces[-1]["finish_reason"] == "stop" and len(pieces) > 2


class Panic(BaseException):
    """What the libraries of Rust raise where they panic."""


@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError("a kernel has failed"), "a kernel has failed"), (Panic(), "Panic")],
)
def test_an_engine_that_fails_answers_all_who_wait(
    folder: Path, caplog: pytest.LogCaptureFixture, error: BaseException, why: str
) -> None:
    with serving(folder) as client:

        def fails(step: Any) -> Any:
            raise error

        client.engine._logits = fails  # pyright: ignore[reportPrivateUsage]
        status, answer = client.ask("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["message"]) == (503, why)
        assert client.ask("/health")[0] == 503
        assert client.ask("/v1/completions", {"prompt": "a"})[0] == 503
        assert "the engine has ended" in caplog.text and type(error).__name__ in caplog.text


def test_requests_that_outlast_a_closing_server_get_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.infer.app.BODY_TIMEOUT_S", 1e6)
    with serving(folder) as client:
        thread, may_step = client.gateway.thread, threading.Event()
        own = client.engine._logits  # pyright: ignore[reportPrivateUsage]
        client.engine._logits = lambda step: may_step.wait(60) and own(step)  # pyright: ignore[reportPrivateUsage]
        found: list[tuple[int, Any]] = []

        def ask(is_stream: bool) -> None:
            body = {"prompt": "a", "stream": is_stream}
            found.append(client.ask("/v1/completions", body))

        asking = [threading.Thread(target=ask, args=(is_stream,)) for is_stream in (True, False)]
        for each in asking:
            each.start()
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as half:
            half.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            while len(thread._open) < 2 or not client.gateway._bodies:  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.01)
            client.gateway.close()
            assert half.recv(65536).startswith(b"HTTP/1.1 503")
        for each in asking:
            each.join(60)
        may_step.set()
        ask(False)
        assert sorted(status for status, _ in found) == [200, 503, 503]
        for status, answer in found:
            error = json.loads(answer.split("data: ")[-1]) if status == 200 else answer
            assert error["error"]["message"] == "the server is shutting down"
            assert status == 503 or "[DONE]" not in answer
