"""`/v1/responses`: a chat in the format of OpenAI's Responses API, without state and tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import ClientDisconnect

from phalanx.infer.answers import envelope, usage_of
from phalanx.infer.engine import EngineFailed, Piece
from phalanx.infer.protocol import MAX_MESSAGES, Body, ChatBody, Message, ResponseFormat, Text
from phalanx.infer.scheduler import Completion

Neutral = Mapping[str, tuple[Any, ...] | None]
TEXT: Final[dict[str, Any]] = {"type": "output_text", "text": "", "annotations": []}


class InputMessage(Message):
    """A message of the input."""

    neutral: ClassVar[Neutral] = {
        **Message.neutral,
        "type": ("message",),
        "id": None,
        "status": None,
    }


class TextFormat(Body):
    """What the text has to match."""

    neutral: ClassVar[Neutral] = dict.fromkeys(("name", "description", "strict"))

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Body):
    """Options of the text."""

    neutral: ClassVar[Neutral] = {"verbosity": None}

    format: TextFormat = TextFormat(type="text")


class ResponseBody(Body):
    """The body of `/v1/responses`."""

    neutral: ClassVar[Neutral] = {
        **dict.fromkeys(("metadata", "parallel_tool_calls", "reasoning", "service_tier", "store")),
        **dict.fromkeys(("prompt_cache_key", "safety_identifier", "stream_options", "user")),
        **dict.fromkeys(("conversation", "previous_response_id", "prompt"), ()),
        **dict.fromkeys(("include", "tools"), ([],)),
        "background": (False,),
        "tool_choice": ("none", "auto"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Annotated[
        Text
        | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "text"),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextOptions = TextOptions()

    @property
    def chat(self) -> ChatBody:
        """The same request as a chat."""
        system = (
            [] if (text := self.instructions) is None else [Message(role="system", content=text)]
        )
        input = self.input
        messages = [Message(role="user", content=input)] if isinstance(input, str) else input
        form = self.text.format
        return ChatBody(
            model=self.model,
            messages=[*system, *messages],
            response_format=ResponseFormat(type=form.type, json_schema={"schema": form.schema_}),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
        )


class ResponseAnswer:
    """Formats the response to a request of `/v1/responses`."""

    def __init__(self, body: ResponseBody, model: str) -> None:
        self._body, self._message_id = body, f"msg_{secrets.token_hex(12)}"
        self._about = envelope(f"resp_{secrets.token_hex(12)}", "response", model)
        self._about["created_at"] = self._about.pop("created")

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the non-streaming response; the completion must have finished."""
        completion = completions[0]
        is_whole, usage = completion.finish_reason != "length", usage_of(completions)
        status = "completed" if is_whole else "incomplete"
        message = self._message(status, {**TEXT, "text": completion.text})
        return self._response(status, message) | {
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str, *output: dict[str, Any]) -> dict[str, Any]:
        fields = self._body.model_dump(exclude={"model", "input", "stream"}, by_alias=True)
        neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None}
        return {**self._about, **fields, **neutral, "status": status, "output": output}

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        about = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**about, "status": status, "content": content}

    async def stream(
        self, pieces: AsyncGenerator[Piece], completions: Sequence[Completion]
    ) -> AsyncGenerator[str]:
        """Yield the server-sent events of a streaming response."""
        number = 0

        def event(kind: str, **fields: Any) -> str:
            nonlocal number
            content = {"type": kind, "sequence_number": number, **fields}
            number += 1
            return f"event: {kind}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n"

        part = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        begun, message = self._response("in_progress"), self._message("in_progress")
        try:
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)
            yield event("response.output_item.added", output_index=0, item=message)
            yield event("response.content_part.added", **part, part=TEXT)
            async for piece in pieces:
                if piece.text:
                    yield event("response.output_text.delta", **part, delta=piece.text, logprobs=[])
            whole = self.whole(completions)
            (message,) = whole["output"]
            (content,) = message["content"]
            yield event("response.output_text.done", **part, text=content["text"], logprobs=[])
            yield event("response.content_part.done", **part, part=content)
            yield event("response.output_item.done", output_index=0, item=message)
            yield event(f"response.{whole['status']}", response=whole)
        except EngineFailed as error:
            yield event("error", code="server_error", message=str(error), param=None)
        except ClientDisconnect:
            pass
        finally:
            await pieces.aclose()
