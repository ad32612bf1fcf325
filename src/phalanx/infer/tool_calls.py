r"""Calls of tools in the text of a chat: parse them as they arrive, or constrain a text to them.

A model writes calls in the format of its family, which its chat template has taught it:

    hermes        <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>      also Qwen
    llama3_json   {"name": "f", "parameters": {"x": 1}}; {"name": ...                 the whole text
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]
                  [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]...              later ones, with [ARGS]

The names of the formats are vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, Final, cast

from tokenizers import Tokenizer

from phalanx.infer.grammar import WHITESPACE
from phalanx.infer.protocol import Function


@dataclass(frozen=True)
class Family:
    """Format of calls.

    Attributes:
        begin, end: texts around calls; an empty `end` if calls last until the end.
        arguments: key of the arguments of a call.
        between: text between two calls.
        sign: text that a chat template has if the model writes this format.
        is_bare: whether a text may start with a call, without `begin`.
    """

    begin: str
    end: str
    arguments: str
    between: str
    sign: str
    is_bare: bool = False


HERMES = Family("<tool_call>", "</tool_call>", "arguments", "\n", "<tool_call>")
MISTRAL = Family("[TOOL_CALLS]", "", "arguments", ", ", "[TOOL_CALLS]")
LLAMA = Family("<|python_tag|>", "", "parameters", "; ", '"parameters"', is_bare=True)
FAMILIES: Final = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA}
"""Value of the setting `tool_call_parser` -> format."""


def family_of(template: str) -> Family | None:
    """Return the first format whose sign is in a chat template; None if it renders no tools."""
    families = FAMILIES.values() if re.search(r"\btools\b", template) else ()
    return next((each for each in families if each.sign in template), None)


HEAD: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning of a call, after which its arguments are streamed."""

NAMED: Final = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
"""The beginning of a call in Mistral's later format."""

Deltas = Generator[dict[str, Any] | None]
"""Deltas of a choice; None where more text is needed."""


