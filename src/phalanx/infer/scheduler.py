"""The scheduler: chooses which tokens of which completions the next step computes. No torch.

A step computes at most `budget` tokens. The tokens of a completion are its prompt and the tokens
generated so far; the first `num_computed` have keys and values in the cache, the rest is missing. A
step serves the running completions first, then the waiting ones, in the order of their arrival (Yu
et al. 2022, Orca, OSDI, section 4.1), and computes as many missing tokens of each as fit. This one
rule covers all cases:

    decode                 one token is missing
    chunked prefill        more are missing than fit (Agrawal et al. 2024, Sarathi-Serve, OSDI)
    mixed batch            decode and prefill in one step
    prefix cache hit       the completion starts with `num_computed` above 0
    preempted completion   it lost its blocks, and starts again with all tokens missing
    speculation            guessed tokens are computed after the one that is missing

A waiting completion is admitted as soon as a slot is free (continuous batching). Blocks are
reserved only for the tokens of the current step. If blocks run out, the completion that arrived
last is preempted: it releases its blocks and becomes the first of the waiting ones.

               add                admit                     finish
    prepared ------> waiting ----------------> running ----------------> finished
                        ^                      |     |
                        +------- preempt ------+     +-- the prompt is computed: its siblings
                                                         fork, and are the next to be admitted
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from phalanx.infer.detokenize import TextStream
from phalanx.infer.grammar import Matcher
from phalanx.infer.options import Sampling, TokenScore
from phalanx.infer.pool import ROOT, BlockCopy, BlockPool, BlockTable

if TYPE_CHECKING:
    from phalanx.infer.sampler import LogitRules

WATERMARK: Final = 0.01
"""Fraction of blocks that must stay free when a completion is admitted while others run, so that it
does not cause an immediate preemption."""


@dataclass(eq=False)
class Completion:
    """One continuation of a prompt, from its arrival to its end; `Engine.prepare` makes it.

    Attributes:
        prompt: tokens of the prompt; completions of one prompt share the list.
        sampling: sampling and stopping options.
        stream: decoder with the text; None if the engine has no tokenizer.
        number: index among the completions of one HTTP request.
        tokens: tokens of the prompt and generated tokens.
        scores: score of each generated token, if the options ask for `logprobs`.
        prompt_scores: score of each prompt token if the options ask for `prompt_logprobs`, None for
            the first and while not computed; completions of one prompt share the list.
        rules: what changes its logits; None if nothing does.
        stop_reason: stop text, or id of `stop_token_ids`, that ended it.
        finish_reason: "stop", "length", "abort" or "error"; None before its end.
        siblings: completions of the same prompt, which fork from this one once its prompt is
            computed.
        grammar: what the generated tokens must match; None for any tokens.
        ngrams: where the n-grams of the tokens end; see speculation.py.
        draft: guessed next tokens, which the current step computes after `tokens`.
        adapter: number of the adapter that computes it, see lora_modules.py; 0 for none.
        table: block table.
        num_computed: number of leading tokens whose keys and values are in the cache.
        num_cached: prompt tokens found in the prefix cache at first admission; 0 for a fork; None
            before admission.
        arrival_s, last_s: time of arrival, and of the latest token, seconds of `time.monotonic`.
    """

    prompt: list[int]
    sampling: Sampling
    stream: TextStream | None = None
    number: int = 0
    tokens: list[int] = field(default_factory=list[int])
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    prompt_scores: list[TokenScore | None] = field(default_factory=lambda: [])
    rules: LogitRules | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    siblings: list[Completion] = field(default_factory=lambda: [])
    grammar: Matcher | None = None
    ngrams: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    draft: list[int] = field(default_factory=list[int])
    adapter: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    num_cached: int | None = None
    arrival_s: float = field(default_factory=time.monotonic)
    last_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        # Adapters compute other keys and values of the same tokens.
        self.table.root = ROOT - self.adapter

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str:
        """The text generated so far, up to a stop string."""
        return "" if self.stream is None else self.stream.text


class CompletionSpan(NamedTuple):
    """Tokens [start, stop) of a completion and its draft, to be computed in one step."""

    completion: Completion
    start: int
    stop: int

    @property
    def computes_logits(self) -> bool:
        """Whether the step computes the logits for the completion's next token."""
        return self.stop >= len(self.completion.tokens)


