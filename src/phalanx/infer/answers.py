"""Response bodies of completions and chats: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from phalanx.infer.detokenize import bytes_of, shown
from phalanx.infer.engine_thread import Ticket, Update
from phalanx.infer.options import TokenScore
from phalanx.infer.protocol import envelope, error_body, new_id, usage
from phalanx.infer.served import Served
from phalanx.infer.texts import Completion, scores_of


class Answer(ABC):
    """Base class that formats the response to one HTTP request."""

    prompt_field: ClassVar[str]
    prefix: ClassVar[str]
    kind: ClassVar[str]
    piece_kind: ClassVar[str]

    def __init__(self, logprobs: int | None, served: Served) -> None:
        self._has_scores, self._tokenizer = logprobs is not None, served.tokenizer
        self._model, self._id = served.name, new_id(self.prefix)

    @abstractmethod
    def choice(self, text: str) -> dict[str, Any]:
        """Return the fields for `text`, the full text of a choice."""

    @abstractmethod
    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return the fields for `text`, the part of a choice that one stream event adds."""

    @abstractmethod
    def scores(
        self, number: int, tokens: Sequence[int], scores: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the `logprobs` object for the next tokens of choice `number`."""

    def whole(self, tickets: Sequence[Ticket]) -> dict[str, Any]:
        """Return the non-streaming response; all tickets must have finished."""
        choices: list[dict[str, Any]] = []
        for ticket in tickets:
            found = _completion(ticket)
            content = self.choice(found.stream.text)
            content |= self._end(ticket.number, found.finish_reason)
            if self._has_scores:
                content["logprobs"] = self.scores(ticket.number, found.new_tokens, found.scores)
            choices.append(content)
        about = envelope(self._id, self.kind, self._model)
        return {**about, "choices": choices, "usage": _usage(tickets)}

    async def stream(
        self, updates: AsyncGenerator[Update], tickets: Sequence[Ticket], *, has_usage: bool
    ) -> AsyncGenerator[str]:
        """Yield the server-sent events of a streaming response."""
        begun: set[int] = set()
        num_left = len(tickets)
        about = envelope(self._id, self.piece_kind, self._model)
        about |= {"usage": None} if has_usage else {}
        try:
            async for number, piece, finished, why in updates:
                if piece is None or why:
                    yield _event(error_body(why, "server_error"))
                    return
                if not piece.text and finished is None and not self._has_scores and number in begun:
                    continue
                content = self.piece(piece.text, number not in begun) | self._end(number, finished)
                if piece.score is not None:
                    content["logprobs"] = self.scores(number, [piece.token], [piece.score])
                begun.add(number)
                num_left -= finished is not None
                yield _event({**about, "choices": [content]})
            if num_left:  # the client has disconnected
                return
            if has_usage:
                yield _event({**about, "choices": [], "usage": _usage(tickets)})
            yield "data: [DONE]\n\n"
        finally:
            await updates.aclose()

    def _end(self, number: int, finished: str | None) -> dict[str, Any]:
        return {"index": number, "logprobs": None, "finish_reason": finished}


class CompletionAnswer(Answer):
    """Response of `/v1/completions`."""

    prompt_field = "prompt"
    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, logprobs: int | None, served: Served) -> None:
        super().__init__(logprobs, served)
        self._num_characters = Counter[int]()  # by choice: characters of its tokens so far

    @override
    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    @override
    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    @override
    def scores(
        self, number: int, tokens: Sequence[int], scores: Sequence[TokenScore]
    ) -> dict[str, Any]:
        begin = self._num_characters[number]
        found, self._num_characters[number] = scores_of(self._tokenizer, tokens, scores, begin)
        return found


class ChatAnswer(Answer):
    """Response of `/v1/chat/completions`."""

    prompt_field = "messages"
    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @override
    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    @override
    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}

    @override
    def scores(
        self, number: int, tokens: Sequence[int], scores: Sequence[TokenScore]
    ) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(token, score.logprob),
                    "top_logprobs": [self._entry(*pair) for pair in score.top],
                }
                for token, score in zip(tokens, scores, strict=True)
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        content = bytes_of(self._tokenizer, token)
        return {"token": shown(content), "logprob": logprob, "bytes": list(content)}


def _completion(ticket: Ticket) -> Completion:
    assert ticket.completion is not None, "the ticket has no completion"
    return ticket.completion


def _usage(tickets: Sequence[Ticket]) -> dict[str, Any]:
    """Return the token counts of a response; a prompt with several choices counts once."""
    requests = [_completion(ticket).request for ticket in tickets]
    first = {id(t.prompt): r for t, r in zip(reversed(tickets), reversed(requests), strict=True)}
    num_prompt = sum(len(request.prompt) for request in first.values())
    num_found = sum(request.num_cached or 0 for request in first.values())
    return usage(num_prompt, num_found, sum(request.num_generated for request in requests))


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
