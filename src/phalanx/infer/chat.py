"""Render the messages of a chat into one prompt with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from typing_extensions import override

from phalanx.errors import ConfigError
from phalanx.infer.protocol import Message
from phalanx.infer.served import DEFAULT, Served


class _Generation(Extension):
    """The tag `{% generation %}`, which marks tokens to train on; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Chat:
    """Chat template of a model.

    For a base model without a chat template, the prompt is the contents of the messages, joined by
    newlines.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._template = None
        # Two tokenizers: of prompts, where special tokens are plain text, and of rendered chats.
        # The template spells out special tokens. As in transformers, text in a message that spells
        # a special token becomes that token too.
        self._tokenizer = Tokenizer.from_str(served.tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False
        if served.chat_templates:
            if (source := served.chat_templates.get(DEFAULT)) is None:
                names = ", ".join(served.chat_templates)
                raise ConfigError(
                    f"the chat templates of the model are {names}; expected one named {DEFAULT}"
                )
            # The same environment as in apply_chat_template of transformers.
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=[_Generation, "jinja2.ext.loopcontrols"],
            )
            environment.filters["tojson"] = _json
            known: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
            known |= {"raise_exception": _refuse, "strftime_now": _now}
            known |= {"tools": None, "documents": None}
            try:
                self._template = environment.from_string(source)
            except TemplateError as error:
                raise ConfigError(f"the model's chat template cannot be read: {error}") from error

    def encode(self, messages: Sequence[Message], most: int | None = None) -> list[int]:
        """Render messages with the template, and return the tokens of the prompt.

        Raises:
            ConfigError: the template raises an error for these messages, or `Served.encode` does.
        """
        if self._template is None:
            text = "\n".join(message.text for message in messages) + "\n"
            return self._served.encode(text, most)
        plain = [message.for_template() for message in messages]
        names: dict[str, Any] = dict(self._served.template_names)
        try:
            text = self._template.render(messages=plain, add_generation_prompt=True, **names)
            text.encode()  # raises for half of a surrogate pair
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return self._served.encode(text, most, self._tokenizer)


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
