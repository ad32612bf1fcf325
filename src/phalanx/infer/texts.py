"""Completions: an engine's requests with their detokenized text, for the CLI and the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from phalanx.infer.detokenize import TextStream, bytes_of, shown
from phalanx.infer.engine import Engine
from phalanx.infer.options import Sampling, TokenScore
from phalanx.infer.scheduler import GenerationRequest


@dataclass(eq=False)
class Completion:
    """One continuation of a prompt.

    Attributes:
        request: request with the tokens.
        stream: decoder with the text.
        scores: score of each new token, if the request has `logprobs`.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
    """

    request: GenerationRequest
    stream: TextStream
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    finish_reason: str | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.request.tokens[len(self.request.prompt) :]


class Piece(NamedTuple):
    """One new token of a completion, and the text, possibly empty, that it adds."""

    completion: Completion
    text: str
    token: int
    score: TokenScore | None


class TextEngine:
    """An engine that detokenizes, and ends requests at their stop strings.

    Args:
        load: function that replaces the weights with a checkpoint's; None if they are fixed.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, load: Callable[[Path], None] | None = None
    ) -> None:
        self.engine, self.tokenizer, self._load = engine, tokenizer, load
        self._running: dict[GenerationRequest, Completion] = {}

    def add(
        self, prompt: Sequence[int], *samplings: Sampling, now_s: float = 0.0
    ) -> list[Completion]:
        """Queue a completion of `prompt` for each of `samplings`; see `Engine.add`."""
        completions = [
            Completion(request, TextStream(self.tokenizer, request.sampling.stop, prompt))
            for request in self.engine.add(prompt, *samplings, now_s=now_s)
        ]
        self._running |= {each.request: each for each in completions}
        return completions

    def load(self, folder: Path) -> None:
        """Replace the weights with the weights of a checkpoint, and drop all keys and values.

        Running requests keep their tokens, and recompute keys and values with the new weights.

        Raises:
            CheckpointError: the checkpoint cannot be loaded; the old weights stay.
        """
        assert self._load is not None, "this engine does not own its weights"
        self._load(folder)
        self.engine.invalidate_cache()

    def abort(self, completion: Completion, reason: str = "abort") -> None:
        """End a completion, and free its blocks immediately."""
        self.engine.abort(completion.request, reason)
        self._running.pop(completion.request, None)
        completion.finish_reason = completion.finish_reason or reason

    def step(self, now_s: float = 0.0) -> list[Piece]:
        """Run one step of the engine, and return the new pieces."""
        pieces: list[Piece] = []
        for request, token, score, finished in self.engine.step(now_s):
            completion = self._running[request]
            stream = completion.stream
            if score is not None:
                completion.scores.append(score)
            is_text = token >= 0 and token not in self.engine.end_ids
            text = stream.take(token) if is_text else ""
            if stream.is_stopped and finished is None:
                self.engine.abort(request, finished := "stop")
            if finished is not None:
                text += stream.end()
                completion.finish_reason = "stop" if stream.is_stopped else finished
                del self._running[request]
            pieces.append(Piece(completion, text, token, score))
        return pieces


def scores_of(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenScore], begin: int = 0
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object of tokens, as in OpenAI's completions, and the offset after it.

    `begin` is the offset of the first token in the text, in characters.
    """
    contents = [bytes_of(tokenizer, token) for token in tokens]
    # In UTF-8 all bytes of a character but its first are continuation bytes.
    begun = (sum(byte & 0xC0 != 0x80 for byte in content) for content in contents)
    *offsets, end = accumulate(begun, initial=begin)
    found = {
        "tokens": list(map(shown, contents)),
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [
            {shown(bytes_of(tokenizer, id)): p for id, p in score.top} for score in scores
        ],
        "text_offset": offsets,
    }
    return found, end
