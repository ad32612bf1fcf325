"""Which tokens of which requests the next step computes. No torch.

A step computes at most `budget` tokens. Each request has tokens, its prompt and what was generated
so far, of which the first `num_computed` have keys and values in the cache. A step takes first from
the running requests, then from the waiting ones, in the order of their arrival (Yu et al. 2022,
Orca, OSDI, section 4.1), and from each as many of the missing tokens as fit. So one rule makes all
of these:

    a decode                one token is missing
    a prefill in chunks     more are missing than fit (Agrawal et al. 2024, Sarathi-Serve, OSDI)
    a mixed batch           both, in one step
    a hit in the prefixes   the request begins with `num_computed` above 0
    a preempted request     it lost its blocks, and begins again with all tokens missing

Nothing is reserved beyond the tokens of a step. Where blocks run out, the request that arrived last
gives its blocks back and waits again in front of the others; its tokens are recomputed.

    rolling   a request is admitted as soon as a slot is free
    dynamic   a batch begins when it is full, or its first request has waited for `delay_s`;
              none is admitted until all of it have finished
    static    the same, but a batch begins only when it is full, or no more requests will come
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from phalanx.errors import ConfigError
from phalanx.infer.options import Batching, Sampling
from phalanx.infer.pool import BlockCopy, BlockPool, BlockTable

WATERMARK: Final = 0.01
"""Part of the blocks that stay free when a request is admitted beside others, so that those are not
preempted at once."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt that is to be continued.

    Attributes:
        prompt: its tokens.
        sampling: how tokens are chosen, and when the request ends.
        tokens: the prompt and what was generated.
        num_computed: tokens whose keys and values are in the cache.
        num_found: tokens of the prompt that the cache had when it was first admitted; 0 for a fork.
        table: its blocks.
        siblings: requests with the same prompt, which fork from this one when its prompt is
            computed.
        arrival_s: when it was added, on the clock of `Scheduler.schedule`.
        finished: why it ended; None while it has not.
    """

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_found: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    siblings: list[GenerationRequest] = field(default_factory=lambda: [])
    arrival_s: float = 0.0
    finished: str | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def num_missing(self) -> int:
        """Tokens that are to be computed before the next one can be chosen."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens that were generated."""
        return len(self.tokens) - len(self.prompt)


class Part(NamedTuple):
    """The tokens from `start` to `stop` of a request, to be computed in one step."""

    request: GenerationRequest
    start: int
    stop: int

    @property
    def gives_token(self) -> bool:
        """Whether the step has the logits of the request's next token."""
        return self.stop == len(self.request.tokens)


@dataclass
class ScheduledStep:
    """What one step computes, and the blocks to be copied before it writes."""

    parts: list[Part] = field(default_factory=list[Part])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.stop - part.start for part in self.parts)


