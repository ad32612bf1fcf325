"""Rows of chats in the layouts that data sets have, and the conversations in them.

messages            {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
prompt-completion   {"prompt": "..." or [message, ...], "completion": "..." or [message, ...]}
sharegpt            {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}
alpaca              {"instruction": "...", "input": "...", "output": "...", "history": [[q, a]]}
preference          {"prompt": ..., "chosen": ..., "rejected": ...} as in prompt-completion; or
                    chosen and rejected alone, conversations that begin alike, with the prompt
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from phalanx.errors import DataError, nearest

PREFERENCE: Final = "preference"
"""The layout of a chosen and a rejected conversation in each row."""

LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    PREFERENCE: ("chosen", "rejected"),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
"""Layout -> the fields by which a row is recognised, in this order."""

_ROLES: Final = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Values of `from` in the layout sharegpt -> role of the message."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a row.

    Attributes:
        messages: messages with `role` and `content`, and fields such as `tool_calls`; no field is
            None.
        tools: JSON schemas of the functions that the model may call; None without tools.
        turns: indices of the messages of the assistant to train on, at least one.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    turns: tuple[int, ...]


def layout_of(row: Mapping[str, Any]) -> str | None:
    """Return the layout of a row, a key of LAYOUTS; None if the row is no chat."""
    if "text" in row:
        return None
    kinds = (
        name for name, fields in LAYOUTS.items() if all(row.get(f) is not None for f in fields)
    )
    return next(kinds, None)


def conversation_of(
    row: Mapping[str, Any], layout: str, where: str, turns: str, *, is_rejected: bool = False
) -> Conversation:
    """Return the conversation of a row, or one of a row of preferences.

    Args:
        row: the row.
        layout: the layout of the rows before.
        where: file and line, for messages.
        turns: "all" to train on every answer, "last" on the last one.
        is_rejected: whether the rejected conversation of a preference is asked for.

    Raises:
        DataError: the row has another layout, or is not valid.
    """
    if (own := layout_of(row)) != layout:
        is_known = own is not None or "text" in row
        fields = LAYOUTS[layout]
        missing = [name for name in fields if row.get(name) is None]
        raise DataError(
            f"{where}: the rows before are of the layout {layout}, but this one "
            + (f"is of the layout {own or 'text'}" if is_known else f"has no {missing[0]!r}")
            + (nearest(missing[0], row) if missing and not is_known else "")
            + "; expected one layout in all files"
        )
    first = 0  # index of the first message that may be trained
    match layout:
        case "messages":
            messages = _messages(row["messages"], f"{where}: messages")
        case "prompt-completion":
            messages = _side(row["prompt"], "user", f"{where}: prompt")
            first = len(messages)
            messages += _side(row["completion"], "assistant", f"{where}: completion")
        case "preference":
            sides = [_side(row[name], "assistant", f"{where}: {name}") for name in LAYOUTS[layout]]
            if row.get("prompt") is not None and sides[0][0]["role"] == "assistant":
                prompt = _side(row["prompt"], "user", f"{where}: prompt")
            else:  # conversations as a whole, of which the first message is a question
                pairs = itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(*sides, strict=False)
                )
                prompt = [message for message, _ in pairs]
                sides = [side[len(prompt) :] for side in sides]
            if not prompt:
                raise DataError(f"{where}: chosen and rejected begin differently; give the prompt")
            first, messages = len(prompt), prompt + sides[is_rejected]
        case "sharegpt":
            messages = _messages(row["conversations"], f"{where}: conversations")
        case _:
            pairs = _list(row.get("history") or [], f"{where}: history")
            messages: list[dict[str, Any]] = []
            for pair in pairs:
                if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
                    raise DataError(f"{where}: history has {_brief(pair)}; expected [text, answer]")
                messages += _side(pair[0], "user", f"{where}: history")
                messages += _side(pair[1], "assistant", f"{where}: history")
            question: list[str] = []
            for name in ("instruction", "input"):
                texts = _side(row.get(name) or "", "user", f"{where}: {name}")
                question += [text["content"] for text in texts if text["content"]]
            messages += _side("\n".join(question), "user", where)
            messages += _side(row["output"], "assistant", f"{where}: output")
    if row.get("system"):
        messages = [*_side(row["system"], "system", f"{where}: system"), *messages]
        first += 1 if first else 0
    answers = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= first and message.get("weight") != 0
    ]
    if not answers:
        raise DataError(f"{where}: no message is of the assistant, so nothing is trained on")
    messages = [{k: v for k, v in each.items() if k != "weight"} for each in messages]
    chosen = answers if turns == "all" else answers[-1:]
    return Conversation(messages, _tools(row.get("tools"), where), tuple(chosen))


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of messages, which have role and content, or from and value."""
    messages: list[dict[str, Any]] = []
    for number, each in enumerate(_list(value, where), start=1):
        name = f"{where}, turn {number}"
        if not isinstance(each, dict):
            raise DataError(f"{name} is {_brief(each)}; expected an object")
        message = cast("dict[str, Any]", _without_none(each))
        if "from" in message:
            message = _of_sharegpt(message, name)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise DataError(f"{name}: role is {_brief(role)}; expected a string such as user")
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            texts: list[Any] = [
                part.get("text") if isinstance(part, dict) else part for part in parts
            ]
            if not all(isinstance(text, str) for text in texts):
                raise DataError(f"{name}: content has a part without text; expected text alone")
            message["content"] = "".join(map(str, texts))
        elif content is None and role != "assistant":
            raise DataError(f"{name}: content is missing; expected a string")
        elif not isinstance(content, str | None):
            raise DataError(f"{name}: content is {_brief(content)}; expected a string")
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function.get("arguments"), str):  # templates expect the object
                function["arguments"] = _json(function["arguments"], f"{name}: arguments")
        if not message.get("tool_calls", True):
            del message["tool_calls"]  # templates ask only whether it is there
        messages.append(message)
    if not messages:
        raise DataError(f"{where} is empty; expected at least one question and one answer")
    return messages


def _of_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, text = _ROLES.get(str(message["from"])), message.get("value")
    if role is None:
        hint = nearest(str(message["from"]), _ROLES)
        raise DataError(
            f"{where}: from is {_brief(message['from'])}{hint}; expected one of {', '.join(_ROLES)}"
        )
    more = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role != "function_call":
        return {"role": role, "content": text, **more}
    call = _json(str(text), f"{where}: value")
    calls = cast("list[Any]", call) if isinstance(call, list) else [call]
    calls = [{"type": "function", "function": each} for each in calls]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _side(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Return messages that are given as such, or as one text of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, where)


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, which may be JSON text."""
    if isinstance(value, str):
        value = _json(value, f"{where}: tools") if value.strip() else None
    if not value:
        return None
    tools = _list(value, f"{where}: tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools has {_brief(tools)}; expected a list of objects")
    return tools


def _without_none(value: Any) -> Any:
    """Return JSON without the fields of None, which parquet adds to every row."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _without_none(each) for key, each in items if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in cast("list[Any]", value)]
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} is {_brief(value)}; expected a list")
    return cast("list[Any]", value)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is {_brief(text)}, which is not JSON: {error}") from error


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
