"""`/v1/responses`: a chat in the format of OpenAI's Responses API, without state and tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

from starlette.requests import ClientDisconnect

from phalanx.infer.answers import envelope, usage_of
from phalanx.infer.engine import EngineFailed, Piece
from phalanx.infer.options import RequestError
from phalanx.infer.protocol import Body, ChatBody, parse
from phalanx.infer.scheduler import Completion

TEXT: Final[dict[str, Any]] = {"type": "output_text", "text": "", "annotations": []}


class ResponseBody(Body):
    """The body of `/v1/responses`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {
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
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None

    @property
    def chat(self) -> ChatBody:
        """The same request as a chat.

        Raises:
            RequestError: the chat is invalid, or the input has items other than messages.
        """
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for number, item in enumerate(items):
            if item.get("type", "message") != "message":
                raise RequestError(
                    f"input.{number} is {item['type']!r:.99}; expected message", "input"
                )
            content: Any = item.get("content")
            if isinstance(content, list):
                content = [
                    {"type": "text", "text": part["text"]}
                    if part.get("type") in ("input_text", "output_text")
                    else part
                    for part in cast("list[dict[str, Any]]", content)
                ]
            messages.append({"role": item.get("role"), "content": content})
        form: dict[str, Any] = (self.text or {}).get("format", {"type": "text"})
        fields = {
            "model": self.model,
            "messages": messages,
            "response_format": {"type": form.get("type"), "json_schema": form},
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        return parse(ChatBody, json.dumps(fields).encode())


class ResponseAnswer:
    """Formats the response to a request of `/v1/responses`."""

    def __init__(self, body: ResponseBody, model: str) -> None:
        self._body, self._message_id = body, f"msg_{secrets.token_hex(12)}"
        self._about = envelope(f"resp_{secrets.token_hex(12)}", "response", model)
        self._about["created_at"] = self._about.pop("created")

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the non-streaming response; the completion must have finished."""
        (completion,) = completions
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
        fields = self._body.model_dump(exclude={"model", "input", "stream", "text"})
        neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        more = {"text": self._body.text or {"format": {"type": "text"}}, "error": None}
        return {**self._about, **fields, **neutral, **more, "status": status, "output": output}

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        about = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**about, "status": status, "content": content}

    async def stream(
        self,
        pieces: AsyncGenerator[Piece],
        completions: Sequence[Completion],
        *,
        has_usage: bool,
    ) -> AsyncGenerator[str]:
        """Yield the server-sent events of a streaming response."""
        del has_usage  # the last event always has the usage
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