class Scheduler:
    """Deals the tokens of steps out to requests.

    Attributes:
        pool: the blocks.
        budget: most tokens of a step.
        slots: most requests that run together.
        waiting, running: the requests, in the order in which they are served.
        is_draining: whether no further request will come, so that static batches need not be full.
        num_preemptions: how often a request lost its blocks.
        num_prompt_tokens: of all admitted prompts; one that several requests share counts once.
        num_found_tokens: of all admitted prompts, those that the cache had.
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
        """Make a scheduler without requests.

        Without chunks a prompt is computed in one step, which may pass the budget by it.
        """
        self.pool, self.budget, self.slots = pool, budget, slots
        self.batching, self.is_chunked, self.delay_s = batching, is_chunked, delay_s
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.is_draining = False
        self.num_preemptions = self.num_prompt_tokens = self.num_found_tokens = 0
        self._num_admissible = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    @property
    def waste(self) -> float:
        """Part of the held positions that hold no token."""
        size = self.pool.block_size
        used = {
            block: min(max(request.num_computed - number * size, 0), size)
            for request in self.running
            for number, block in enumerate(request.table.blocks)
        }
        return 1 - sum(used.values()) / (len(used) * size) if used else 0.0

    def add(self, request: GenerationRequest, now_s: float = 0.0) -> None:
        """Let a request wait.

        Raises:
            ConfigError: its tokens would never fit into the cache.
        """
        most = len(request.prompt) + request.sampling.max_tokens
        if self.pool.blocks_for(most) > self.pool.num_blocks:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} tokens and {request.sampling.max_tokens} more "
                f"are {most}; the cache has room for {self.pool.num_blocks * self.pool.block_size}"
            )
        request.arrival_s = now_s
        self.waiting.append(request)

    def finish(self, request: GenerationRequest, reason: str) -> None:
        """End a request, wherever it is; its blocks are free at once."""
        request.finished = reason
        self.pool.free(request.table)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.waiting.extendleft(reversed(_unfinished(request.siblings)))  # they fork no more
        request.siblings = []

    def fail(self, request: GenerationRequest) -> None:
        """End a request whose logits are not finite; nobody finds its blocks by their content."""
        self.pool.discard(request.table)
        self.finish(request, "error")

    def schedule(self, now_s: float = 0.0) -> ScheduledStep:
        """Choose the tokens of the next step; the blocks they are written to are held then.

        Full blocks are published before the step has run: within a step each layer writes all keys
        and values before any request reads them.
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
        """Let every request begin again, and forget all contents: the weights have changed."""
        for request in reversed(self.running):
            self._preempt(request)
        for request in self.waiting:
            self._drop(request)
        self.pool.forget()

    def _continue(self, request: GenerationRequest, step: ScheduledStep) -> None:
        """Schedule tokens of a running request; others are preempted until its blocks are there."""
        start, stop = request.num_computed, self._stop(request, step)
        while (copies := self.pool.reserve(request.table, start, stop)) is None:
            holder = next((r for r in self.waiting if r.table.blocks), None)
            if holder is not None:  # a fork that has not begun
                self._drop(holder)
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return
        self._put(Part(request, start, stop), copies, step)

    def _admit(self, request: GenerationRequest, step: ScheduledStep) -> bool:
        """Schedule the first tokens of a waiting request, if there is room."""
        if not request.table.blocks:
            request.table = self.pool.match(request.tokens)
            request.num_computed = len(request.table.blocks) * self.pool.block_size
        start, stop = request.num_computed, self._stop(request, step)
        copies = self._reserve_beside_others(request, start, stop)
        if copies is None and not self.running:  # forks that wait hold the blocks
            for other in self.waiting:
                if other is not request:
                    self._drop(other)
            copies = self._reserve_beside_others(request, start, stop)
        if copies is None:
            self._drop(request)
            return False
        if request.num_found is None:
            request.num_found = start
            self.num_prompt_tokens += len(request.prompt)
            self.num_found_tokens += start
        self.waiting.remove(request)
        self.running.append(request)
        self._num_admissible -= 1
        self._put(Part(request, start, stop), copies, step)
        return True

    def _reserve_beside_others(
        self, request: GenerationRequest, start: int, stop: int
    ) -> list[BlockCopy] | None:
        """Reserve for a waiting request, if some blocks stay free for those that run."""
        missing = self.pool.blocks_for(stop) - len(request.table.blocks)
        spare = int(WATERMARK * self.pool.num_blocks) if self.running else 0
        if missing + spare > self.pool.num_free:
            return None
        return self.pool.reserve(request.table, start, stop)

    def _stop(self, request: GenerationRequest, step: ScheduledStep) -> int:
        """Return where the tokens of a request end that join a step with room for at least one."""
        if not self.is_chunked:
            return len(request.tokens)  # whatever the budget
        room = self.budget - step.num_tokens
        return request.num_computed + min(request.num_missing, room)

    def _put(self, part: Part, copies: list[BlockCopy], step: ScheduledStep) -> None:
        step.parts.append(part)
        step.copies += copies
        self.pool.publish(part.request.table, part.request.tokens[: part.stop])

    def _admissible(self, now_s: float) -> Iterator[GenerationRequest]:
        """Yield waiting requests that may be admitted, in their order."""
        if self.batching == "rolling":
            self._num_admissible = self.slots
        elif not self.running and self.waiting and self._may_begin(now_s):
            self._num_admissible = min(self.slots, len(self.waiting))
        while self.waiting and self._num_admissible > 0 and len(self.running) < self.slots:
            yield self.waiting[0]

    def _may_begin(self, now_s: float) -> bool:
        """Return whether a batch that is admitted as a whole begins."""
        if len(self.waiting) >= self.slots or self.is_draining:
            return True
        waited_s = now_s - self.waiting[0].arrival_s
        return self.batching == "dynamic" and waited_s >= self.delay_s

    def _fork(self, request: GenerationRequest) -> None:
        """Let siblings hold the blocks of a prompt; each computes its last token once more."""
        for sibling in reversed(_unfinished(request.siblings)):
            sibling.table = self.pool.fork(request.table)
            sibling.num_computed = len(sibling.prompt) - 1
            sibling.num_found = 0
            self.waiting.appendleft(sibling)
        request.siblings = []

    def _preempt(self, request: GenerationRequest) -> None:
        self.running.remove(request)
        self._drop(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        self._num_admissible += 1

    def _drop(self, request: GenerationRequest) -> None:
        """Give the blocks of a request back; all of its tokens are missing then."""
        self.pool.free(request.table)
        request.num_computed = 0


def _unfinished(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    return [request for request in requests if request.finished is None]
