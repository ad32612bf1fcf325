"""Response bodies of completions and chats: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect

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


class Answer:
    """Formats the response to one HTTP request, of `/v1/chat/completions` or `/v1/completions`."""

    def __init__(
        self,
        served: Served,
        logprobs: int | None,
        *,
        is_chat: bool,
        echoes: Sequence[str] = (),
        has_prompt_scores: bool = False,
    ) -> None:
        """Create the response of one request.

        Args:
            served: the model.
            logprobs: number of alternatives in the scores of tokens; None for no scores.
            is_chat: whether the request is a chat.
            echoes: text of the prompt of each choice, to put before its text; or none.
            has_prompt_scores: whether the response has `prompt_logprobs`.
        """
        self._is_chat, self._has_scores, self._num_top = is_chat, logprobs is not None, logprobs
        self._echoes, self._has_prompt_scores = echoes, has_prompt_scores
        self._tokenizer, self._model = served.tokenizer, served.name
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._num_characters = Counter[int]()  # by choice: characters of its tokens so far

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the non-streaming response; all completions must have finished."""
        choices = list[dict[str, Any]]()
        about = self._about("chat.completion" if self._is_chat else "text_completion")
        for each in completions:
            content: dict[str, Any] = {"text": self._echo(each) + each.text}
            if self._is_chat:
                content = {"message": {"role": "assistant", "content": content["text"]}}
            choices.append(content | self._ends(each, each.new_tokens, each.scores, is_first=True))
            if self._has_prompt_scores:  # vLLM has one list in the response to a chat
                (about if self._is_chat else choices[-1])["prompt_logprobs"] = [
                    score and self._prompt_score(token, score)
                    for token, score in zip(each.prompt, each.prompt_scores, strict=True)
                ]
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
        about = self._about("chat.completion.chunk" if self._is_chat else "text_completion")
        about |= {"usage": None} if has_usage else {}
        try:
            async for completion, text, token, score, reason in pieces:
                number, is_first = completion.number, completion.number not in begun
                content = {"text": self._echo(completion) + text if is_first else text}
                if number in begun and not (text or reason or self._has_scores):
                    continue
                if self._is_chat:
                    role = {} if number in begun else {"role": "assistant"}
                    content = {"delta": {**role, "content": content["text"]}}
                begun.add(number)
                tokens, scores = ([], []) if score is None else ([token], [score])
                ends = self._ends(completion, tokens, scores, is_first=is_first)
                ends |= {"finish_reason": reason}
                yield _event({**about, "choices": [content | ends]})
            if has_usage:
                yield _event({**about, "choices": [], "usage": _usage(completions)})
            yield "data: [DONE]\n\n"
        except EngineFailed as error:
            yield _event(error_body(str(error), "server_error"))
        except ClientDisconnect:
            pass
        finally:
            await pieces.aclose()

    def _about(self, kind: str) -> dict[str, Any]:
        return envelope(self._id, kind, self._model)

    def _echo(self, completion: Completion) -> str:
        """Return the text to put before the text of a completion."""
        return self._echoes[completion.number] if self._echoes else ""

    def _ends(
        self,
        completion: Completion,
        tokens: Sequence[int],
        scores: Sequence[TokenScore],
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return the fields of a choice after its text; `is_first` for the first part of it."""
        logprobs, all_scores = None, list[TokenScore | None](scores)
        if self._has_scores:
            if is_first and self._echoes and not self._is_chat:
                tokens = [*completion.prompt, *tokens]
                all_scores = [*completion.prompt_scores, *scores]
            logprobs = self.scores(completion.number, tokens, all_scores)
        return {
            "index": completion.number,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }

    def _prompt_score(self, token: int, score: TokenScore) -> dict[str, Any]:
        """Return the entry of `prompt_logprobs` of a prompt token, in vLLM's format."""
        ranked = [(token, score.logprob, score.rank)]
        ranked += [(id, p, rank) for rank, (id, p) in enumerate(score.top, 1) if id != token]
        return {
            str(id): {
                "logprob": p,
                "rank": r,
                "decoded_token": shown(bytes_of(self._tokenizer, id)),
            }
            for id, p, r in ranked
        }

    def scores(
        self, number: int, tokens: Sequence[int], scores: Sequence[TokenScore | None]
    ) -> dict[str, Any]:
        """Return the `logprobs` object for the next tokens of choice `number`."""
        if not self._is_chat:
            begin = self._num_characters[number]
            logprobs, end = scores_of(self._tokenizer, tokens, scores, begin, self._num_top)
            self._num_characters[number] = end
            return logprobs

        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = bytes_of(self._tokenizer, token)
            return {"token": shown(content), "logprob": logprob, "bytes": list(content)}

        return {
            "content": [
                {**entry(token, score.logprob), "top_logprobs": [entry(*top) for top in score.top]}
                for token, score in zip(tokens, scores, strict=True)
                if score is not None
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
