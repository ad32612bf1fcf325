r"""Calls of tools in the text of a chat: parse them as they arrive, or constrain a text to them.

A model writes calls in the format of its form, which its chat template has taught it:

    hermes        <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>      also Qwen
    llama3_json   {"name": "f", "parameters": {"x": 1}}; {"name": ...                 the whole text
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]
                  [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]...              later ones, with [ARGS]

The names of the formats are vLLM's.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

from tokenizers import Tokenizer

from phalanx.infer.grammar import WHITESPACE
from phalanx.infer.protocol import Function


@dataclass(frozen=True)
class CallFormat:
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


HERMES = CallFormat("<tool_call>", "</tool_call>", "arguments", "\n", "<tool_call>")
MISTRAL = CallFormat("[TOOL_CALLS]", "", "arguments", ", ", "[TOOL_CALLS]")
LLAMA = CallFormat("<|python_tag|>", "", "parameters", "; ", '"parameters"', is_bare=True)
CALL_FORMATS: Final = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA}
"""Value of the setting `tool_call_parser` -> format."""


def format_of(template: str) -> CallFormat | None:
    """Return the first format whose sign is in a chat template; None if it renders no tools."""
    families = CALL_FORMATS.values() if re.search(r"\btools\b", template) else ()
    return next((each for each in families if each.sign in template), None)


HEAD: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning of a call, after which its arguments are streamed."""

NAMED: Final = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
"""The beginning of a call in Mistral's later format."""

MARKS: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]')


def end_of(text: str, begin: int) -> int | None:
    """Return the end of the JSON object at `begin`; None if the text ends before it."""
    depth = 0
    for mark in MARKS.finditer(text, begin):
        depth += (mark[0] in "{[") - (mark[0] in "}]")
        if depth == 0:
            return mark.end()
    return None


def split(
    text: str, form: CallFormat, names: Sequence[str], *, is_last: bool
) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a text and its calls so far, as (name, arguments in JSON).

    Text that is no call in the format is content, and text after a call is left out. A longer text
    only appends to the results, until the text `is_last`.
    """
    begin, start, calls = form.begin, text.find(form.begin), list[tuple[str, str]]()
    is_bare = form.is_bare and text.lstrip()[:1] in ("{", "")
    if start < 0 and not is_bare:
        if is_last:
            return text, []
        # `an answer \n<tool_`: the whitespace and the beginning of a call are held back.
        num = next(n for n in range(len(begin) - 1, -1, -1) if text.endswith(begin[:n]))
        return text[: len(text) - num].rstrip(), []
    content, at = text[: max(start, 0)].rstrip(), 0 if is_bare else start
    marks = "|".join(re.escape(mark) for mark in (begin, form.end) if mark)
    skipped = re.compile(rf"(?:{marks}|[\s,;\[\]])+")
    while True:
        if (between := skipped.match(text, at)) is not None:
            at = between.end()
        end = end_of(text, at) if text[at : at + 1] == "{" else None
        head = HEAD.match(text, at)
        if head is not None and (not is_bare or head[1] in names):
            calls.append((head[1], text[head.end() : end_of(text, head.end())]))
        elif not form.end and (named := NAMED.match(text, at)) is not None:
            end = end_of(text, named.end())
            calls.append((named[1], text[named.end() : end]))
        elif end is not None:  # such as arguments before the name
            try:
                call = json.loads(text[at:end])
                name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
                if is_bare and name not in names:
                    raise ValueError(name)
            except (KeyError, RecursionError, ValueError):
                return (content, calls) if calls else (text, [])
            calls.append(
                (str(name), arguments if isinstance(arguments, str) else json.dumps(arguments))
            )
        else:
            is_junk = is_last or (form.end and text[at : at + 1] not in ("", "{", "<"))
            return (text, []) if is_junk and not calls else (content, calls)
        if end is None:
            return content, calls
        at = end


class CallParser:
    """Splits the text of one choice into the deltas of OpenAI's stream: content and calls."""

    def __init__(self, form: CallFormat, names: Sequence[str], *, is_single: bool = False) -> None:
        """Create a parser; if `is_single` it leaves out all calls but the first.

        A text without the format's `begin` is a call only if it calls one of `names`.
        """
        self._form, self._names, self._most = form, names, 1 if is_single else None
        self._text, self._content = "", ""
        self.calls: list[dict[str, Any]] = []

    def take(self, text: str, *, is_last: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that are decided after more text."""
        self._text += text
        content, calls = split(self._text, self._form, self._names, is_last=is_last)
        new, self._content = content[len(self._content) :], content
        deltas: list[dict[str, Any]] = [{"content": new}] if new else []
        for index, (name, arguments) in enumerate(calls[: self._most]):
            if index == len(self.calls):
                # Mistral's templates accept ids of nine letters and digits alone.
                id = token_hex(5)[:9] if self._form is MISTRAL else f"call_{token_hex(12)}"
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                self.calls.append(copy.deepcopy(call))
                deltas.append({"tool_calls": [{"index": index, **call}]})
            function = self.calls[index]["function"]
            if part := arguments[len(function["arguments"]) :]:
                function["arguments"] = arguments
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
        return deltas

    def whole(self, text: str) -> dict[str, Any]:
        """Return the content and calls of a whole text, as fields of a message."""
        self.take(text, is_last=True)
        calls = {"content": self._content or None, "tool_calls": self.calls}
        return calls if self.calls else {"content": self._content}


def grammar_of(
    form: CallFormat, functions: Sequence[Function], tokenizer: Tokenizer, *, is_single: bool
) -> str:
    """Return the Lark grammar of one call of functions, or of several if not `is_single`."""

    def literal(text: str) -> str:
        id = tokenizer.token_to_id(text)
        added = None if id is None else tokenizer.get_added_tokens_decoder().get(id)
        return f"<[{id}]>" if added is not None and added.special else json.dumps(text)

    begin = literal(form.begin)
    has_names = form is MISTRAL and tokenizer.token_to_id("[ARGS]") is not None
    rules, calls = list[str](), list[str]()
    for number, function in enumerate(functions):
        schema = function.parameters or {"type": "object", "properties": {}}
        rules.append(f"a{number}: %json {json.dumps({'x-guidance': WHITESPACE, **schema})}")
        if has_names:
            call = f"{begin} {json.dumps(function.name)} {literal('[ARGS]')} a{number}"
        else:
            head = f'{{"name": "{function.name}", "{form.arguments}": '
            call = f'{json.dumps(head)} a{number} "}}"'
            call = f'{begin} "\\n" {call} "\\n" {literal(form.end)}' if form.end else call
        calls.append(call)
    several = "call+" if has_names else f"call ({json.dumps(form.between)} call)*"
    start = "call" if is_single else several
    if form is MISTRAL and not has_names:
        start = f'{begin} "[" {start} "]"'
    return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules])
