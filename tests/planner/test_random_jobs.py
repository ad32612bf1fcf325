"""Jobs at random have an answer or one sentence, and the first row is the fastest of all priced."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence

import pytest

from marks import by_hand
from phalanx.account.planned import DecoderModel
from phalanx.errors import ConfigError, PhalanxError
from phalanx.models.registry import shape_of
from phalanx.planner.explain import advice, figures
from phalanx.planner.hardware import cluster
from phalanx.planner.search import Candidate, Question, price_microbatches, search
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import Strategy

MODELS = (
    "gpt2-124m",
    "gpt2-1.5b",
    "gemma3-1b",
    "llama3-1b",
    "llama3-8b",
    "qwen2.5-7b",
    "gpt3-175b",
)
CLUSTERS = ("h100", "h100-p5", "h100-llama3", "a100", "tpu-v5p", "mi300x")
KINDS = {
    "pp": (
        *("", ":interleaved/2", ":interleaved/3", ":interleaved/4", ":interleaved/8"),
        *(":gpipe", ":naive", ":zb/1", ":zb/2", ":zbv", ":dualpipev"),
    ),
    "dp": ("", ":naive"),
    "fsdp": ("", ":zero1", ":zero2"),
    "cp": ("", ":ulysses"),
    "tp": ("", ":megatron", ":2d", ":2.5d/2", ":3d"),
}
RECOMPUTE = ("none", "full", "selective", "sqrt", "every/2")


def question_of(rng: random.Random, most_devices: int) -> Question:
    shape = shape_of(rng.choice(MODELS))
    num = rng.choice((rng.randint(1, 64), 2 ** rng.randint(0, 14), 3 * 2 ** rng.randint(0, 9)))
    num = min(num, most_devices)
    seq_len = min(shape.max_seq_len, rng.choice((512, 1000, 2048, 8192, 32_768)))
    batch = rng.choice((num * rng.randint(1, 16), num, rng.randint(1, 2000), 1536))
    on = cluster(f"{rng.choice(CLUSTERS)}:{num}")
    return Question(DecoderModel(shape, seq_len), on, SOFTWARE["phalanx"], batch)


def strategy_of(rng: random.Random, num_devices: int) -> Strategy:
    """Return a strategy of all devices; most are refused."""
    left, degrees = num_devices, dict.fromkeys(KINDS, 1)
    for axis in rng.sample(list(KINDS), len(KINDS)):
        most = left if axis in ("dp", "fsdp") else math.gcd(left, 64)
        chosen = [size for size in range(1, most + 1) if left % size == 0]
        degrees[axis] = rng.choice(chosen) if rng.random() < 0.6 else 1
        left //= degrees[axis]
    degrees[rng.choice(("dp", "fsdp"))] *= left
    parts = [
        f"{axis}{degree}{rng.choice(KINDS[axis])}" for axis, degree in degrees.items() if degree > 1
    ]
    return Strategy.parse(",".join([*parts, f"recompute:{rng.choice(RECOMPUTE)}"]))


def check_job(seed: int, most_devices: int, num_strategies: int) -> None:
    """Check a random job: an abort fails the test, and so does a priced strategy that is faster."""
    rng = random.Random(seed)
    asked = question_of(rng, most_devices)
    candidates: Sequence[Candidate] = ()
    with contextlib.suppress(ConfigError):  # the one sentence
        candidates = search(asked).candidates
    best = candidates[0] if candidates else None
    for each in candidates:
        figures(asked, each)
        advice(asked, each)
    for _ in range(num_strategies):
        try:
            strategy = strategy_of(rng, asked.cluster.num_devices)
            others = price_microbatches(asked, strategy)
        except PhalanxError:
            continue
        for other in others:
            if isinstance(other, Candidate):
                assert best is not None, f"seed {seed}: {strategy} fits"
                slower = best.price.step_s / other.price.step_s
                assert slower < 1.01, f"seed {seed}: {best.planned} {slower:.3f} x {other.planned}"


@pytest.mark.parametrize("seed", [0, by_hand(1), 2])
def test_a_job_at_random(seed: int) -> None:
    check_job(seed, 16, 10)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 10))
def test_200_jobs_at_random(first: int) -> None:
    for seed in range(first, first + 10):
        check_job(seed, 1 << 14, 30)
