"""Response bodies of completions and chats: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect
from typing_extensions import override

from phalanx.infer.detokenize import bytes_of, scores_of, shown
from phalanx.infer.engine import EngineFailed, Piece
from phalanx.infer.options import TokenScore
from phalanx.infer.scheduler import Completion
from phalanx.infer.served import Served


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response; `kind` is its type, see `RequestError` for the rest."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def envelope(id: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that every response and stream event of a request shares."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


class Answer(ABC):
    """Base class that formats the response to one HTTP request."""

    prompt_field: ClassVar[str]
    prefix: ClassVar[str]
    kind: ClassVar[str]
    piece_kind: ClassVar[str]

    def __init__(self, logprobs: int | None, served: Served) -> None:
        self._has_scores, self._tokenizer = logprobs is not None, served.tokenizer
        self._model, self._id = served.name, f"{self.prefix}-{secrets.token_hex(12)}"

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

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the non-streaming response; all completions must have finished."""
        choices = [
            {
                **self.choice(each.text),
                "index": each.number,
                "logprobs": self.scores(each.number, each.new_tokens, each.scores)
                if self._has_scores
                else None,
                "finish_reason": each.finish_reason,
            }
            for each in completions
        ]
        about = envelope(self._id, self.kind, self._model)
        return {**about, "choices": choices, "usage": _usage(completions)}

    async def stream(
        self,
        pieces: AsyncGenerator[Piece],
        completions: Sequence[Completion],
        *,
        has_usage: bool,
    ) -> AsyncGenerator[str]:
        """Yield the server-sent events of a streaming response."""
        begun: set[int] = set()
        about = envelope(self._id, self.piece_kind, self._model)
        about |= {"usage": None} if has_usage else {}
        try:
            async for completion, text, token, score, reason in pieces:
                number = completion.number
                is_first = number not in begun
                if not (text or reason or self._has_scores or is_first):
                    continue
                begun.add(number)
                choice = {
                    **self.piece(text, is_first),
                    "index": number,
                    "logprobs": None if score is None else self.scores(number, [token], [score]),
                    "finish_reason": reason,
                }
                yield _event({**about, "choices": [choice]})
            if has_usage:
                yield _event({**about, "choices": [], "usage": _usage(completions)})
            yield "data: [DONE]\n\n"
        except EngineFailed as error:
            yield _event(error_body(str(error), "server_error"))
        except ClientDisconnect:
            pass
        finally:
            await pieces.aclose()


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
        logprobs, self._num_characters[number] = scores_of(self._tokenizer, tokens, scores, begin)
        return logprobs


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
        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = bytes_of(self._tokenizer, token)
            return {"token": shown(content), "logprob": logprob, "bytes": list(content)}

        return {
            "content": [
                {**entry(token, score.logprob), "top_logprobs": [entry(*top) for top in score.top]}
                for token, score in zip(tokens, scores, strict=True)
            ]
        }


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the token counts of a response; a prompt with several choices counts once."""
    first = {id(each.prompt): each for each in reversed(completions)}.values()
    num_prompt = sum(len(each.prompt) for each in first)
    num_new = sum(each.num_generated for each in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached or 0 for each in first)},
    }


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