@dataclass
class ScheduledStep:
    """Tokens that a step computes, and blocks to copy before it writes to the cache."""

    parts: list[CompletionSpan] = field(default_factory=list[CompletionSpan])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    num_tokens: int = 0


class Scheduler:
    """Distributes the token budget of each step over completions, and allocates their blocks.

    Attributes:
        pool: block allocator of the key-value cache.
        budget: most tokens of a step.
        max_running: most completions that run together.
        waiting, running: completions, in the order in which they are served.
        num_preemptions: number of preemptions.
        num_prompt_tokens: tokens of admitted prompts; a prompt shared by siblings counts once.
        num_cached_tokens: tokens of admitted prompts that were found in the prefix cache.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        budget: int = 512,
        slots: int = 64,
        is_chunked: bool = True,
        guess: Callable[[Completion, int], list[int]] | None = None,
    ) -> None:
        """Create a scheduler without completions.

        Without `is_chunked` a prompt is computed in one step, which may exceed the budget. `guess`
        returns at most a number of tokens that may follow a completion's.
        """
        self.pool, self.budget, self.max_running = pool, budget, slots
        self.is_chunked, self.guess = is_chunked, guess
        self.waiting: deque[Completion] = deque()
        self.running: list[Completion] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any completion runs or waits."""
        return bool(self.waiting or self.running)

    @property
    def waste(self) -> float:
        """Fraction of positions in the running completions' blocks that contain no token."""
        size = self.pool.block_size
        used = {
            block: min(max(completion.num_computed - number * size, 0), size)
            for completion in self.running
            for number, block in enumerate(completion.table.blocks)
        }
        return 1 - sum(used.values()) / (len(used) * size) if used else 0.0

    def finish(self, completion: Completion, reason: str) -> None:
        """Finish a running or waiting completion, and free its blocks immediately.

        After "error", no other completion finds its blocks, whose values are not finite.
        """
        if reason == "error":
            self.pool.unpublish(completion.table)
        completion.finish_reason = reason
        self.pool.free(completion.table)
        if completion in self.running:
            self.running.remove(completion)
        elif completion in self.waiting:
            self.waiting.remove(completion)
        self.waiting.extendleft(reversed(_unfinished(completion.siblings)))  # no longer forks
        completion.siblings = []

    def schedule(self) -> ScheduledStep:
        """Choose the tokens of the next step, and reserve the blocks for their keys and values.

        Full blocks are published before the step runs. This is safe because each layer of a step
        writes all keys and values before any completion reads them.
        """
        # One step, with a budget of 8 tokens:
        #
        #     running    A decodes           1 token       continue: in order of arrival
        #                B decodes           1 token
        #     waiting    C, prompt of 20     6 tokens      admit: a chunk, the rest of the budget
        #                D                   0             no budget is left: it waits
        #
        # Nobody is admitted in a step that preempted, whose blocks did not even hold the running
        # ones.
        step = ScheduledStep()
        num_preempted = self.num_preemptions
        for completion in list(self.running):
            if step.num_tokens >= self.budget:
                break
            if completion in self.running:
                self._continue(completion, step)
        if self.num_preemptions == num_preempted:
            while self.waiting and len(self.running) < self.max_running:
                if step.num_tokens >= self.budget or not self._admit(self.waiting[0], step):
                    break
        for completion, _, stop in step.parts:
            completion.num_computed = stop
            if stop < len(completion.prompt):
                continue
            # The prompt is computed: its siblings share its blocks, and each of them computes the
            # last token again, which writes to a copy of the last block.
            for sibling in reversed(_unfinished(completion.siblings)):
                sibling.table = self.pool.fork(completion.table)
                sibling.num_computed = len(sibling.prompt) - 1
                sibling.num_cached = 0
                self.waiting.appendleft(sibling)
            completion.siblings = []
        return step

    def preempt_all(self) -> None:
        """Preempt all completions and clear the prefix cache, because the weights have changed."""
        for completion in reversed(self.running):
            self._preempt(completion)
        for completion in self.waiting:
            self._drop(completion)
        self.pool.clear_prefixes()

    def _continue(self, completion: Completion, step: ScheduledStep) -> None:
        """Schedule tokens of a running completion; preempt the last ones until its blocks fit."""
        # While too few blocks are free, they are taken from one holder after another:
        #
        #     1. a fork that waits, which loses only what it shares with its sibling
        #     2. the completion that arrived last, which computes its tokens again later
        #     3. this completion itself, when it is the last
        start, stop = completion.num_computed, self._chunk_end(completion, step)
        if self.guess is not None and stop == len(completion.tokens):
            # A draft takes the budget that one token for each running completion leaves, and only
            # free blocks; the token after the draft is generated too.
            room = self.budget - step.num_tokens - (stop - start) - len(self.running)
            room = min(room, completion.sampling.max_tokens - completion.num_generated - 1)
            completion.draft = self.guess(completion, room) if room > 0 else []
            if (end := stop + len(completion.draft)) > stop:
                if (copies := self.pool.reserve(completion.table, start, end)) is not None:
                    self._append_part(CompletionSpan(completion, start, end), copies, step)
                    return
                completion.draft = []
        while (copies := self.pool.reserve(completion.table, start, stop)) is None:
            fork = next((each for each in self.waiting if each.table.blocks), None)
            if fork is not None:  # it waits with blocks, and has not started
                self._drop(fork)
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is completion:
                return
        self._append_part(CompletionSpan(completion, start, stop), copies, step)

    def _admit(self, completion: Completion, step: ScheduledStep) -> bool:
        """Schedule the first tokens of a waiting completion; return False if no blocks are left."""
        if not completion.table.blocks:
            # A prefix that is found is not computed, so it has no logits to score its tokens by.
            if None not in completion.prompt_scores[1:]:
                completion.table = self.pool.match(completion.tokens, completion.table.root)
            completion.num_computed = len(completion.table.blocks) * self.pool.block_size
        start, stop = completion.num_computed, self._chunk_end(completion, step)
        copies = self._reserve_beside_others(completion, start, stop)
        # Nothing runs, so no completion will free blocks: forks that wait ahead have to give theirs
        # up.
        if copies is None and not self.running:  # waiting forks hold the blocks
            for other in self.waiting:
                if other is not completion:
                    self._drop(other)
            copies = self._reserve_beside_others(completion, start, stop)
        if copies is None:
            self._drop(completion)
            return False
        if completion.num_cached is None:
            completion.num_cached = start
            self.num_prompt_tokens += len(completion.prompt)
            self.num_cached_tokens += start
        self.waiting.remove(completion)
        self.running.append(completion)
        self._append_part(CompletionSpan(completion, start, stop), copies, step)
        return True

    def _reserve_beside_others(
        self, completion: Completion, start: int, stop: int
    ) -> list[BlockCopy] | None:
        """Reserve blocks for a waiting completion; beside others leave WATERMARK blocks free."""
        missing = self.pool.blocks_for(stop) - len(completion.table.blocks)
        spare = int(WATERMARK * self.pool.num_blocks) if self.running else 0
        if missing + spare > self.pool.num_free:
            return None
        return self.pool.reserve(completion.table, start, stop)

    def _chunk_end(self, completion: Completion, step: ScheduledStep) -> int:
        """Return the end of the span to schedule in a step with room for at least one token."""
        if not self.is_chunked:
            return len(completion.tokens)  # may exceed the budget
        return min(len(completion.tokens), completion.num_computed + self.budget - step.num_tokens)

    def _append_part(
        self, part: CompletionSpan, copies: list[BlockCopy], step: ScheduledStep
    ) -> None:
        step.parts.append(part)
        step.copies += copies
        step.num_tokens += part.stop - part.start
        tokens = part.completion.tokens  # a block with a draft has no final content
        self.pool.publish(part.completion.table, tokens, min(part.stop, len(tokens)))

    def _preempt(self, completion: Completion) -> None:
        self.running.remove(completion)
        self._drop(completion)
        self.waiting.appendleft(completion)
        self.num_preemptions += 1

    def _drop(self, completion: Completion) -> None:
        """Free the blocks of a completion, so that all of its tokens are missing."""
        self.pool.free(completion.table)
        completion.num_computed = 0


def _unfinished(completions: list[Completion]) -> list[Completion]:
    return [each for each in completions if each.finish_reason is None]
