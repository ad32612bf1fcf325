"""The price of one given strategy, at a microbatch that fits."""

from __future__ import annotations

import dataclasses
import math

from phalanx.errors import BatchError, StrategyError
from phalanx.parallel.pipeline.cut import check_schedule
from phalanx.planner.planned import plan_of
from phalanx.planner.price import price
from phalanx.planner.search import (
    Candidate,
    Inequality,
    Question,
    check,
    fits,
    steps_of,
    that_fit,
)
from phalanx.strategy import Strategy, require_built


def priced_strategy(
    question: Question, strategy: Strategy, microbatch: int | None = None
) -> Candidate | Inequality:
    """Return a priced strategy, or why it does not fit; if `microbatch` is None, at the fastest.

    Raises:
        PhalanxError: see `price_microbatches`.
    """
    found = price_microbatches(question, strategy, microbatch)
    return min(
        found, key=lambda each: each.price.step_s if isinstance(each, Candidate) else math.inf
    )


def price_microbatches(
    question: Question, strategy: Strategy, microbatch: int | None = None
) -> list[Candidate | Inequality]:
    """Return the priced strategy for each microbatch that fits, and why the next does not.

    Raises:
        ConfigError: the batch or the sequence length is below 1.
        StrategyError: the strategy is not built, or cannot split the model or the sequence.
        BatchError: the data ranks, or the microbatch, do not divide the batch.
    """
    check(question)
    require_built(strategy)
    plan_of(question.step(strategy, 1, 1))  # raises if no other length or batch would help
    _check_length(question, strategy)
    unit = strategy.data_ranks * (microbatch or 1)
    rows, rest = divmod(question.num_sequences, strategy.data_ranks)
    if question.num_sequences % unit:
        legal = max(1, round(question.num_sequences / unit)) * unit
        each = f"microbatch {microbatch} x " if microbatch else ""
        raise BatchError(
            f"the batch of {question.num_sequences} sequences is not a multiple of {each}"
            f"{strategy.data_ranks} data ranks = {unit}; the nearest batch is {legal}"
        )
    assert not rest, "the unit is a multiple of the data ranks"
    asked = dataclasses.replace(question, microbatch=microbatch or question.microbatch)
    check_schedule(strategy, rows // max(asked.microbatches(strategy, rows), default=rows))
    fitting, failed = that_fit(question, steps_of(asked, strategy))
    found: list[Candidate | Inequality] = [] if failed is None else [failed]
    for planned in fitting:
        held = fits(question, planned)
        assert not isinstance(held, Inequality), "what does not fit is not priced"
        cost = price(planned, question.cluster, question.software)
        found.append(Candidate(planned, cost, held))
    return found


def _check_length(question: Question, strategy: Strategy) -> None:
    """Raise StrategyError if the strategy cannot divide the positions of a sequence."""
    unit = strategy.length_unit
    if question.seq_len % unit:
        legal = max(1, round(question.seq_len / unit)) * unit
        raise StrategyError(
            f"{strategy} needs a sequence length that is a multiple of {unit} tokens, not "
            f"{question.seq_len}; the nearest is {legal}"
        )
