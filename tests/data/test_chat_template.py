"""Where a chat template has its answers, and which templates cannot say it."""

from __future__ import annotations

import pytest
from chat_families import template_of

from phalanx.data.chat_template import ChatTemplate
from phalanx.errors import ConfigError

MESSAGES = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "no"},
]
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def answers(source: str, turns: tuple[int, ...] = (1, 3)) -> list[str]:
    text, spans = ChatTemplate(source, {}).render_answers(MESSAGES, None, turns)
    return [text[start:end] for start, end in spans]


def test_answers_begin_after_the_generation_prompt_and_end_with_the_turn() -> None:
    assert answers(template_of("chatml", has_marks=False)) == [
        "<think>\nhm\n</think>\n\nyes<|im_end|>\n",
        "no<|im_end|>\n",
    ]


def test_a_turn_that_later_turns_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"renders turn 2, of assistant, otherwise once turns"):
        answers(template_of("qwen3", has_marks=False))
    assert answers(template_of("qwen3", has_marks=False), (3,)) == ["no<|im_end|>\n"]


def test_a_turn_that_the_generation_prompt_does_not_begin_is_refused() -> None:
    prompt = "{{ '[assistant]<think>\n' if add_generation_prompt }}"
    with pytest.raises(ConfigError, match=r"^turn 4, of assistant, does not begin as"):
        answers(TURNS + prompt, (3,))


def test_marks_say_what_is_trained() -> None:
    marked = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{%- generation -%}"
        " {{ m.content }}{% endgeneration %};{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert answers(marked) == [MESSAGES[1]["content"], "no"]
    assert answers(marked, (3,)) == ["no"]
    with pytest.raises(ConfigError, match="changes text inside of"):
        answers("{% set all %}{% generation %} a {% endgeneration %}{% endset %}{{ all | upper }}")
    with pytest.raises(ConfigError, match="but marks nothing"):
        answers(TURNS + "{% if false %}{% generation %}{% endgeneration %}{% endif %}")
