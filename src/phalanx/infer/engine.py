"""The engine: generates tokens and text for many completions at once, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phalanx.data.tokenizer import count_ids
from phalanx.errors import ConfigError, PhalanxError
from phalanx.infer.detokenize import TextStream
from phalanx.infer.grammar import Matcher
from phalanx.infer.options import RequestError, Sampling, TokenScore
from phalanx.infer.paged import FlatStep, ScoredRow, StepSpan
from phalanx.infer.sampler import LogitRules, choose
from phalanx.infer.scheduler import Completion, Scheduler

NOT_FINITE = "the model's logits are not finite"
"""Message for a completion that finished with "error"."""


class EngineFailed(PhalanxError):
    """Generation failed: the engine has stopped, or the model's logits are not finite."""

    exit_code = 1


Logits = Callable[[FlatStep], Tensor]
"""Computes the logits [len(step.rows), V] of a step, on this rank or on all ranks of tp."""


class Piece(NamedTuple):
    """What one step adds to a completion: a token, and the text, possibly empty, that it completes.

    A piece does not change, so threads may share it. `finish_reason` is None unless it is the last.
    """

    completion: Completion
    text: str
    token: int
    score: TokenScore | None
    finish_reason: str | None


@dataclass
class Counts:
    """Counters of an engine since its construction."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


class Engine:
    """Generates the tokens and texts of many completions at once.

    Attributes:
        scheduler: chooses the tokens of each step.
        tokenizer: decodes the tokens; None if no text is wanted.
        counts: counters since construction.
        end_ids: ids of the tokens that end a text.
        max_total_tokens: most tokens of a prompt and its continuation that model and cache allow.
    """

    def __init__(
        self,
        logits: Logits,
        scheduler: Scheduler,
        *,
        max_seq_len: int,
        end_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        load: Callable[[Path], None] | None = None,
    ) -> None:
        """Create an engine.

        Args:
            logits: computes the logits of a step.
            scheduler: a scheduler without completions.
            max_seq_len: longest sequence of the model, tokens.
            end_ids: ids of the tokens that end a text.
            tokenizer: decodes the tokens; model ids that it lacks are never sampled.
            load: replaces the weights with the weights of a checkpoint; None if they are fixed.
        """
        pool = scheduler.pool
        cache_tokens = pool.num_blocks * pool.block_size
        self.scheduler, self.tokenizer, self.counts = scheduler, tokenizer, Counts()
        self.max_total_tokens = min(max_seq_len, cache_tokens)
        self.end_ids = frozenset(end_ids)
        self._smaller = "model" if max_seq_len <= cache_tokens else "cache"
        self._logits, self._load = logits, load
        self._num_ids = None if tokenizer is None else count_ids(tokenizer)

    def prepare(
        self,
        prompt: Sequence[int],
        *samplings: Sampling,
        number: int = 0,
        grammar: Matcher | None = None,
        skips_special: bool = True,
        adapter: int = 0,
    ) -> list[Completion]:
        """Make a completion of the prompt for each of `samplings`, numbered from `number` on.

        Any thread may call this.

        Args:
            prompt: tokens.
            samplings: options of each completion.
            number: number of the first one.
            grammar: what the generated tokens must match, before the first one.
            skips_special: whether the text omits special tokens.
            adapter: number of the adapter that computes it; 0 for none.

        Raises:
            ConfigError: the prompt is empty, or too long with `max_tokens` more.
        """
        if not prompt:
            raise ConfigError("the prompt has no token; expected at least one")
        most_new = max(sampling.max_tokens for sampling in samplings)
        room = self.max_total_tokens - len(prompt)
        if room < most_new:
            num_prompt = self.max_total_tokens - most_new
            if room > 0:
                nearest = f"max_tokens {room}"
            elif num_prompt > 0:
                nearest = f"{num_prompt} prompt tokens"
            else:
                nearest = f"{self.max_total_tokens - 1} prompt tokens with max_tokens 1"
            raise RequestError(
                f"a prompt of {len(prompt)} tokens with max_tokens {most_new} needs "
                f"{len(prompt) + most_new}; the {self._smaller} has {self.max_total_tokens} "
                f"positions; the nearest that fits is {nearest}",
                code="context_length_exceeded",
            )
        shared, tokenizer = list(prompt), self.tokenizer
        is_scored = any(each.prompt_logprobs is not None for each in samplings)
        prompt_scores: list[TokenScore | None] = [None] * len(prompt) if is_scored else []
        return [
            Completion(
                shared,
                each,
                tokenizer
                and TextStream(
                    *(tokenizer, each.stop, prompt),
                    skips_special=skips_special and each.skip_special_tokens,
                    includes_stop=each.include_stop,
                ),
                number + choice,
                rules=LogitRules(each, prompt, self.end_ids) if each.changes_logits else None,
                prompt_scores=prompt_scores,
                grammar=grammar and grammar.copy(),
                adapter=adapter,
            )
            for choice, each in enumerate(samplings)
        ]

    def queue(self, completions: Sequence[Completion]) -> None:
        """Queue the prepared completions of one prompt; they share the prompt's cache blocks."""
        first, *first.siblings = completions
        self.scheduler.waiting.append(first)

    def add(self, prompt: Sequence[int], *samplings: Sampling) -> list[Completion]:
        """Prepare and queue a completion of the prompt for each of `samplings`."""
        completions = self.prepare(prompt, *samplings)
        self.queue(completions)
        return completions

    def abort(self, completion: Completion) -> None:
        """End a completion that has not ended, and free its blocks immediately."""
        if completion.finish_reason is None:
            self.scheduler.finish(completion, "abort")

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Run one step, and return the new piece of each completion that received a token."""
        step = self.scheduler.schedule()
        if not step.parts:
            return []
        self.counts.steps += 1
        self.counts.computed_tokens += step.num_tokens
        # Four completions in one step, as one row of tokens:
        #
        #     tokens    a17 | b0 b1 b2 b3 | c8 | d5 x y     decode, a chunk, decode, with a draft
        #     spans     [17, 18)  [0, 4)  [8, 9)  [5, 8)
        #     rows      0                  5     6  7 8     b's prompt continues: no logits
        flat = FlatStep([], [], [], tuple(step.copies), num_ids=self._num_ids)
        completions: list[Completion] = []
        places: list[tuple[list[TokenScore | None], int]] = []  # of the scores of prompt tokens
        samplings: list[Sampling] = []  # of each row, as the next two
        numbers: list[int] = []
        masks: dict[int, Tensor] = {}
        changes: dict[int, Callable[[Tensor], None]] = {}
        for part in step.parts:
            completion, start, stop = part
            draft = completion.draft
            tokens = [*completion.tokens, *draft] if draft else completion.tokens
            flat.tokens.extend(tokens[start:stop])
            flat.spans.append(StepSpan(start, stop, list(completion.table.blocks)))
            flat.adapters.append(completion.adapter)
            scores = completion.prompt_scores
            for at in range(start, min(stop, len(scores) - 1)) if scores else ():
                if scores[at + 1] is None:
                    num_top = completion.sampling.prompt_logprobs or 0
                    row = len(flat.tokens) - stop + at
                    flat.scored.append(ScoredRow(row, completion.prompt[at + 1], num_top))
                    places.append((scores, at + 1))
            if part.computes_logits:
                if completion.grammar is not None:
                    masks |= enumerate(completion.grammar.masks(draft), len(flat.rows))
                if (rules := completion.rules) is not None:
                    for n in range(1 + len(draft)):
                        generated = [*completion.new_tokens, *draft[:n]]
                        changes[len(flat.rows) + n] = partial(rules.change, generated)
                completions.append(completion)
                for n in range(1 + len(draft)):
                    flat.rows.append(len(flat.tokens) - 1 - len(draft) + n)
                    samplings.append(completion.sampling)
                    numbers.append(completion.num_generated + n)
        logits_NV = self._logits(flat)
        for (prompt_scores, at), scored in zip(places, flat.scored, strict=True):
            prompt_scores[at] = scored.score
        if not completions:
            return []
        chosen = zip(
            *choose(logits_NV, samplings, numbers, self._num_ids, masks, changes), strict=True
        )
        pieces: list[Piece] = []
        for completion in completions:
            draft, completion.draft = completion.draft, []
            rows = [next(chosen) for _ in range(1 + len(draft))]
            self.counts.guessed_tokens += len(draft)
            self.counts.accepted_tokens -= 1
            for guess, (token, score) in zip([*draft, None], rows, strict=True):
                pieces.append(self._append(completion, token, score))
                self.counts.accepted_tokens += 1
                if token != guess or completion.finish_reason is not None:
                    break
            completion.num_computed = len(completion.tokens) - 1
        return pieces

    def _append(self, completion: Completion, token: int, score: TokenScore | None) -> Piece:
        """Append a token and its text to a completion, and finish it if this is its end.

        A negative token means logits that are not finite: the completion fails. So it does if its
        grammar fails.
        """
        stream, sampling, text, reason = completion.stream, completion.sampling, "", None
        if token < 0 or (completion.num_generated == 0 and _has_nan(completion.prompt_scores)):
            token, reason = -1, "error"
        elif sampling.max_tokens == 0:
            token, score, reason = -1, None, "length"
        else:
            completion.tokens.append(token)
            self.counts.generated_tokens += 1
            if score is not None:
                completion.scores.append(score)
            is_whole, is_stop_id = False, token in sampling.stop_token_ids
            is_end = is_stop_id or (token in self.end_ids and not sampling.ignore_end)
            if (grammar := completion.grammar) is not None:
                is_whole = grammar.take(token)
            if stream is not None and (not is_end or sampling.include_stop):
                is_early = completion.num_generated <= sampling.min_tokens
                text = stream.take(token, may_stop=not is_early)
            if grammar is not None and grammar.failure is not None:
                reason = "error"
            elif (stream is not None and stream.stopped_by is not None) or (is_whole or is_end):
                reason, completion.stop_reason = "stop", token if is_stop_id else None
            elif completion.num_generated >= sampling.max_tokens:
                reason = "length"
        if reason is not None:
            if stream is not None:
                text += stream.end()
                if stream.stopped_by is not None:
                    reason, completion.stop_reason = "stop", stream.stopped_by
            self.scheduler.finish(completion, reason)
        return Piece(completion, text, token, score, reason)

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling] | Sampling
    ) -> list[list[int]]:
        """Continue all prompts, and return their new tokens."""
        if isinstance(samplings, Sampling):
            samplings = [samplings] * len(prompts)
        completions = [self.add(*pair)[0] for pair in zip(prompts, samplings, strict=True)]
        while self.scheduler.has_work:
            self.step()
        return [completion.new_tokens for completion in completions]

    def load(self, folder: Path) -> None:
        """Replace the weights with the weights of a checkpoint, and drop all keys and values.

        Running completions keep their tokens, and are recomputed with the new weights.

        Raises:
            CheckpointError: the checkpoint cannot be loaded; the old weights stay.
        """
        assert self._load is not None, "this engine does not own its weights"
        self._load(folder)
        self.scheduler.preempt_all()


def _has_nan(scores: Sequence[TokenScore | None]) -> bool:
    return any(each is not None and math.isnan(each.logprob) for each in scores)
