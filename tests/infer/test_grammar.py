"""Texts that a schema, a regex or a grammar constrains, over a server with a random model."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_model import CONFIG, Client, long_published, serving

from phalanx.infer.assembly import engine_of
from phalanx.infer.grammar import Grammars
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.sampler import choose
from phalanx.infer.served import open_served

pytest.importorskip("llguidance", reason="llguidance is not installed")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return long_published(tmp_path_factory.mktemp("served"), template)


@pytest.fixture(name="client", scope="module")
def _client(folder: Path) -> Generator[Client]:
    with serving(folder, cache_tokens=8192, speculative="ngram") as client:
        yield client


def test_texts_match_what_constrains_them(client: Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
    fields: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["yes", 'no "\\']}, r'yes|no "\\'),
        ({"guided_regex": "[0-9]{3}-[a-f]+"}, "[0-9]{3}-[a-f]+"),
        ({"guided_grammar": 'root ::= "ab" | "c" root'}, "c*ab"),
        ({"structured_outputs": {"choice": ["p"]}}, "p"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": schema}, ""),
        ({"guided_json": json.dumps(POINT)}, ""),
    ]
    for seed in (3, 4):
        for field, pattern in fields:
            body = {**CHAT, **field, "temperature": 1, "seed": seed}
            status, answer = client.ask("/v1/chat/completions", body)
            (choice,) = answer["choices"]
            text = choice["message"]["content"]
            assert status == 200 and choice["finish_reason"] == "stop", (field, text)
            if pattern:
                assert re.fullmatch(pattern, text, re.DOTALL)
            else:
                value = json.loads(text)
                assert value["x"] >= 0 and value["y"] in ("a", "b") and len(value) == 2


def test_a_vocabulary_that_cannot_spell_the_rest_is_an_error(client: Client) -> None:
    status, answer = client.ask("/v1/chat/completions", {**CHAT, "guided_choice": ["a \u2603"]})
    assert status == 503 and "the grammar cannot go on: NoExt" in answer["error"]["message"]


def test_a_broken_constraint_is_refused_with_the_reason(client: Client) -> None:
    for field, why in (
        ({"guided_json": {"type": "objct"}}, "Invalid type: objct"),
        ({"guided_json": {"uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"guided_json": "{"}, "EOF"),
        ({"guided_regex": "(ab"}, "unclosed group"),
        ({"guided_grammar": "root ::= x"}, "Rule 'x' not found"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice constrain the text"),
    ):
        status, answer = client.ask("/v1/chat/completions", {**CHAT, **field})
        assert status == 400 and why in answer["error"]["message"], answer
        assert answer["error"]["param"] == next(iter(field))


def test_without_llguidance_a_constraint_is_refused_by_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'phalanx-train\[serve\]'"):
        Grammars(open_served(folder).tokenizer, ()).compile("guided_regex", "regex", "a")


def test_scores_are_of_the_model_without_a_mask() -> None:
    logits, sampling = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2), Sampling(temperature=0, logprobs=1)
    masks = {0: torch.tensor([False, False, True])}
    tokens, scores = choose(logits, [sampling] * 2, [0, 0], None, masks)
    assert tokens == [2, 0] and scores[0] is not None and scores[0].top[0][0] == 0
    assert scores[0].logprob == pytest.approx(float(logits[0].double().log_softmax(-1)[2]))


def test_rows_without_a_grammar_and_preemption_change_nothing(folder: Path) -> None:
    served = open_served(folder)
    grammar = Grammars(served.tokenizer, served.end_ids).compile(
        "guided_regex", "regex", "[a-m]{20,24}[0-9]"
    )
    found: list[list[list[int]]] = []
    for options in (
        {"slots": 2},
        {"slots": 6, "cache_tokens": 96, "speculative": "ngram,3,2,1"},
    ):
        config = EngineConfig(**{**CONFIG, "precision": "float64", "cache_tokens": 2048, **options})
        engine = engine_of(open_served(folder), config)
        completions = [
            engine.prepare(
                [1, 2, 3], Sampling(max_tokens=32, seed=n), grammar=grammar if n % 2 else None
            )
            for n in range(6)
        ]
        for each in completions:
            engine.queue(each)
        while engine.scheduler.has_work:
            engine.step()
        if "cache_tokens" in options:
            assert engine.scheduler.num_preemptions > 0
        found.append([each[0].new_tokens for each in completions])
        texts = [each[0].text for each in completions]
        assert all(re.fullmatch("[a-m]{20,24}[0-9]", text) for text in texts[1::2])
    assert found[0] == found[1]
