"""Response bodies of completions and chats: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect

from phalanx.infer.detokenize import bytes_of, scores_of, shown
from phalanx.infer.engine import EngineFailed, Piece
from phalanx.infer.options import TokenScore
from phalanx.infer.protocol import ChatBody, GenerationBody
from phalanx.infer.scheduler import Completion
from phalanx.infer.served import Served
from phalanx.infer.tool_calls import CallParser


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
        body: GenerationBody,
        echoes: Sequence[str] = (),
        new_parser: Callable[[], CallParser] | None = None,
    ) -> None:
        """Create the response of one request.

        Args:
            served: the model.
            logprobs: number of alternatives in the scores of tokens; None for no scores.
            body: the request, whose fields say what else the response has.
            echoes: text of the prompt of each choice, to put before its text; or none.
            new_parser: returns a parser of the calls of tools in a choice; None if there are none.
        """
        self._parsers = None if new_parser is None else defaultdict[int, CallParser](new_parser)
        self._is_chat, self._has_scores = isinstance(body, ChatBody), logprobs is not None
        self._num_top = logprobs
        self._echoes, self._body = echoes, body
        self._names_ids = body.return_tokens_as_token_ids
        self._tokenizer, self._model = served.tokenizer, served.name
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-"
        self._id += body.request_id or secrets.token_hex(12)
        self._num_characters = Counter[int]()  # by choice: characters of its tokens so far

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the non-streaming response; all completions must have finished."""
        choices = list[dict[str, Any]]()
        about = self._about("chat.completion" if self._is_chat else "text_completion")
        for each in self._best(completions):
            content: dict[str, Any] = {"text": self._echo(each) + each.text}
            if self._is_chat:
                message = {"content": content["text"]}
                if self._parsers is not None:
                    message = self._parsers[each.number].whole(content["text"])
                content = {"message": {"role": "assistant", **message}}
            choices.append(content | self._ends(each, each.new_tokens, each.scores, is_first=True))
            # vLLM has one list in the response to a chat.
            of_prompt = about if self._is_chat else choices[-1]
            if self._body.return_token_ids:
                of_prompt["prompt_token_ids"] = each.prompt
            if self._body.prompt_logprobs is not None:
                of_prompt["prompt_logprobs"] = [
                    score and self._prompt_score(token, score)
                    for token, score in zip(each.prompt, each.prompt_scores, strict=True)
                ]
        return {**about, "choices": choices, "usage": usage_of(completions)}

    def _best(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """Return the completions to show, of `best_of` those with the best mean log-probability."""
        num, num_kept = self._body.num_generated, self._body.n
        if num == num_kept:
            return completions

        def mean(completion: Completion) -> float:
            scores = [score.logprob for score in completion.scores]
            return sum(scores) / max(len(scores), 1)

        kept: list[Completion] = []
        for begin in range(0, len(completions), num):
            best = sorted(completions[begin : begin + num], key=mean, reverse=True)
            kept += best[:num_kept]
        for number, completion in enumerate(kept):
            completion.number = number
        return kept

    async def stream(
        self, pieces: AsyncGenerator[Piece], completions: Sequence[Completion]
    ) -> AsyncGenerator[str]:
        """Yield the server-sent events of a streaming response."""
        begun: set[int] = set()
        has_usage = self._body.stream_options.include_usage
        about = self._about("chat.completion.chunk" if self._is_chat else "text_completion")
        about |= {"usage": None} if has_usage else {}
        try:
            async for completion, text, token, score, reason in pieces:
                number, is_first = completion.number, completion.number not in begun
                text = self._echo(completion) + text if is_first else text
                deltas = [{"content" if self._is_chat else "text": text}] if text else []
                if self._parsers is not None:
                    deltas = self._parsers[number].take(text, is_last=reason is not None)
                has_more = self._has_scores or self._body.return_token_ids
                if not (is_first or deltas or reason or has_more):
                    continue
                begun.add(number)
                tokens = [token] if token >= 0 else []
                scores = [] if score is None else [score]
                ends = self._ends(completion, tokens, scores, is_first=is_first)
                reason, stopped_by = reason and ends["finish_reason"], ends["stop_reason"]
                if self._body.return_token_ids and is_first:
                    ends["prompt_token_ids"] = completion.prompt
                if has_usage and self._body.stream_options.continuous_usage_stats:
                    about["usage"] = usage_of(completions)
                deltas = deltas or [{"content" if self._is_chat else "text": ""}]
                if self._is_chat:
                    deltas[0] |= {"role": "assistant"} if is_first else {}
                for delta in deltas:  # a piece of text may end one call and begin another
                    is_end = reason is not None and delta is deltas[-1]
                    ends["finish_reason"] = reason if is_end else None
                    ends["stop_reason"] = stopped_by if is_end else None
                    content = {"delta": delta} if self._is_chat else delta
                    yield _event({**about, "choices": [content | ends]})
                    ends["logprobs"] = None
                    ends |= {"token_ids": []} if "token_ids" in ends else {}
                    ends.pop("prompt_token_ids", None)
            if has_usage:
                yield _event({**about, "choices": [], "usage": usage_of(completions)})
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
        logprobs, scored, all_scores = None, tokens, list[TokenScore | None](scores)
        if self._has_scores:
            if is_first and self._echoes and not self._is_chat:
                scored = [*completion.prompt, *tokens]
                all_scores = [*completion.prompt_scores, *scores]
            logprobs = self.scores(completion.number, scored, all_scores)
        reason = completion.finish_reason
        if reason == "stop" and self._parsers and self._parsers[completion.number].calls:
            reason = "tool_calls"
        return {
            "index": completion.number,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            **({"token_ids": tokens} if self._body.return_token_ids else {}),
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
            logprobs, end = scores_of(
                *(self._tokenizer, tokens, scores, begin),
                num_top=self._num_top,
                names_ids=self._names_ids,
            )
            self._num_characters[number] = end
            return logprobs

        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = bytes_of(self._tokenizer, token)
            name = f"token_id:{token}" if self._names_ids else shown(content)
            return {"token": name, "logprob": logprob, "bytes": list(content)}

        return {
            "content": [
                {**entry(token, score.logprob), "top_logprobs": [entry(*top) for top in score.top]}
                for token, score in zip(tokens, scores, strict=True)
                if score is not None
            ]
        }


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
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
