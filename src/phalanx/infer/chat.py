"""Encode the messages of a chat as one prompt of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from phalanx.data.chat_template import ChatTemplate
from phalanx.errors import ConfigError
from phalanx.infer.protocol import Message
from phalanx.infer.served import DEFAULT, Served


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
            self._template = ChatTemplate(source, served.template_names)

    def encode(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Render messages with the template, and return the tokens of the prompt.

        Raises:
            ConfigError: the template raises an error for these messages, or `Served.encode` does.
        """
        if self._template is None:
            text = "\n".join(message.text for message in messages) + "\n"
            return self._served.encode(text, most)
        plain = [message.for_template() for message in messages]
        text = self._template.render(plain, tools=tools, add_generation_prompt=True)
        return self._served.encode(text, most, self._tokenizer)
