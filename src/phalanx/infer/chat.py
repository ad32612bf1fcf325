"""Make one prompt of the messages of a chat, by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from phalanx.errors import ConfigError
from phalanx.infer.protocol import Message
from phalanx.infer.served import DEFAULT, Served


class Chat:
    """The template of a model.

    A model without one was trained to continue texts: it continues the contents of the messages,
    a line each.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._template = None
        # A template spells special tokens, and so may a message, as in transformers.
        self._tokenizer = Tokenizer.from_str(served.tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False
        if served.chat_templates:
            if (source := served.chat_templates.get(DEFAULT)) is None:
                names = ", ".join(served.chat_templates)
                raise ConfigError(f"the chat templates of the model are {names}; none is {DEFAULT}")
            # What transformers gives to a template; see apply_chat_template.
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.filters["tojson"] = _json
            known: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
            known |= {"raise_exception": _refuse, "strftime_now": _now}
            known |= {"tools": None, "documents": None}
            try:
                self._template = environment.from_string(source)
            except TemplateError as error:
                raise ConfigError(f"the model's chat template cannot be read: {error}") from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if self._template is None:
            return self._served.encode("\n".join(message.text for message in messages) + "\n")
        plain = [{"role": message.role, "content": message.text} for message in messages]
        names: dict[str, Any] = dict(self._served.template_names)
        try:
            text = self._template.render(messages=plain, add_generation_prompt=True, **names)
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a template is a program: it may raise anything
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, indent: int | None = None) -> str:
    """Return JSON that keeps letters as they are, and escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
