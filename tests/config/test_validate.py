"""The batch law, and what contradicts what."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import (
    BatchConfig,
    BatchPlan,
    CorpusConfig,
    OptimizerConfig,
    TrainConfig,
    solve_batch,
)
from phalanx.config.validate import check
from phalanx.errors import BatchError, ConfigError, StrategyError

counts = st.integers(1, 64)


@given(counts, counts, counts, st.sampled_from(["global_size", "microbatch", "accumulation", ""]))
def test_any_two_give_the_third(
    microbatch: int, accumulation: int, num_data_ranks: int, left_out: str
) -> None:
    size = microbatch * accumulation * num_data_ranks
    given_ = {"global_size": size, "microbatch": microbatch, "accumulation": accumulation}
    given_.pop(left_out, None)
    plan = solve_batch(BatchConfig(**given_), num_data_ranks)
    assert plan == BatchPlan(size, microbatch, accumulation, num_data_ranks)


@pytest.mark.parametrize(
    ("batch", "plan"),
    [
        (BatchConfig(), BatchPlan(8, 4, 1, 2)),
        (BatchConfig(accumulation=3), BatchPlan(24, 4, 3, 2)),
        (BatchConfig(microbatch=5), BatchPlan(10, 5, 1, 2)),
        (BatchConfig(global_size=12), BatchPlan(12, 6, 1, 2)),
    ],
)
def test_what_is_left_open(batch: BatchConfig, plan: BatchPlan) -> None:
    assert solve_batch(batch, 2) == plan


def test_the_solution_reads_as_the_law() -> None:
    plan = solve_batch(BatchConfig(global_size=32, microbatch=8), 2)
    assert str(plan) == "global batch 32 = microbatch 8 x accumulation 2 x 2 data ranks"


@pytest.mark.parametrize(
    ("batch", "num_data_ranks", "words"),
    [
        (
            BatchConfig(global_size=32, microbatch=8, accumulation=3),
            2,
            "global_size is 32, but microbatch 8 x accumulation 3 x 2 data ranks = 48; set "
            "global_size to 48",
        ),
        (
            BatchConfig(global_size=30, microbatch=8),
            2,
            "global_size is 30, but it must be a multiple of microbatch 8 x 2 data ranks = 16; 16 "
            "and 32 are the nearest",
        ),
        (BatchConfig(global_size=3), 4, "accumulation 1 x 4 data ranks = 4; 4 is"),
        (BatchConfig(global_size=7, accumulation=2), 1, "accumulation 2 x 1 data ranks = 2"),
    ],
)
def test_a_contradiction_shows_its_arithmetic(
    batch: BatchConfig, num_data_ranks: int, words: str
) -> None:
    with pytest.raises(BatchError, match=re.escape(words)):
        solve_batch(batch, num_data_ranks)


@given(st.builds(BatchConfig, **dict.fromkeys(["global_size", "microbatch"], counts)), counts)
def test_the_proposed_sizes_are_accepted(batch: BatchConfig, num_data_ranks: int) -> None:
    try:
        solve_batch(batch, num_data_ranks)
    except BatchError as error:
        proposed = re.search(r"data ranks = \d+; (?:(\d+) and )?(\d+)", str(error))
        assert proposed is not None
        for size in filter(None, proposed.groups()):
            solve_batch(
                BatchConfig(global_size=int(size), microbatch=batch.microbatch), num_data_ranks
            )


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (TrainConfig(steps=3, epochs=2), ConfigError, "give one of them"),
        (TrainConfig(steps=3, optimizer=OptimizerConfig(warmup_steps=3)), ConfigError, "is 2"),
        (
            TrainConfig(optimizer=OptimizerConfig(matrix_lr=0.1)),
            ConfigError,
            "set optimizer.kind muon",
        ),
        (TrainConfig(tokenizer="t.json", corpus=CorpusConfig(vocab_size=999)), ConfigError, "999"),
        (TrainConfig(strategy="dp2", nproc=3), StrategyError, "'dp3' would use them all"),
        (TrainConfig(strategy="pd2"), StrategyError, "did you mean"),
        (TrainConfig(strategy="dp2:ps,tp2"), StrategyError, "which other axes cannot split"),
        (
            TrainConfig(save="best=loss"),
            ConfigError,
            "save: best is 'loss'; expected min: or max: and a",
        ),
    ],
)
def test_contradictions(config: TrainConfig, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        check(config)
