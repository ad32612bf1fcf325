"""Rows of chats in the layouts of data sets are recognised, read, and refused by file and line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.data.chat_rows import conversation_of, layout_of
from phalanx.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"name": "f", "arguments": {"x": 1}}
CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("layout", "row", "messages", "turns"),
    [
        ("messages", {"messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER], (1,)),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "name": None}]},
            [QUESTION, ANSWER, QUESTION, ANSWER],
            (3,),
        ),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {**ANSWER, "tool_calls": []},
                ]
            },
            [QUESTION, ANSWER],
            (1,),
        ),
        ("prompt-completion", {"prompt": "q", "completion": "a"}, [QUESTION, ANSWER], (1,)),
        (
            "prompt-completion",
            {"system": "s", "prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
            [SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER],
            (4,),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [SYSTEM, QUESTION, {**CALLS, "content": ""}, {"role": "tool", "content": "1"}, ANSWER],
            (2, 4),
        ),
        ("sharegpt", {"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER], (1,)),
        (
            "alpaca",
            {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]},
            [QUESTION, ANSWER, {"role": "user", "content": "q\ni"}, ANSWER],
            (1, 3),
        ),
    ],
)
def test_a_layout_is_recognised(
    layout: str, row: dict[str, Any], messages: list[dict[str, Any]], turns: tuple[int, ...]
) -> None:
    assert layout_of(row) == layout
    found = conversation_of(row, layout, "file:1", "all")
    assert (found.messages, found.turns) == (messages, turns)
    assert conversation_of(row, layout, "file:1", "last").turns == turns[-1:]


def test_tools_may_be_text() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    row = {"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}]}
    for given in (tools, json.dumps(tools)):
        found = conversation_of({**row, "tools": given}, "messages", "file:1", "all")
        assert found.tools == tools
        assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_text_is_no_chat() -> None:
    assert layout_of({"text": "t", "messages": []}) is layout_of({"prompt": "q"}) is None


@pytest.mark.parametrize(
    ("layout", "row", "words"),
    [
        ("messages", {"prompt": "q", "completion": "a"}, "is of the layout prompt-completion"),
        ("messages", {"text": "t"}, "is of the layout text"),
        ("messages", {"message": []}, r"has no 'messages' \(did you mean 'message'"),
        ("messages", {"messages": [QUESTION]}, "no message is of the assistant"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": [{"role": "user"}, ANSWER]}, "turn 1: content is missing"),
        ("messages", {"messages": [QUESTION, {"content": "a"}]}, "turn 2: role is null"),
        ("messages", {"messages": [QUESTION, "a"]}, 'turn 2 is "a"; expected an object'),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "turn 1: content has a part without text",
        ),
        ("sharegpt", {"conversations": [{"from": "humn", "value": "q"}]}, "did you mean 'human'"),
        ("messages", {"messages": [QUESTION, ANSWER], "tools": "{"}, "tools is .*not JSON"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(
    layout: str, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=f"^chats.jsonl:7.*{words}"):
        conversation_of(row, layout, "chats.jsonl:7", "all")
