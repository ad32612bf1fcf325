"""The engine: takes requests and generates their tokens, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.errors import ConfigError, PhalanxError
from phalanx.infer.options import RequestError, Sampling, TokenScore
from phalanx.infer.paged import FlatStep, StepSpan
from phalanx.infer.sampler import choose
from phalanx.infer.scheduler import GenerationRequest, ScheduledStep, Scheduler

NOT_FINITE = "the model's logits are not finite"
"""Message for a request that finished with "error"."""


class EngineFailed(PhalanxError):
    """Generation failed: the engine has stopped, or the model's logits are not finite."""

    exit_code = 1


class Logits(Protocol):
    """A callable that computes the logits of a flat step, on this rank or on all ranks of tp."""

    def __call__(self, step: FlatStep) -> Tensor:
        """Return the logits [len(step.rows), V]."""
        ...


class LiveLogits(Logits, Protocol):
    """Logits of a model whose weights can be replaced while requests run."""

    def load(self, folder: Path) -> None:
        """Replace the weights with the weights of a checkpoint."""
        ...


class NewToken(NamedTuple):
    """A generated token; `finished` is the finish reason if it is the last of its request."""

    request: GenerationRequest
    token: int
    score: TokenScore | None
    finished: str | None


@dataclass
class Counts:
    """Counters of an engine since its construction."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0


class Engine:
    """Generates tokens for many requests at once.

    Attributes:
        scheduler: chooses the tokens of each step.
        counts: counters since construction.
        max_seq_len: longest sequence of the model: prompt and continuation, tokens.
        end_ids: ids of the tokens that end a text.
    """

    def __init__(
        self,
        logits: Logits,
        scheduler: Scheduler,
        *,
        max_seq_len: int,
        end_ids: Sequence[int] = (),
        num_ids: int | None = None,
    ) -> None:
        """Create an engine.

        Args:
            logits: computes the logits of a step.
            scheduler: a scheduler without requests.
            max_seq_len: longest sequence of the model, tokens.
            end_ids: ids of the tokens that end a text.
            num_ids: number of ids of the tokenizer; model ids from `num_ids` on are never sampled.
        """
        self.scheduler, self.max_seq_len = scheduler, max_seq_len
        self.counts = Counts()
        self._logits, self.end_ids, self._num_ids = logits, frozenset(end_ids), num_ids

    def add(
        self, prompt: Sequence[int], *samplings: Sampling, now_s: float = 0.0
    ) -> list[GenerationRequest]:
        """Queue a request for each of `samplings`; the requests share the prompt's cache blocks.

        Raises:
            ConfigError: the prompt is empty, or too long for the model or the cache.
        """
        for sampling in samplings:
            self.check(prompt, sampling)
        first, *others = [GenerationRequest(list(prompt), each) for each in samplings]
        first.siblings = list(others)
        for other in others:
            other.arrival_s = now_s
        self.scheduler.add(first, now_s)
        return [first, *others]

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise ConfigError if a prompt is empty, or too long with `max_tokens` more."""
        if not prompt:
            raise ConfigError("the prompt has no token; expected at least one")
        room = self.max_total_tokens - len(prompt)
        if room < sampling.max_tokens:
            num_prompt = self.max_total_tokens - sampling.max_tokens
            if room > 0:
                nearest = f"max_tokens {room}"
            elif num_prompt > 0:
                nearest = f"{num_prompt} prompt tokens"
            else:
                nearest = f"{self.max_total_tokens - 1} prompt tokens with max_tokens 1"
            owner = "model" if self.max_total_tokens == self.max_seq_len else "cache"
            raise RequestError(
                f"a prompt of {len(prompt)} tokens with max_tokens {sampling.max_tokens} needs "
                f"{len(prompt) + sampling.max_tokens}; the {owner} has {self.max_total_tokens} "
                f"positions; the nearest that fits is {nearest}",
                code="context_length_exceeded",
            )

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a prompt and its continuation that both model and cache allow."""
        pool = self.scheduler.pool
        return min(self.max_seq_len, pool.num_blocks * pool.block_size)

    def abort(self, request: GenerationRequest, reason: str = "abort") -> None:
        """End a request, and free its blocks immediately."""
        if request.finished is None:
            self.scheduler.finish(request, reason)

    @torch.inference_mode()
    def step(self, now_s: float = 0.0) -> list[NewToken]:
        """Run one step, and return the new token of each request that received one."""
        step = self.scheduler.schedule(now_s)
        if not step.parts:
            return []
        self.counts.steps += 1
        self.counts.computed_tokens += step.num_tokens
        requests = [part.request for part in step.parts if part.computes_logits]
        logits_NV = self._logits(flatten(step))
        if not requests:
            return []
        if self._num_ids is not None and self._num_ids < logits_NV.shape[1]:
            logits_NV[:, self._num_ids :] = -float("inf")
        tokens, scores = choose(
            logits_NV,
            [request.sampling for request in requests],
            [request.num_generated for request in requests],
        )
        return list(map(self._append, requests, tokens, scores))

    def _append(self, request: GenerationRequest, token: int, score: TokenScore | None) -> NewToken:
        """Append a token to its request; finish the request if it is the last token.

        A negative token means logits that are not finite: the request fails.
        """
        if token < 0:
            self.scheduler.fail(request)
            return NewToken(request, token, None, "error")
        request.tokens.append(token)
        self.counts.generated_tokens += 1
        finished = None
        if token in self.end_ids and not request.sampling.ignore_end:
            finished = "stop"
        elif request.num_generated >= request.sampling.max_tokens:
            finished = "length"
        if finished is not None:
            self.scheduler.finish(request, finished)
        return NewToken(request, token, score, finished)

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling] | Sampling
    ) -> list[list[int]]:
        """Continue all prompts, and return their new tokens."""
        if isinstance(samplings, Sampling):
            samplings = [samplings] * len(prompts)
        requests = [self.add(*pair)[0] for pair in zip(prompts, samplings, strict=True)]
        self.scheduler.is_draining = True
        while self.scheduler.has_work:
            self.step()
        return [request.tokens[len(request.prompt) :] for request in requests]

    def invalidate_cache(self) -> None:
        """Drop all keys and values; running requests are recomputed with the new weights."""
        self.scheduler.preempt_all()


def flatten(step: ScheduledStep) -> FlatStep:
    """Convert a scheduled step to token ids, spans and row numbers."""
    tokens: list[int] = []
    rows: list[int] = []
    spans: list[StepSpan] = []
    for request, start, stop in step.parts:
        tokens += request.tokens[start:stop]
        spans.append(StepSpan(start, stop, list(request.table.blocks)))
        if stop == len(request.tokens):
            rows.append(len(tokens) - 1)
    return FlatStep(tokens, spans, rows, tuple(step.copies))
