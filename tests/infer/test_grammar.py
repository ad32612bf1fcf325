"""Texts that a schema, a regex or a grammar constrains, over a server with a random model."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_model import CONFIG, Client, long_published, serving

from phalanx.infer.assembly import engine_of, with_engine
from phalanx.infer.engine import Engine
from phalanx.infer.grammar import Grammars
from phalanx.infer.options import EngineConfig, Sampling
from phalanx.infer.sampler import choose
from phalanx.infer.served import Served, open_served

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
        ({"structured_outputs": {"json": POINT}}, ""),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
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
    assert status == 503 and "the grammar cannot continue: NoExt" in answer["error"]["message"]


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


def write_constrained(out: Path, served: Served, engine: Engine) -> None:
    """Generate on the first rank, and write the texts to a file."""
    grammar = Grammars(served.tokenizer, served.end_ids).compile("a", "json", json.dumps(POINT))
    for seed in range(4):
        sampling = Sampling(max_tokens=300, seed=seed)
        engine.queue(engine.prepare([1, 2, 3], sampling, grammar=grammar))
    completions = list(engine.scheduler.waiting)
    while engine.scheduler.has_work:
        engine.step()
    out.write_text(json.dumps([each.text for each in completions]))


@pytest.mark.slow
def test_two_ranks_generate_the_constrained_texts_of_one(folder: Path, tmp_path: Path) -> None:
    found: list[list[str]] = []
    for strategy in ("tp1", "tp2"):
        config = EngineConfig(
            strategy=strategy, precision="float64", cache_tokens=2048, speculative="ngram"
        )
        with_engine(folder, config, functools.partial(write_constrained, tmp_path / strategy))
        found.append(json.loads((tmp_path / strategy).read_text()))
    assert found[0] == found[1]
    assert {json.loads(text)["y"] for text in found[0]} <= {"a", "b"}


@pytest.mark.parametrize(("draft", "num"), [("ab", 2), ("abc", 2), ("ac", 2), ("c", 1), ("", 1)])
def test_masks_of_a_draft_leave_the_state(folder: Path, draft: str, num: int) -> None:
    tokenizer = open_served(folder).tokenizer
    matcher = Grammars(tokenizer, [96]).compile("guided_regex", "regex", "ab")
    masks = matcher.masks([token for token in tokenizer.encode(draft).ids if token < 95])
    legal = [[tokenizer.id_to_token(id) for id in mask.nonzero()[:, 0].tolist()] for mask in masks]
    assert legal[:2] == [["a"], ["b"]][:num]
    assert [matcher.take(token) for token in tokenizer.encode("ab").ids[-2:]] == [False, True]
    assert matcher.failure is None


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of keywords that llguidance supports, nested up to three levels."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf", "$ref", "prefixItems"]
    kind = "object" if depth == 0 else draw.choice(kinds)
    if kind == "object":
        names = draw.sample(["a", "b c", "name", "id_1", 'q"', "x" * 9], draw.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(draw, depth + 1) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": draw.choice([False, False, {"type": "boolean"}]),
        }
    least = draw.randint(-5, 5)
    most = least + draw.randint(1, 400)
    few = {"minItems": draw.randint(0, 2), "maxItems": draw.randint(2, 4)}
    sizes = {"minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 9)}
    return {
        "string": lambda: {"type": "string", **draw.choice([{}, sizes])},
        "integer": lambda: {"type": "integer", "minimum": least, "maximum": most},
        "number": lambda: {"type": "number", "exclusiveMinimum": least, "maximum": most},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
        "enum": lambda: {"enum": draw.sample(["x", 3, None, True, 1.5, ["y"], {"z": "\\"}], 3)},
        "const": lambda: {"const": draw.choice(["k", 7, [1, {"a": None}], 'line"'])},
        "pattern": lambda: {
            "type": "string",
            "pattern": draw.choice(["^[a-c]{2,5}$", "^x+[0-9]$"]),
        },
        "format": lambda: {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
        "array": lambda: {"type": "array", "items": random_schema(draw, depth + 1), **few},
        "prefixItems": lambda: {
            "type": "array",
            "prefixItems": [random_schema(draw, depth + 1) for _ in range(2)],
            "items": False,
            "minItems": draw.randint(0, 2),
        },
        "anyOf": lambda: {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]},
        "$ref": lambda: {"$ref": "#/$defs/t"},
    }[kind]()


@pytest.mark.slow
def test_texts_of_200_random_schemas_are_valid(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    draw = random.Random(0)
    tree = {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}, "v": {"type": "integer"}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip
    schemas = [{**random_schema(draw), "$defs": {"t": tree}} for _ in range(200)]
    served = open_served(folder)
    config = {**CONFIG, "cache_tokens": 8192, "slots": 16, "speculative": "ngram"}
    engine, grammars = engine_of(served, EngineConfig(**config)), Grammars(served.tokenizer, [96])
    completions = [
        engine.prepare(
            [1, 2, 3],
            Sampling(max_tokens=3000, seed=seed),
            grammar=grammars.compile("guided_json", "json", json.dumps(schema)),
        )
        for seed, schema in enumerate(schemas)
    ]
    for each in completions:
        engine.queue(each)
    while engine.scheduler.has_work:
        engine.step()
    for (each,), schema in zip(completions, schemas, strict=True):
        assert each.finish_reason == "stop", (schema, each.text)  # none is cut at max_tokens
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
            json.loads(each.text)
        )
