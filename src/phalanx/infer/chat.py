"""Encode the messages of a chat as one prompt of the served model."""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer

from phalanx.data.chat_template import ChatTemplate
from phalanx.errors import ConfigError
from phalanx.hugging_face.companions import DEFAULT
from phalanx.infer.protocol import ChatBody
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

    def encode(self, body: ChatBody, most: int | None = None) -> list[int]:
        """Render the messages of a request with the template, and return the tokens of the prompt.

        Unless the request says otherwise, the prompt ends with the start of an answer.

        Args:
            body: the request.
            most: most tokens, see `Served.encode`.

        Raises:
            ConfigError: the template raises an error for these messages, or `Served.encode` does.
        """
        starts_answer, continues_last = body.add_generation_prompt, body.continue_final_message
        if starts_answer and continues_last:
            raise ConfigError(
                "add_generation_prompt and continue_final_message are true; give only one of them"
            )
        has_begin = body.add_special_tokens
        if self._template is None:
            text = "\n".join(message.text for message in body.messages)
            text += "\n" * (not continues_last)
            return self._served.encode(text, most, has_begin=has_begin)
        plain = [message.for_template() for message in body.messages]
        last = str(plain[-1].get("content", ""))
        if continues_last:
            plain[-1]["content"] = last + MARK
        tools = body.tools if body.tool_choice != "none" else ()
        values = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
        text = self._template.render(
            plain,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            add_generation_prompt=not continues_last if starts_answer is None else starts_answer,
            values={k: v for k, v in values.items() if v is not None} | body.chat_template_kwargs,
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
