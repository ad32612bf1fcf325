"""The search: its best is the best there is, and what it rejects does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.account.rank_memory import memory
from phalanx.errors import ConfigError
from phalanx.models.registry import shape_of
from phalanx.planner import search as searching
from phalanx.planner.hardware import cluster
from phalanx.planner.price import price
from phalanx.planner.search import (
    Candidate,
    Found,
    Inequality,
    Question,
    fits,
    priced_strategy,
    search,
)
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import Strategy


def question(
    model: str, cluster_text: str, seq_len: int, num_sequences: int, **sizes: int
) -> Question:
    shape = dataclasses.replace(shape_of(model), **sizes)
    model = DecoderModel(shape, seq_len)
    return Question(model, cluster(cluster_text), SOFTWARE["phalanx"], num_sequences)


SMALL = question("llama3-1b", "h100:4", 2048, 16, num_layers=4)
TIGHT = question("llama3-8b", "h100:8", 8192, 16)


def legal_steps(asked: Question) -> Iterator[PlannedStep]:
    """Yield every step that the search looks at."""
    for base, data in searching.splits_with_data(asked):
        families = [*searching.families(asked, base, data)]
        while families:
            family = families.pop()
            if family.num_steps > 1:
                families += family.parts()
            else:
                yield family.planned


def check_rejected(asked: Question, found: Found) -> None:
    """Evaluate each inequality again."""
    for failed in found.rejected:
        assert failed.left > failed.right == asked.cluster.device.usable_bytes
        strategy = Strategy.parse(failed.strategy)
        rows = asked.num_sequences // strategy.data_ranks
        sizes = searching.microbatches(asked, strategy, rows)
        sizes = [n for n in sizes if f"with {n} x" in failed.what] or [1]
        again = fits(asked, asked.step(strategy, sizes[0], rows // sizes[0]))
        assert again == failed, failed


@pytest.mark.slow
def test_the_best_is_the_best_of_all() -> None:
    found = search(SMALL, wanted=3)
    fastest: dict[str, float] = {}
    for planned in legal_steps(SMALL):
        if not isinstance(fits(SMALL, planned), Inequality):
            step_s = price(planned, SMALL.cluster, SMALL.software).step_s
            name = str(planned.strategy)
            fastest[name] = min(step_s, fastest.get(name, step_s))
    assert {"zb", "zbv", "dualpipev"} <= {Strategy.parse(name).pp.kind for name in fastest}
    prices = [each.price.step_s for each in found.candidates]
    assert prices == pytest.approx(sorted(fastest.values())[:3])
    assert found.num_legal == len(list(legal_steps(SMALL)))


def test_experts_are_split_within_a_server() -> None:
    """Weights of 8 large experts take longer to gather than a few rows take to travel."""
    asked = question("mixtral-8x7b", "h200:16", 4096, 64)
    asked = dataclasses.replace(asked, microbatch=4, without=("pp", "tp", "cp"))
    (best,) = search(asked, wanted=1).candidates
    assert best.planned.strategy.ep.degree == 8
    degrees = {base.ep.degree for base, _ in searching.splits_with_data(asked)}
    assert degrees == {1, 2, 4, 8}  # the divisors of 8 experts
    dense = dataclasses.replace(asked, model=DecoderModel(shape_of("llama3-1b"), 4096))
    assert {base.ep.degree for base, _ in searching.splits_with_data(dense)} == {1}


@pytest.mark.slow
def test_each_inequality_is_true_when_evaluated_again() -> None:
    found = search(TIGHT, wanted=3)
    assert len(found.rejected) > 3
    check_rejected(TIGHT, found)


def test_of_equally_fast_strategies_the_simplest_is_first() -> None:
    asked = question("llama3-1b", "h100:1", 2048, 8, num_layers=2)
    best = search(asked, wanted=1).candidates[0]
    plain = dataclasses.replace(best, planned=asked.step(Strategy(), 1, 8))
    full = dataclasses.replace(best, planned=asked.step(Strategy.parse("recompute:full"), 1, 8))
    two = dataclasses.replace(best, planned=asked.step(Strategy.parse("dp2,tp2"), 1, 4))
    in_order = sorted(
        [two, full, plain], key=lambda each: searching.order(each.planned, each.price)
    )
    assert in_order == [plain, full, two]


def test_a_single_microbatch_is_tried_though_its_stage_has_most_of_the_gradients() -> None:
    """A tied embedding of 256,000 rows makes the first stage four times the mean."""
    asked = question("llama3-1b", "h100:8", 64, 8, num_layers=8, vocab_size=256_000)
    steps = searching.steps_of(asked, Strategy.parse("pp4,fsdp2"))
    held = [searching.heaviest(memory(each, "gpu")).total for each in steps]
    assert steps[-1].accumulation == 1 and held[-1] < held[0]
    device = dataclasses.replace(asked.cluster.device, usable_bytes=held[-1])
    asked = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, device=device))
    assert searching.that_fit(asked, steps)[0] == steps[-1:]


def test_what_fits_depends_on_the_program() -> None:
    """nanotron keeps the logits of a whole microbatch."""
    planned = SMALL.step(Strategy.parse("dp4"), 4, 1)
    others = dataclasses.replace(SMALL, software=SOFTWARE["nanotron"])
    ours, theirs = fits(SMALL, planned), fits(others, planned)
    assert not isinstance(ours, Inequality) and not isinstance(theirs, Inequality)
    assert theirs.logits > 2 * ours.logits and theirs.total > ours.total


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_sequences": 0}, "the batch is 0; it must be at least 1"),
        ({"model": dataclasses.replace(SMALL.model, seq_len=0)}, "the sequence is 0"),
        ({"num_sequences": 1, "cluster": cluster("h100:7")}, "the nearest batch .* is 7"),
    ],
)
def test_a_question_without_a_strategy(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        search(dataclasses.replace(SMALL, **changed))


def test_an_odd_sequence_is_replicated() -> None:
    odd = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, seq_len=2047))
    names = {str(each.planned.strategy) for each in search(odd).candidates}
    assert names and not any("tp" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seq_len", "num_sequences", "published"),
    [(8192, 2048, "pp16,fsdp128:zero1,tp8"), (131072, 128, "pp16,fsdp8:zero1,cp16,tp8")],
)
def test_405_b_on_16384_devices(seq_len: int, num_sequences: int, published: str) -> None:
    """The Llama 3 Herd of Models, table 4."""
    asked = question("llama3-405b", "h100-llama3:16384", seq_len, num_sequences)
    found = search(asked)
    best = found.candidates[0]
    for kind in ("zero1", "zero2", "zero3"):
        other = priced_strategy(asked, Strategy.parse(published.replace("zero1", kind)))
        assert not isinstance(other, Candidate) or best.price.step_s <= other.price.step_s
    interleaved = Strategy.parse(published.replace("pp16", "pp16:interleaved/4"))
    other = priced_strategy(
        asked, dataclasses.replace(interleaved, recompute=best.planned.strategy.recompute)
    )
    assert not isinstance(other, Candidate) or best.price.step_s <= other.price.step_s
    assert (best.planned.strategy.sample_shards > 1) or seq_len == 8192
    check_rejected(asked, dataclasses.replace(found, rejected=found.rejected[-20:]))


@pytest.mark.slow
def test_the_rejected_are_named_with_the_least_that_they_hold() -> None:
    asked = dataclasses.replace(TIGHT, num_sequences=64)
    rejected = {each.strategy: each for each in search(asked).rejected}
    assert "fsdp8:zero1" in rejected
    for name, failed in rejected.items():
        alone = priced_strategy(asked, Strategy.parse(name))
        assert isinstance(alone, Inequality) and failed.left <= alone.left
