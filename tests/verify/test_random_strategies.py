"""Random strategies of all axes raise no false alarm: each computes what plain PyTorch does."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict

import pytest

from phalanx.comm.comm import Ranks
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.parallel.plan import Plan
from phalanx.strategy import KINDS, Strategy, refuse_first_come, require_built
from phalanx.verify.cases import awkward_shapes, configured_case
from phalanx.verify.harness import verify_case
from phalanx.verify.record import Case
from phalanx.verify.settings import VerifyConfig

MOST_RANKS = 8
NUM_STRATEGIES = 200
OPTIONS = {"interleaved": (2, 3), "zb": (1, 2), "2.5d": (1, 2), "every": (1, 2), "ssp": (0, 1)}


def random_text(draw: random.Random) -> str:
    """Return a text of the grammar, which need not be legal."""
    parts: list[str] = []
    for axis, kinds in KINDS.items():
        kind = draw.choice([name for name, it in kinds.items() if it.about is not None])
        option = f"/{draw.choice(OPTIONS[kind])}" if kind in OPTIONS else ""
        degree = draw.choice([1, 1, 1, 2, 2, 3, 4])
        if axis == "recompute":
            parts += [f"recompute:{kind}{option}"] * (degree == 2)
        elif degree > 1:
            parts.append(f"{axis}{degree}:{kind}{option}")
    return ",".join(parts)


def legal(draw: random.Random) -> list[tuple[Strategy, Case]]:
    """Return different strategies of at most MOST_RANKS, each with a case that it can split."""
    found: dict[str, tuple[Strategy, Case]] = {}
    while len(found) < NUM_STRATEGIES:
        try:
            strategy = Strategy.parse(random_text(draw))
            require_built(strategy)
            refuse_first_come(strategy)
        except StrategyError:
            continue
        if not 1 < strategy.num_ranks <= MOST_RANKS or str(strategy) in found:
            continue
        shape = draw.choice(list(awkward_shapes(strategy).values()))
        shape = dataclasses.replace(shape, tied=draw.random() < 0.5)
        try:
            Plan(strategy, Decoder(shape))
        except StrategyError:
            continue
        config = VerifyConfig(
            steps=2,
            accumulation=draw.randint(1, 5),
            seq_len=draw.randint(9, 25),
            seed=draw.randint(0, 99),
        )
        found[str(strategy)] = strategy, configured_case(shape, strategy, config)
    return list(found.values())


def wrong_on_ranks(pairs: list[tuple[Strategy, Case]]) -> list[str]:
    wrong: list[str] = []
    for strategy, case in pairs:
        try:
            verdict = verify_case(case, strategy, Ranks(strategy))
        except Exception as error:
            error.add_note(f"verifying {strategy}, {case.accumulation} microbatches")
            raise
        if not verdict.is_equal:
            wrong.append(f"{case.accumulation} microbatches: {verdict}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 200 strategies, of up to eight ranks
def test_random_strategies_raise_no_false_alarm() -> None:
    jobs: defaultdict[int, list[tuple[Strategy, Case]]] = defaultdict(list)
    for strategy, case in legal(random.Random(0)):
        jobs[strategy.num_ranks].append((strategy, case))
    assert sum(map(len, jobs.values())) == NUM_STRATEGIES
    wrong = [run_ranks(wrong_on_ranks, n, pairs, threads=1)[0] for n, pairs in jobs.items()]
    assert not list(itertools.chain(*wrong))
