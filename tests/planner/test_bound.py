"""No price is below its bound, over questions at random."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from phalanx.account.planned import DecoderModel, decoder_step
from phalanx.errors import StrategyError
from phalanx.models.registry import shape_of
from phalanx.planner import search
from phalanx.planner.bound import bound_s
from phalanx.planner.hardware import cluster
from phalanx.planner.price import price
from phalanx.planner.search import Question
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import Strategy

MODELS = ("llama3-1b", "llama3-8b", "llama3-70b", "gpt2-1.5b", "mistral-7b", "llama3-405b")
CLUSTERS = ("h100-llama3", "h100-p5", "a100", "a100-p4d", "b200", "gb200", "mi300x", "tpu-v5p")


@some.composite
def questions(draw: some.DrawFn) -> Question:
    model = draw(some.sampled_from(MODELS))
    num_devices = 2 ** draw(some.integers(0, 12))
    seq_len = 1024 if model == "gpt2-1.5b" else draw(some.sampled_from([2048, 8192, 16384]))
    shape = dataclasses.replace(shape_of(model), num_layers=draw(some.integers(1, 40)))
    return Question(
        DecoderModel(shape, seq_len),
        cluster=cluster(f"{draw(some.sampled_from(CLUSTERS))}:{num_devices}"),
        software=draw(some.sampled_from(list(SOFTWARE.values()))),
        num_sequences=num_devices * draw(some.sampled_from([1, 2, 3, 8])),
    )


def check(question: Question, seed: int) -> None:
    rng = random.Random(seed)
    splits = [*search.splits_with_data(question)]
    for base, data in rng.sample(splits, min(3, len(splits))):
        family = rng.choice([*search.families(question, base, data)])
        while family.num_steps > 1:
            family = rng.choice([*family.parts()])
        planned = family.planned
        try:
            least = bound_s(planned, question.cluster, question.software)
            cost = price(planned, question.cluster, question.software)
        except StrategyError:
            continue
        said = planned.strategy, planned.microbatch, planned.accumulation
        assert 0 < least <= cost.step_s * (1 + 1e-9), said


@given(questions(), some.integers(0, 1000))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_price_is_below_its_bound(question: Question, seed: int) -> None:
    check(question, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", ["olmoe-1b-7b", "deepseek-v3-671b"])
def test_no_price_with_experts_is_below_its_bound(model: str, seed: int) -> None:
    """With dense and sparse blocks, exchanges and forwards that count loads."""
    shape = dataclasses.replace(shape_of(model), num_layers=4 + seed)
    on = cluster("h100:32")
    question = Question(DecoderModel(shape, 4096), on, SOFTWARE["phalanx"], 64)
    check(question, seed)


UNEVEN = [
    (pp, chunks, pp * chunks + more) for pp in (2, 4) for chunks in (2, 4) for more in (-1, 0, 1, 3)
]
"""Stages of a rank and layers that they cannot deal out evenly: some stages have none."""


@pytest.mark.parametrize(("pp", "chunks", "num_layers"), UNEVEN)
def test_no_price_of_few_uneven_stages_is_below_its_bound(
    pp: int, chunks: int, num_layers: int
) -> None:
    """The lightest ranks have a smaller bubble than ranks of an average part."""
    shape = dataclasses.replace(shape_of("llama3-405b"), num_layers=num_layers)
    job = cluster(f"a100:{pp}")
    for policy in ("none", "selective"):
        strategy = Strategy.parse(f"pp{pp}:interleaved/{chunks},recompute:{policy}")
        for name in ("llm-foundry", "phalanx"):
            for num in (pp, 3 * pp):
                planned = decoder_step(shape, strategy, 8192, 1, num, "bfloat16")
                least = bound_s(planned, job, SOFTWARE[name])
                step_s = price(planned, job, SOFTWARE[name]).step_s
                assert 0.6 * step_s < least <= step_s * (1 + 1e-9), (policy, name, num)


def test_a_price_of_equal_stages_is_its_bound() -> None:
    """Without collectives, whose bound is rough."""
    shape = dataclasses.replace(shape_of("llama3-8b"), num_layers=30, vocab_size=128)
    job = cluster("h100:8")
    for text in ("pp4", "pp4:interleaved/2", "pp8", "pp4:zb/2", "pp4:zbv", "pp4:dualpipev"):
        planned = decoder_step(shape, Strategy.parse(text), 8192, 1, 32, "bfloat16")
        cost = price(planned, job, SOFTWARE["phalanx"])
        least = bound_s(planned, job, SOFTWARE["phalanx"])
        assert 0.95 < least / cost.step_s <= 1 + 1e-9, text


@pytest.mark.slow
@given(questions(), some.integers(0, 1000))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_price_of_many_is_below_its_bound(question: Question, seed: int) -> None:
    check(question, seed)
