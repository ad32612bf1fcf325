"""The scheduler: chooses which tokens of which requests the next step computes. No torch.

A step computes at most `budget` tokens. The tokens of a request are its prompt and the tokens
generated so far; the first `num_computed` have keys and values in the cache, the rest is missing. A
step serves the running requests first, then the waiting ones, in the order of their arrival (Yu et
al. 2022, Orca, OSDI, section 4.1), and computes as many missing tokens of each as fit. This one
rule covers all cases:

    decode              one token is missing
    chunked prefill     more are missing than fit (Agrawal et al. 2024, Sarathi-Serve, OSDI)
    mixed batch         decode and prefill in one step
    prefix cache hit    the request starts with `num_computed` above 0
    preempted request   it lost its blocks, and starts again with all tokens missing

Blocks are reserved only for the tokens of the current step. If blocks run out, the request that
arrived last is preempted: it releases its blocks and becomes the first of the waiting requests.

    rolling   a request is admitted as soon as a slot is free (continuous batching)
    dynamic   a batch starts when it is full, or its first request has waited for `delay_s`;
              no other request is admitted until all requests of the batch have finished
    static    as dynamic, but a batch starts only when it is full, or no more requests will come
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.infer.options import Batching, Sampling
from phalanx.infer.pool import BlockCopy, BlockPool, BlockTable

WATERMARK: Final = 0.01
"""Fraction of blocks that must stay free when a request is admitted while others run, so that it
does not cause an immediate preemption."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt to continue, with its generated tokens and its cache blocks.

    Attributes:
        prompt: tokens of the prompt.
        sampling: sampling and stopping options.
        tokens: tokens of the prompt and generated tokens.
        num_computed: number of leading tokens whose keys and values are in the cache.
        num_cached: prompt tokens found in the prefix cache at first admission; 0 for a fork; None
            before admission.
        table: block table.
        siblings: requests with the same prompt, which fork from this one once its prompt is
            computed.
        arrival_s: time of arrival, seconds on the clock of `Scheduler.schedule`.
        finished: finish reason; None while it runs or waits.
    """

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_cached: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    siblings: list[GenerationRequest] = field(default_factory=lambda: [])
    arrival_s: float = 0.0
    finished: str | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def num_missing(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.prompt)


class RequestSpan(NamedTuple):
    """Tokens [start, stop) of a request, to be computed in one step."""

    request: GenerationRequest
    start: int
    stop: int

    @property
    def computes_logits(self) -> bool:
        """Whether the step computes the logits for the request's next token."""
        return self.stop == len(self.request.tokens)


@dataclass
class ScheduledStep:
    """Tokens that a step computes, and blocks to copy before it writes to the cache."""

    parts: list[RequestSpan] = field(default_factory=list[RequestSpan])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(part.stop - part.start for part in self.parts)


