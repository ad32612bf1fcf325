"""Render the messages of a chat into one text with a model's chat template, and find its answers.

The text of a conversation whose turns 2 and 4 are answers; R(k) is the rendering of turns 1 to k,
and P(k) is the same followed by the start of an answer, the generation prompt:

    <user>a<end><assistant>b<end><user>c<end><assistant>d<end>
                           |____|                      |____|    trained
    R(1)________|                                                no part of it ends an answer
    P(1)___________________|                                     where turn 2 begins
    R(2)________________________|                                where turn 2 ends
    P(3)_______________________________________________|
    R(4)_____________________________________________________|

So each P(k - 1) must be a prefix of R(k), and R(k) of the whole; a template that changes an earlier
turn later, or starts an answer otherwise than the prompt does, is refused by the turn. A template
with `{% generation %}` around its answers says itself where they are.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from phalanx.errors import ConfigError

_START, _END = "phalanx_generation_start", "phalanx_generation_end"
"""Variables of a template that are printed at both ends of a `{% generation %}` block."""

_MARK = "give a template with {% generation %} around its answers by --chat-template FILE"

Span = tuple[int, int]
"""First character of an answer in the text, and the one after its last."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks tokens to train on.

    The text is unchanged unless _START and _END have values.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it
    is_used = False

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_START, _END))
        return nodes.Scope([start, *body, end], lineno=line)


class ChatTemplate:
    """A chat template, in the environment of apply_chat_template of transformers."""

    def __init__(
        self, source: str, names: Mapping[str, str], today: datetime | None = None
    ) -> None:
        """Compile a template.

        Args:
            source: the Jinja source.
            names: variables of the template, such as `bos_token`.
            today: time that the template prints; the present time if None.

        Raises:
            ConfigError: the source is not a valid template.
        """
        self._names = dict(names)
        nonce = secrets.token_hex(8)  # no message has spelled it
        self._marks = {_START: f"<{nonce}>", _END: f"</{nonce}>"}

        def now(form: str) -> str:
            return (today or datetime.now()).strftime(form)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _json
        known: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
        known |= {"raise_exception": _refuse, "strftime_now": now, "documents": None}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error
        self._has_marks = cast(
            "_Generation", environment.extensions[_Generation.identifier]
        ).is_used

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: messages with `role`, `content` and what else the template reads.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: whether the text ends with the start of an answer.
            values: further variables of the template.

        Raises:
            ConfigError: the template raises an error for these messages.
        """
        names: dict[str, Any] = {**self._names, **(values or {}), "tools": tools}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(names)
            text.encode()  # raises for half of a surrogate pair
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return text

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        turns: Collection[int],
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the spans of the answers to train on.

        Args:
            messages: as in `render`.
            tools: as in `render`.
            turns: indices of the messages to train on.

        Raises:
            ConfigError: the template refuses the messages, or its answers cannot be found; the
                message names the turn, from 1.
        """
        text = self.render(messages, tools=tools)
        if self._has_marks:
            return text, self._marked(text, messages, tools, turns)
        spans: list[Span] = []
        for turn in sorted(turns):
            name = f"turn {turn + 1}, of {messages[turn].get('role')},"
            try:
                prompt = self.render(messages[:turn], tools=tools, add_generation_prompt=True)
                until = self.render(messages[: turn + 1], tools=tools)
            except ConfigError as error:
                raise ConfigError(
                    f"the answer of {name} cannot be found, because {error}; {_MARK}"
                ) from error
            if not until.startswith(prompt):
                raise ConfigError(
                    f"{name} does not begin as the chat template's generation prompt says: the "
                    f"prompt ends in {prompt[-24:]!r}, the turn has {_differing(prompt, until)}; "
                    f"{_MARK}"
                )
            if not text.startswith(until):
                raise ConfigError(
                    f"the chat template renders {name} otherwise once turns follow: alone it has "
                    f"{_differing(text, until)}, with them {_differing(until, text)}; train on the "
                    f"last answers alone by --corpus.turns last, or {_MARK}"
                )
            spans.append((len(prompt), len(until)))
        return text, spans

    def _marked(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        turns: Collection[int],
    ) -> list[Span]:
        """Return the spans of a template with `{% generation %}`."""

        def spans_of(number: int) -> tuple[str, list[Span]]:
            marked = self.render(messages[:number], tools=tools, values=self._marks)
            plain, spans = "", list[Span]()
            for part in marked.split(self._marks[_START]):
                inner, end, after = part.rpartition(self._marks[_END])
                if end:
                    spans.append((len(plain), len(plain) + len(inner)))
                plain += inner + after
            return plain, spans

        whole, spans = spans_of(len(messages))
        if whole != text:
            raise ConfigError(
                "the chat template changes text inside of {% generation %} after it is rendered, "
                f"as by a filter: the text has {_differing(whole, text)}"
            )
        answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if set(turns) == set(answers):
            chosen = spans
        else:  # those that the turn adds to the spans of the turns before
            counts = {n: len(spans_of(n)[1]) if n else 0 for t in turns for n in (t, t + 1)}
            chosen = [span for t in sorted(turns) for span in spans[counts[t] : counts[t + 1]]]
        if not any(end > start for start, end in chosen):
            raise ConfigError(
                "the chat template has {% generation %}, but marks nothing of this conversation"
            )
        return chosen


def _differing(text: str, other: str) -> str:
    """Return what `other` has from where it differs from `text` on, shortened."""
    pairs = zip(text, other, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
    return repr(other[max(0, at - 8) : at + 24])


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, which Jinja's own `tojson` has."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
