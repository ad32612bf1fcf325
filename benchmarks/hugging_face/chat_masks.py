"""Compare the answers that phalanx finds in plain chat templates with TRL's marks.

For each template in TRL's folder with a second version for training, which has marks around the
answers, count the conversations whose trained characters are equal, different or refused.

    python benchmarks/hugging_face/chat_masks.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import trl

from phalanx.data.chat_template import ChatTemplate
from phalanx.errors import ConfigError

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


def turn(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


KINDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one": (turn("1 + 1?", "2"), None),
    "three": ([*turn("1 + 1?", "2"), *turn("And\n2?", " 4\n"), *turn("a", "b")], None),
    "system": ([SYSTEM, *turn("1 + 1?", "2"), *turn("2 + 2?", "4")], None),
    "thought": ([*turn("a", "<think>\nx\n</think>\n\nb"), *turn("c", "d")], None),
    "tools": (
        [
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": FUNCTION}],
            },
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        [{"type": "function", "function": TOOL}],
    ),
}


def trained(source: str, kind: str) -> tuple[str, set[int]]:
    """Return the text of a conversation, and the places of its trained characters."""
    messages, tools = KINDS[kind]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = ChatTemplate(source, NAMES).render_answers(messages, tools, turns)
    return text, {place for start, end in spans for place in range(start, end)}


def outcome(plain: str, marked: str, kind: str) -> str:
    try:
        theirs = trained(marked, kind)
    except ConfigError:
        return "no text"  # the template itself raises, as for a role that it lacks
    try:
        ours = trained(plain, kind)
    except ConfigError as error:
        is_turn = "turn" in str(error)
        return "refused" if is_turn else "no text"
    if ours == theirs:
        return "equal"
    if ours[0] != theirs[0]:
        return "other text"
    inside = ours[1] < theirs[1]
    return "prompt marked" if inside else "different"


def main() -> None:
    folder, totals = Path(trl.__file__).parent / "chat_templates", Counter[str]()
    print(f"trl {trl.__version__}")
    print(f"{'template':28}" + "".join(f"{kind:15}" for kind in KINDS))
    for file in sorted(folder.glob("*_training.jinja")):
        name = file.name.removesuffix("_training.jinja")
        plain = folder / f"{name}.jinja"
        if not plain.exists():
            continue
        row = [outcome(plain.read_text(), file.read_text(), kind) for kind in KINDS]
        totals.update(row)
        print(f"{name:28}" + "".join(f"{each:15}" for each in row).rstrip())
    print(", ".join(f"{count} {name}" for name, count in totals.most_common()))


if __name__ == "__main__":
    main()