@dataclass
class _Extent:
    """Finds the end of a JSON object whose text arrives in parts."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False

    def end(self, text: str) -> int | None:
        """Return the length of the part of `text` that is in the object; None if all is."""
        for number, letter in enumerate(text):
            if self.in_string:
                if self.is_escaped or letter == "\\":
                    self.is_escaped = not self.is_escaped
                elif letter == '"':
                    self.in_string = False
            elif letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return number + 1
        return None


class CallParser:
    """Splits the text of one choice into the deltas of OpenAI's stream: content and calls.

    Text that is no call in the format stays content.

    Attributes:
        num_calls: number of calls so far.
    """

    def __init__(self, family: Family, names: Sequence[str], *, is_single: bool = False) -> None:
        """Create a parser; if `is_single` it leaves out all calls but the first.

        A text without the format's `begin` is a call only if it calls one of `names`.
        """
        self._family, self._names, self._is_single = family, names, is_single
        self.num_calls = 0
        self._rest, self._is_last = "", False
        self._deltas = self._text()

    def take(self, text: str, *, is_last: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that are decided after more text."""
        self._rest += text
        self._is_last = is_last
        deltas = iter(partial(next, self._deltas, None), None)
        return [
            each
            for each in deltas
            if "content" in each or not (self._is_single and each["tool_calls"][0]["index"])
        ]

    def whole(self, text: str) -> dict[str, Any]:
        """Return the content and calls of a whole text, as fields of a message."""
        content, calls = "", list[dict[str, Any]]()
        for delta in self.take(text, is_last=True):
            content += delta.get("content", "")
            for each in delta.get("tool_calls", ()):
                if "id" in each:
                    calls.append({name: each[name] for name in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += each["function"]["arguments"]
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def _text(self) -> Deltas:
        """Yield the deltas of the whole text."""
        begin = self._family.begin
        while self._family.is_bare and not self._rest.strip() and not self._is_last:
            yield None
        if self._family.is_bare and self._rest.lstrip().startswith("{"):
            yield from self._calls("")
        while True:
            if (at := self._rest.find(begin)) >= 0:
                if content := self._rest[:at].rstrip():
                    yield {"content": content}
                self._rest = self._rest[at + len(begin) :]
                yield from self._calls(begin)
                continue
            # `an answer \n<tool_`: the whitespace and the beginning of a call are held back.
            end = len(self._rest)
            if not self._is_last:
                end -= next(
                    n for n in range(len(begin) - 1, -1, -1) if self._rest.endswith(begin[:n])
                )
                end = len(self._rest[:end].rstrip())
            if content := self._rest[:end]:
                self._rest = self._rest[end:]
                if content.strip() or self.num_calls == 0:
                    yield {"content": content}
            yield None

    def _calls(self, begin: str) -> Deltas:
        """Yield the deltas of calls, after `begin`, up to their end."""
        family = self._family
        while True:
            self._rest = rest = self._rest.lstrip(" \t\r\n,;")
            if family.end and rest.startswith(family.end):
                self._rest = rest[len(family.end) :]
                return
            if rest.startswith(family.begin):
                self._rest = rest[len(family.begin) :]
            elif family.begin.startswith(rest) or family.end.startswith(rest):
                if self._is_last:
                    self._rest = ""
                yield None
            elif rest[0] in "[]":
                self._rest = rest[1:]
            elif rest[0] == "{":
                if not (yield from self._call(begin)):
                    return
            elif (named := NAMED.match(rest)) is not None and not family.end:
                self._rest = rest[named.end() :]
                yield from self._arguments(named[1])
            elif "{" in rest or family.end or not begin or self._is_last:
                self._rest = ""
                yield {"content": begin + rest}
                return
            else:
                yield None

    def _call(self, begin: str) -> Generator[dict[str, Any] | None, None, bool]:
        """Yield the deltas of one call, an object; return whether it was one."""
        extent, num_read = _Extent(), 0
        while True:
            head = HEAD.match(self._rest)
            if head is not None and (begin or json.loads(head[1]) in self._names):
                self._rest = self._rest[head.end() :]
                yield from self._arguments(json.loads(head[1]))
                extent = _Extent(depth=1)
                while (end := extent.end(self._rest)) is None and not self._is_last:
                    self._rest = ""
                    yield None
                self._rest = self._rest[end or len(self._rest) :]  # after the brace of the call
                return True
            # Such as arguments before the name: the call is read once it is whole.
            end = extent.end(self._rest[num_read:])
            if end is not None or self._is_last:
                end = len(self._rest) if end is None else num_read + end
                text, rest = self._rest[:end], self._rest[end:]
                try:
                    call = cast("dict[str, Any]", json.loads(text))
                    name, arguments = (
                        call["name"],
                        call.get("arguments", call.get("parameters", {})),
                    )
                    is_call = isinstance(name, str) and (bool(begin) or name in self._names)
                except (AttributeError, KeyError, TypeError, ValueError):
                    name, arguments, is_call = "", "", False
                if is_call:
                    self._rest = arguments if isinstance(arguments, str) else json.dumps(arguments)
                    yield from self._arguments(name)
                else:
                    yield {"content": begin + text}
                self._rest = rest
                return is_call
            num_read = len(self._rest)
            yield None

    def _arguments(self, name: str) -> Deltas:
        """Yield the deltas of a call whose arguments begin here."""
        index, extent, end = self.num_calls, _Extent(), None
        self.num_calls += 1
        # Mistral's templates accept ids of nine letters and digits alone.
        id = token_hex(5)[:9] if self._family is MISTRAL else f"call_{token_hex(12)}"
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [{"index": index, **call}]}
        while end is None:
            end = extent.end(self._rest)
            num = len(self._rest) if end is None else end
            if num:
                part = {"arguments": self._rest[:num]}
                yield {"tool_calls": [{"index": index, "function": part}]}
            self._rest = self._rest[num:]
            if end is None:
                if self._is_last:
                    return
                yield None


def grammar_of(
    family: Family, functions: Sequence[Function], tokenizer: Tokenizer, *, is_single: bool
) -> str:
    """Return the Lark grammar of one call of functions, or of several if not `is_single`."""

    def literal(text: str) -> str:
        id = tokenizer.token_to_id(text)
        added = None if id is None else tokenizer.get_added_tokens_decoder().get(id)
        return f"<[{id}]>" if added is not None and added.special else json.dumps(text)

    begin = literal(family.begin)
    has_names = family is MISTRAL and tokenizer.token_to_id("[ARGS]") is not None
    rules, calls = list[str](), list[str]()
    for number, function in enumerate(functions):
        schema = function.parameters or {"type": "object", "properties": {}}
        rules.append(f"a{number}: %json {json.dumps({'x-guidance': WHITESPACE, **schema})}")
        if has_names:
            call = f"{begin} {json.dumps(function.name)} {literal('[ARGS]')} a{number}"
        else:
            head = f'{{"name": "{function.name}", "{family.arguments}": '
            call = f'{json.dumps(head)} a{number} "}}"'
            call = f'{begin} "\\n" {call} "\\n" {literal(family.end)}' if family.end else call
        calls.append(call)
    several = "call+" if has_names else f"call ({json.dumps(family.between)} call)*"
    start = "call" if is_single else several
    if family is MISTRAL and not has_names:
        start = f'{begin} "[" {start} "]"'
    return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules])