class Scheduler:
    """Distributes the token budget of each step over requests, and allocates their blocks.

    Attributes:
        pool: block allocator of the key-value cache.
        budget: most tokens of a step.
        max_running: most requests that run together.
        waiting, running: requests, in the order in which they are served.
        is_draining: whether no further request will come, so that static batches need not be full.
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
        batching: Batching = "rolling",
        is_chunked: bool = True,
        delay_s: float = 0.1,
    ) -> None:
        """Create a scheduler without requests.

        Without `is_chunked` a prompt is computed in one step, which may exceed the budget.
        """
        self.pool, self.budget, self.max_running = pool, budget, slots
        self.batching, self.is_chunked, self.delay_s = batching, is_chunked, delay_s
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.is_draining = False
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._num_admissible = 0

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.waiting or self.running)

    @property
    def waste(self) -> float:
        """Fraction of positions in the running requests' blocks that contain no token."""
        size = self.pool.block_size
        used = {
            block: min(max(request.num_computed - number * size, 0), size)
            for request in self.running
            for number, block in enumerate(request.table.blocks)
        }
        return 1 - sum(used.values()) / (len(used) * size) if used else 0.0

    def add(self, request: GenerationRequest, now_s: float = 0.0) -> None:
        """Append a request, which fits into the whole cache, to the waiting requests."""
        most = len(request.prompt) + request.sampling.max_tokens
        assert self.pool.blocks_for(most) <= self.pool.num_blocks, "Engine.check refuses it"
        request.arrival_s = now_s
        self.waiting.append(request)

    def finish(self, request: GenerationRequest, reason: str) -> None:
        """Finish a running or waiting request, and free its blocks immediately."""
        request.finished = reason
        self.pool.free(request.table)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.waiting.extendleft(reversed(_unfinished(request.siblings)))  # no longer forks
        request.siblings = []

    def fail(self, request: GenerationRequest) -> None:
        """Finish a request whose logits are not finite; no other request finds its blocks."""
        self.pool.unpublish(request.table)
        self.finish(request, "error")

    def schedule(self, now_s: float = 0.0) -> ScheduledStep:
        """Choose the tokens of the next step, and reserve the blocks for their keys and values.

        Full blocks are published before the step runs. This is safe because each layer of a step
        writes all keys and values before any request reads them.
        """
        step = ScheduledStep()
        num_preempted = self.num_preemptions
        for request in list(self.running):
            if step.num_tokens >= self.budget:
                break
            if request in self.running:
                self._continue(request, step)
        if self.num_preemptions == num_preempted:
            for request in self._admissible(now_s):
                if step.num_tokens >= self.budget or not self._admit(request, step):
                    break
        for part in step.parts:
            part.request.num_computed = part.stop
            if part.stop >= len(part.request.prompt):
                self._fork(part.request)
        return step

    def preempt_all(self) -> None:
        """Preempt all requests and clear the prefix cache, because the weights have changed."""
        for request in reversed(self.running):
            self._preempt(request)
        for request in self.waiting:
            self._drop(request)
        self.pool.clear_prefixes()

    def _continue(self, request: GenerationRequest, step: ScheduledStep) -> None:
        """Schedule tokens of a running request; preempt the last ones until its blocks fit."""
        start, stop = request.num_computed, self._chunk_end(request, step)
        while (copies := self.pool.reserve(request.table, start, stop)) is None:
            holder = next((r for r in self.waiting if r.table.blocks), None)
            if holder is not None:  # a waiting fork, which has not started
                self._drop(holder)
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return
        self._append_part(RequestSpan(request, start, stop), copies, step)

    def _admit(self, request: GenerationRequest, step: ScheduledStep) -> bool:
        """Schedule the first tokens of a waiting request; return False if its blocks do not fit."""
        if not request.table.blocks:
            request.table = self.pool.match(request.tokens)
            request.num_computed = len(request.table.blocks) * self.pool.block_size
        start, stop = request.num_computed, self._chunk_end(request, step)
        copies = self._reserve_beside_others(request, start, stop)
        if copies is None and not self.running:  # waiting forks hold the blocks
            for other in self.waiting:
                if other is not request:
                    self._drop(other)
            copies = self._reserve_beside_others(request, start, stop)
        if copies is None:
            self._drop(request)
            return False
        if request.num_cached is None:
            request.num_cached = start
            self.num_prompt_tokens += len(request.prompt)
            self.num_cached_tokens += start
        self.waiting.remove(request)
        self.running.append(request)
        self._num_admissible -= 1
        self._append_part(RequestSpan(request, start, stop), copies, step)
        return True

    def _reserve_beside_others(
        self, request: GenerationRequest, start: int, stop: int
    ) -> list[BlockCopy] | None:
        """Reserve blocks for a waiting request; while others run, leave WATERMARK blocks free."""
        missing = self.pool.blocks_for(stop) - len(request.table.blocks)
        spare = int(WATERMARK * self.pool.num_blocks) if self.running else 0
        if missing + spare > self.pool.num_free:
            return None
        return self.pool.reserve(request.table, start, stop)

    def _chunk_end(self, request: GenerationRequest, step: ScheduledStep) -> int:
        """Return the end of the span to schedule in a step with room for at least one token."""
        if not self.is_chunked:
            return len(request.tokens)  # may exceed the budget
        room = self.budget - step.num_tokens
        return request.num_computed + min(request.num_missing, room)

    def _append_part(self, part: RequestSpan, copies: list[BlockCopy], step: ScheduledStep) -> None:
        step.parts.append(part)
        step.copies += copies
        self.pool.publish(part.request.table, part.request.tokens, part.stop)

    def _admissible(self, now_s: float) -> Iterator[GenerationRequest]:
        """Yield the first waiting request while the batching policy admits one.

        The caller must admit it, which removes it from `waiting`, or stop iterating.
        """
        if self.batching == "rolling":
            self._num_admissible = self.max_running
        elif not self.running and self.waiting and self._may_begin(now_s):
            self._num_admissible = min(self.max_running, len(self.waiting))
        while self.waiting and self._num_admissible > 0 and len(self.running) < self.max_running:
            yield self.waiting[0]

    def _may_begin(self, now_s: float) -> bool:
        """Return whether a dynamic or static batch starts now."""
        if len(self.waiting) >= self.max_running or self.is_draining:
            return True
        waited_s = now_s - self.waiting[0].arrival_s
        return self.batching == "dynamic" and waited_s >= self.delay_s

    def _fork(self, request: GenerationRequest) -> None:
        """Share the prompt's blocks with the siblings; each recomputes only the last token."""
        for sibling in reversed(_unfinished(request.siblings)):
            sibling.table = self.pool.fork(request.table)
            sibling.num_computed = len(sibling.prompt) - 1
            sibling.num_cached = 0
            self.waiting.appendleft(sibling)
        request.siblings = []

    def _preempt(self, request: GenerationRequest) -> None:
        self.running.remove(request)
        self._drop(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        self._num_admissible += 1

    def _drop(self, request: GenerationRequest) -> None:
        """Free the blocks of a request, so that all of its tokens are missing."""
        self.pool.free(request.table)
        request.num_computed = 0


def _unfinished(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    return [request for request in requests if request.finished is None]
