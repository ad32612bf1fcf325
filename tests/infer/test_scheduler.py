"""The scheduler, on a clock of tokens and steps: no model is needed to know what it computes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.infer.options import Sampling
from phalanx.infer.pool import BlockPool
from phalanx.infer.scheduler import Completion, ScheduledStep, Scheduler


def request(num_prompt: int, num_new: int, first: int = 0) -> Completion:
    """Make a request whose prompt is the numbers from `first`."""
    return Completion(
        list(range(first, first + num_prompt)), Sampling(max_tokens=num_new, ignore_end=True)
    )


def take(scheduler: Scheduler, step: ScheduledStep) -> list[Completion]:
    """Give each request of a step its next token; return those."""
    served = [part.completion for part in step.parts if part.computes_logits]
    for each in served:
        each.tokens.append(-len(each.tokens))
        if each.num_generated == each.sampling.max_tokens:
            scheduler.finish(each, "length")
    return served


def check_step(scheduler: Scheduler, step: ScheduledStep) -> None:
    """Check that a step is within its budget: all of it, or its last part begins below it."""
    room = scheduler.budget
    for part in step.parts:
        num_tokens = part.stop - part.start
        assert num_tokens > 0 and room > 0
        if scheduler.is_chunked:
            assert num_tokens <= room
        else:
            assert part.computes_logits
        room -= num_tokens


def run(scheduler: Scheduler, seen: Callable[[ScheduledStep, list[Completion]], object]) -> None:
    """Run until no request is left."""
    for _ in range(10_000):
        if not scheduler.has_work:
            return
        step = scheduler.schedule()
        assert step.parts, "work is left, but no step is scheduled"
        check_step(scheduler, step)
        seen(step, take(scheduler, step))
    raise AssertionError("it does not end")


def scheduler_of(num_blocks: int = 4096, size: int = 16, **options: Any) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, size), **options)


def workload() -> list[Completion]:
    """Return 128 requests: prompts of 8 to 128 tokens, 8, 16, 32 or 128 new ones."""
    draw = random.Random(0)
    lengths = [8, 16, 32, 128] * 32
    draw.shuffle(lengths)
    return [request(draw.randint(8, 128), n, 1000 * i) for i, n in enumerate(lengths)]


def decode_steps(scheduler: Scheduler, batches: list[list[Completion]]) -> int:
    """Return the steps that serve one batch after another."""
    steps: list[int] = []
    for batch in batches:
        for each in batch:
            scheduler.waiting.append(each)
        run(scheduler, lambda step, served: steps.append(len(served)))
    return len(steps)


def test_rolling_batches_take_few_steps_and_static_batches_many() -> None:
    load = workload()
    ideal = sum(each.sampling.max_tokens for each in load) / 8
    assert decode_steps(scheduler_of(slots=8), [load]) <= 1.15 * ideal
    load = workload()
    batches = [load[start : start + 8] for start in range(0, len(load), 8)]
    assert decode_steps(scheduler_of(slots=8), batches) >= 2 * ideal


def test_a_request_that_is_alone_wastes_at_most_the_end_of_a_block() -> None:
    wasted: list[float] = []
    scheduler = scheduler_of(slots=16, num_blocks=4096)
    for number in range(16):
        scheduler.waiting.append(request(150 + 9 * number, 60, 1000 * number))
    run(scheduler, lambda step, served: wasted.append(scheduler.waste))
    assert 0 < max(wasted[:-1]) and statistics.mean(wasted) <= 0.04
    contiguous = scheduler_of(num_blocks=16, size=1024, slots=16)
    for number in range(16):
        contiguous.waiting.append(request(150 + 9 * number, 60, 1000 * number))
    contiguous.schedule()
    assert contiguous.waste > 0.7


@pytest.mark.parametrize("budget", [100, 512, 4096])
def test_a_prefix_that_is_shared_is_computed_once(budget: int) -> None:
    scheduler = scheduler_of(budget=budget)
    requests = [request(1024, 4) for _ in range(32)]
    for number, each in enumerate(requests):
        each.prompt += [5000 + number] * 20
        each.tokens = list(each.prompt)
        scheduler.waiting.append(each)
    computed: list[int] = []
    run(scheduler, lambda step, served: computed.append(step.num_tokens))
    assert sum(computed) <= 1024 + 32 * (20 + 3) + 32 * 16
    assert requests[0].num_cached == 0
    assert all(each.num_cached == 1024 for each in requests[1:])
    assert scheduler.pool.num_held == 0


def longest_gap(is_chunked: bool) -> float:
    """Return the longest pause of 8 streams while a long prompt arrives, in usual pauses.

    The clock counts the tokens that are computed.
    """
    scheduler = scheduler_of(budget=24, is_chunked=is_chunked)
    streams = [request(4, 300, 1000 * number) for number in range(8)]
    for each in streams:
        scheduler.waiting.append(each)
    clock, gaps, last = 0, list[int](), dict[Completion, int]()
    for number in range(250):
        if number == 60:
            scheduler.waiting.append(request(2048, 8, 10**6))
        step = scheduler.schedule()
        clock += step.num_tokens
        for each in take(scheduler, step):
            if each in streams:
                gaps += [clock - last[each]] if each in last else []
                last[each] = clock
    return max(gaps) / statistics.median(gaps)


def test_chunks_of_a_long_prompt_delay_no_other_request_by_much() -> None:
    assert longest_gap(is_chunked=True) <= 3
    assert longest_gap(is_chunked=False) > 3


def test_the_request_that_came_last_is_preempted_and_computed_again() -> None:
    scheduler = scheduler_of(num_blocks=12, size=4, slots=4)
    requests = [request(8, 24, 100 * number) for number in range(3)]
    for each in requests:
        scheduler.waiting.append(each)
    ended: list[Completion] = []
    run(scheduler, lambda step, served: ended.extend(r for r in served if r.finish_reason))
    assert scheduler.num_preemptions > 0
    assert ended == requests  # the first is never preempted for a later one
    assert scheduler.pool.num_held == 0


@pytest.mark.parametrize("num_blocks", [40, 12])
def test_siblings_compute_their_prompt_once_and_part_at_its_last_token(num_blocks: int) -> None:
    scheduler = scheduler_of(num_blocks=num_blocks, size=4, budget=64)
    first, *others = [request(10, 6) for _ in range(4)]
    first.siblings = list(others)
    scheduler.waiting.append(first)
    scheduler.finish(others[0], "abort")  # whose client has left
    copies, computed = list[Any](), list[int]()

    def seen(step: ScheduledStep, served: list[Completion]) -> None:
        copies.extend(step.copies)
        computed.append(step.num_tokens)

    run(scheduler, seen)
    assert [each.finish_reason for each in others] == ["abort", "length", "length"]
    if num_blocks == 40:
        assert len(copies) >= 2  # each writes to a copy of the block that is partly full
        assert sum(computed) == 10 + 2 * 1 + 3 * 5
    assert scheduler.pool.num_held == 0


def test_forks_that_wait_hold_up_nobody() -> None:
    scheduler = scheduler_of(num_blocks=6, size=4, slots=1)
    first, *forks = [request(8, 4) for _ in range(3)]
    first.siblings = list(forks)
    scheduler.waiting.append(first)
    scheduler.schedule()
    assert all(fork.table.blocks for fork in forks)
    scheduler.finish(first, "abort")
    scheduler.waiting.appendleft(large := request(20, 4, 100))  # as if it had been preempted
    run(scheduler, lambda step, served: None)
    assert [each.finish_reason for each in (large, *forks)] == ["length"] * 3
    assert scheduler.pool.num_held == 0


@pytest.mark.parametrize("lengths", [[300, 300, 100], [600, 600], [512, 40]])
def test_prompts_beyond_the_budget_are_computed_whole_one_after_another(lengths: list[int]) -> None:
    scheduler = scheduler_of(budget=512, is_chunked=False)
    for number, length in enumerate(lengths):
        scheduler.waiting.append(request(length, 2, 1000 * number))
    prefills: list[list[int]] = []

    def seen(step: ScheduledStep, served: list[Completion]) -> None:
        assert len(served) == len(step.parts)
        prefills.append([part.stop for part in step.parts if part.start == 0])

    run(scheduler, seen)
    expected = {300: [[300, 300], [100]], 600: [[600], [600]], 512: [[512], [40]]}
    assert [step for step in prefills if step] == expected[lengths[0]]


def test_a_fork_that_the_budget_leaves_no_token_keeps_its_blocks() -> None:
    scheduler = scheduler_of(size=4, budget=10)
    first, *forks = [request(10, 3) for _ in range(12)]
    first.siblings = list(forks)
    scheduler.waiting.append(first)
    computed: list[int] = []
    run(scheduler, lambda step, served: computed.append(step.num_tokens))
    assert sum(computed) == 10 + 11 * 1 + 12 * 2  # the prompt once, its last token for each fork


@pytest.mark.parametrize("is_chunked", [True, False])
def test_random_arrivals_and_aborts_leave_nothing_behind(is_chunked: bool) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        budget = draw.choice([3, 9, 64])
        scheduler = scheduler_of(
            num_blocks=20, size=4, slots=5, budget=budget, is_chunked=is_chunked
        )
        alive, all_added = list[Completion](), list[Completion]()
        for _ in range(150):
            if draw.random() < 0.3:
                each = request(draw.randint(1, 40), draw.randint(1, 30), draw.choice([0, 50]))
                each.siblings = [request(0, 9) for _ in range(draw.choice([0, 0, 2]))]
                for sibling in each.siblings:
                    sibling.prompt = list(each.prompt)
                    sibling.tokens = list(each.prompt)
                alive += [each, *each.siblings]
                all_added += [each, *each.siblings]
                scheduler.waiting.append(each)
            step = scheduler.schedule()
            check_step(scheduler, step)
            take(scheduler, step)
            alive = [each for each in alive if each.finish_reason is None]
            if alive and draw.random() < 0.1:
                scheduler.finish(draw.choice(alive), "abort")
        run(scheduler, lambda step, served: None)
        assert scheduler.pool.num_held == 0
        for each in all_added:
            assert each.finish_reason == "abort" or each.num_generated == each.sampling.max_tokens
