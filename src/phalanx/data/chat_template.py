"""Render the messages of a chat into one text with a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from phalanx.errors import ConfigError


class _Generation(Extension):
    """The tag `{% generation %}`, which marks tokens to train on; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A chat template, in the environment of apply_chat_template of transformers."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: the Jinja source.
            names: variables of the template, such as `bos_token`.

        Raises:
            ConfigError: the source is not a valid template.
        """
        self.source, self._names = source, dict(names)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _json
        known: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
        known |= {"raise_exception": _refuse, "strftime_now": _now, "documents": None}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error

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


def _now(form: str) -> str:
    return datetime.now().strftime(form)
