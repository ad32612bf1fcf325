"""Chat templates in the formats of published families, and conversations for them.

`[[` and `]]` stand where a template for training has `{% generation %}` and its end.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

_FIRST_USER = (  # of families without a role system: its text begins the first question
    "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
)
_THOUGHT = "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"

FAMILIES: dict[str, str] = {
    "llama3": (
        "{% for m in messages %}{{ bos_token if loop.first }}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}[[{{ m.content | trim + '<|eot_id|>' }}]]"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "chatml": (
        "{% if tools %}{{ '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}"
        "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\n' }}[[{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}]]{% elif m.role == 'tool' %}"
        "{% if not loop.previtem or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}"
        "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "mistral": (
        f"{_FIRST_USER}{{{{ bos_token }}}}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (ns.system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}[[{{ ' ' + m.content + eos_token }}]]{% endif %}{% endfor %}"
    ),
    "gemma": (
        f"{_FIRST_USER}{{{{ bos_token }}}}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<start_of_turn>user\n' + "
        "(ns.system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}"
        "{% else %}{{ '<start_of_turn>model\n' }}[[{{ m.content | trim + '<end_of_turn>\n' }}]]"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}"
        "{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' }}[[{{ m.content + '<|end|>\n' }}]]"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    ),
    "zephyr": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' }}[[{{ m.content + eos_token + '\n' }}]]"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endif %}"
        "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}{% else %}"
        "{{ '<\uff5cAssistant\uff5c>' }}"
        "[[{{ m.content + eos_token }}]]{% endif %}{% endfor %}"
        "{{ '<\uff5cAssistant\uff5c>' if add_generation_prompt }}"
    ),
    "granite": (
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}"
        "{% if m.role == 'assistant' %}[[{{ m.content + '<|end_of_text|>\n' }}]]"
        "{% else %}{{ m.content + '<|end_of_text|>\n' }}{% endif %}{% endfor %}"
        "{{ '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}"
    ),
    "qwen3": (
        "{% set ns = namespace(last=messages | selectattr('role', 'eq', 'user') | list | last) %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        f"{_THOUGHT}[[{{{{ (m.content if loop.last else text) + '<|im_end|>\n' }}}}]]"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    ),
}

SPECIAL = [
    "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>",
    "<|end|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<|start_of_role|>", "<|end_of_role|>",    "<|end_of_text|>",
]  # fmt: skip


def template_of(family: str, *, has_marks: bool) -> str:
    """Return the Jinja source of a family, with or without `{% generation %}`."""
    start, end = ("{% generation %}", "{% endgeneration %}") if has_marks else ("", "")
    return FAMILIES[family].replace("[[", start).replace("]]", end)


def conversations(number: int, *, has_tools: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of the layout messages, of one to three questions, some awkward."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    texts = [
        "Hello there", " leading and trailing ", "a\n\nb\n", "naïve café 你好", "🙂🙃", "x" * 40,
        "def f(x):\n    return x\n", "1 + 1 = 2.", "It's <fine>", "\n", "[/INST] is no token here",
    ]  # fmt: skip
    for row in range(number):
        messages: list[dict[str, Any]] = []
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": draw.choice(texts)})
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": draw.choice(texts)})
            messages.append({"role": "assistant", "content": draw.choice(texts)})
        if has_tools and row % 3 == 0:
            function = {"name": "add", "arguments": {"a": row, "b": 2}}
            call = {"type": "function", "function": function}
            messages[-1:] = [
                {"role": "assistant", "content": "", "tool_calls": [call, call]},
                {"role": "tool", "content": str(row + 2)},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": draw.choice(texts)},
            ]
        rows.append({"messages": messages})
        if has_tools:
            rows[-1]["tools"] = [{"type": "function", "function": {"name": "add"}}]
    return rows


def merging_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with merges, also over the ends of turns, and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = conversations(60, has_tools=True, seed=1)
    tokenizer.train_from_iterator((json.dumps(row, ensure_ascii=False) for row in rows), trainer)
    return tokenizer
