"""A chat template makes the text that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served_model import published
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from phalanx.errors import ConfigError
from phalanx.infer.chat import Chat
from phalanx.infer.protocol import ChatBody
from phalanx.infer.served import open_served

MESSAGES = [
    {"role": "system", "content": 'Say "<hi> & caf" \u00e9'},
    {"role": "user", "content": "a"},
    {"role": "user", "content": "stop"},
    {"role": "user", "content": "never read"},
]
TEMPLATE = (
    "{{ bos_token }}{% if tools is not none or documents is not none %}tools{% endif %}"
    "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}"
    "{% if loop.first %}{{ strftime_now('%Y') }}{{ m | tojson }}{% continue %}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]],
)
def test_a_template_makes_what_transformers_makes(tmp_path: Path, template: Any) -> None:
    folder = published(tmp_path, tokenizer_config={"chat_template": template, "bos_token": "<s>"})
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected: Any = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    served = open_served(folder)
    found = Chat(served).encode(ChatBody.model_validate({"messages": MESSAGES}))
    assert "never" not in expected and expected.endswith("[assistant]")
    assert found == served.tokenizer.encode(expected, add_special_tokens=False).ids or (
        found == theirs(expected, add_special_tokens=False)["input_ids"]
    )


TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "s \u00e9"},
    {"name": "bob", "content": 'hi <s> "<&>"', "role": "user"},
    {"role": "assistant", "content": "yo", "reasoning_content": "hm", "tool_calls": None},
    {"role": "tool", "content": "4", "tool_call_id": "call1"},
]
WORDS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
)
JSON = (
    "{% for m in messages %}{{ m.content | tojson }}"
    "{{ [1, m.name or ''] | tojson(separators=(',', ':')) }}"
    "{{ {'b': 1, 'a': m.content} | tojson(ensure_ascii=True, sort_keys=True, indent=1) }}"
    "{% endfor %}"
)
TRAINING = (
    "{% set x = 'a' %}{% for m in messages %}\n  {% if m.role == 'assistant' -%}\n"
    "{% generation %}{% set x = 'b' %}{{ m.content }}{{ x }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ m.role ~ (m.name or '') ~ (m.reasoning_content is defined) ~ m.content }}"
    "{% endif %}{{ x }}{% endfor %}{{ image_token }}"
)
ENDS: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>"},
}


@pytest.mark.parametrize("template", [WORDS, JSON, TRAINING])
@pytest.mark.parametrize(
    "companions",
    [
        {"tokenizer_config": {}, "special_tokens_map": ENDS},
        {"tokenizer_config": {"bos_token": "a", "eos_token": "b"}, "special_tokens_map": ENDS},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "[user]"}, **CONFIG}},
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"64": {"content": "`", "special": True}},
                "eos_token": "`",
            },
            "special_tokens_map": ENDS,
        },
        {"tokenizer_config": {"additional_special_tokens": ["hi"]}, "added_tokens": {"yo": 97}},
    ],
)
def test_tokens_of_a_chat_are_those_of_transformers(
    tmp_path: Path, template: str, companions: dict[str, Any]
) -> None:
    config = {**companions["tokenizer_config"], "chat_template": template}
    folder = published(tmp_path, **{**companions, "tokenizer_config": config})
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected: Any = theirs.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    chat = Chat(open_served(folder))
    body = ChatBody.model_validate({"messages": TURNS})
    if max(expected) < 97:
        assert chat.encode(body) == expected
    else:  # the model has no row for a token that the files add
        with pytest.raises(ConfigError, match=f"the tokenizer returns token {max(expected)}"):
            chat.encode(body)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ [1, 2].index(3) }}", "3 is not in list"),
        ("{{ ''.join(messages) }}", "expected str instance"),
        ("{{ '%c' % 55296 }}", "surrogates|str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_whatever_a_template_raises_refuses_the_messages(
    tmp_path: Path, template: str, why: str
) -> None:
    chat = Chat(open_served(published(tmp_path, tokenizer_config={"chat_template": template})))
    with pytest.raises(ConfigError, match=f"chat template refuses these messages: .*({why})"):
        chat.encode(ChatBody.model_validate({"messages": TURNS[1:2]}))


def test_a_text_that_the_tokenizer_has_no_token_for_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    (folder / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0})).to_str())
    with pytest.raises(ConfigError, match=r"the tokenizer cannot encode the prompt: .*UNK"):
        open_served(folder).encode("b")


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = published(tmp_path, tokenizer_config={"chat_template": named})
    with pytest.raises(ConfigError, match="are rag, tool_use; expected one named default"):
        Chat(open_served(folder))
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == named
