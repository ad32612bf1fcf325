"""Encode the messages of a chat as one prompt of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from phalanx.data.chat_template import ChatTemplate
from phalanx.errors import ConfigError
from phalanx.hugging_face.companions import DEFAULT
from phalanx.infer.protocol import Message
from phalanx.infer.served import Served

MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""End of the last message while a template renders it, with transformers' name."""


class Chat:
    """Chat template of a model.

    For a base model without a chat template, the prompt is the contents of the messages, joined by
    newlines.

    Attributes:
        source: the template; empty without one.
    """

    def __init__(self, served: Served) -> None:
        self._served, self.source = served, ""
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
            self.source = source
            self._template = ChatTemplate(source, served.template_names)

    def encode(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        starts_answer: bool | None = None,
        continues_last: bool = False,
        values: Mapping[str, Any] | None = None,
        has_begin: bool | None = None,
    ) -> list[int]:
        """Render messages with the template, and return the tokens of the prompt.

        Args:
            messages: messages of the chat.
            most: most tokens, see `Served.encode`.
            tools: JSON schemas of functions.
            starts_answer: whether the prompt ends with the start of an answer; None: it does unless
                it continues the last message.
            continues_last: whether the prompt ends amid the last message, which the answer
                continues.
            values: further variables of the template.
            has_begin: see `Served.encode`.

        Raises:
            ConfigError: the template raises an error for these messages, or `Served.encode` does.
        """
        if starts_answer and continues_last:
            raise ConfigError(
                "add_generation_prompt and continue_final_message are true; give only one of them"
            )
        starts_answer = not continues_last if starts_answer is None else starts_answer
        if self._template is None:
            text = "\n".join(message.text for message in messages) + "\n" * (not continues_last)
            return self._served.encode(text, most, has_begin=has_begin)
        plain = [message.for_template() for message in messages]
        last = str(plain[-1].get("content", ""))
        if continues_last:
            plain[-1]["content"] = last + MARK
        text = self._template.render(
            plain, tools=tools, add_generation_prompt=starts_answer, values=values
        )
        if continues_last:
            # As in transformers: what the template appends to the last message is cut off. If it
            # strips messages, the prompt has no space at the end either.
            text, mark, rest = text.rpartition(MARK.strip())
            if not mark or last.strip() not in text:
                raise ConfigError(
                    "continue_final_message is true, but the model's chat template leaves out the "
                    "last message, or a part of it"
                )
            text = text if rest.startswith(" ") else text.rstrip()
        return self._served.encode(text, most, self._tokenizer, has_begin=has_begin)
