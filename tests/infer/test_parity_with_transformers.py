"""Greedy tokens equal those of transformers, whatever the engine does to compute them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models_and_prompts import (
    DEMAND,
    GRID,
    NUM_NEW,
    VOCABULARY,
    engine,
    expected,
    expected_scores,
    prompts,
    scored,
    twins,
)

from phalanx.infer.options import Sampling
from phalanx.infer.paged import FlatStep
from phalanx.models.decoder import Decoder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products gain nothing by more
    yield
    torch.set_num_threads(before)


GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0)
FAMILIES = ("llama-tied-llama3-rope", "qwen2", "qwen3-tied-every-other-window", "phi3", "olmo2")
WITH_EXPERTS = ("mixtral", "qwen3-moe-tied-first-dense", "qwen2-moe", "olmoe", "deepseek-v3")
QUICK = {(1, 64, True, False), (4, 7, True, False), (16, 512, True, True), (16, 64, False, False)}


@pytest.mark.parametrize(
    ("block_size", "budget", "has_prefix_cache", "is_ample"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in GRID],
)
def test_tokens_equal_generate(
    block_size: int, budget: int, has_prefix_cache: bool, is_ample: bool
) -> None:
    model, _ = twins("llama")
    served = engine(
        model,
        block_size=block_size,
        budget=budget,
        has_prefix_cache=has_prefix_cache,
        num_tokens=2 * DEMAND if is_ample else int(0.35 * DEMAND),
    )
    assert served.generate(prompts(32), GREEDY) == expected("llama", 32)
    assert served.scheduler.pool.num_held == 0
    if not is_ample and budget > 7:
        assert served.scheduler.num_preemptions > 0
    assert (served.scheduler.num_cached_tokens > 0) is has_prefix_cache


@pytest.mark.parametrize(
    "name",
    ["gemma3", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_each_family_is_served(name: str) -> None:
    model, _ = twins(name)
    served = engine(model, block_size=4, budget=23, num_tokens=800)
    assert served.generate(prompts(16), GREEDY) == expected(name, 16)


@pytest.mark.parametrize(
    "num", [3, pytest.param(20, marks=pytest.mark.slow)], ids=lambda num: f"{num} prompts"
)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_each_family_with_experts_is_served(name: str, num: int) -> None:
    model, _ = twins(name)
    together = engine(model, block_size=4, budget=23, num_tokens=max(15 * num, 64))
    assert together.generate(prompts(num), GREEDY) == expected(name, num)
    assert together.scheduler.num_preemptions > 0 or num < 20
    (alone,) = engine(model).generate(prompts(num)[-1:], GREEDY)
    assert alone == expected(name, num)[-1]


def logits_of(model: Decoder, among: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each of the last prompt's new tokens, computed among the others."""
    served = engine(model, block_size=4, budget=50, dtype=next(model.parameters()).dtype)
    own: Any = served._logits  # pyright: ignore[reportPrivateUsage]
    request = [served.add(each, GREEDY)[0] for each in among][-1]
    found: list[torch.Tensor] = []

    def logits(step: FlatStep) -> torch.Tensor:
        result = own(step)
        ends = [
            sum(s.stop - s.start for s in step.spans[: n + 1]) - 1 for n in range(len(step.spans))
        ]
        for span, end in zip(step.spans, ends, strict=True):
            if span.blocks == request.table.blocks and end in step.rows:
                found.append(result[step.rows.index(end)])
        return result

    served._logits = logits  # pyright: ignore[reportPrivateUsage]
    while served.scheduler.has_work:
        served.step()
    return found


def test_a_request_has_the_same_logits_alone_and_among_31_others() -> None:
    model, _ = twins("llama")
    alone, among = (logits_of(model, prompts(32)[-n:]) for n in (1, 32))
    assert len(alone) == len(among) == NUM_NEW
    assert max(float((a - b).abs().max()) for a, b in zip(alone, among, strict=True)) <= 1e-5


def test_a_request_has_the_same_logits_among_others_that_share_its_experts() -> None:
    # In float64: in float32 a product of more rows may be rounded in another way.
    model, _ = twins("olmoe")
    model = copy.deepcopy(model).double()
    alone, among = (logits_of(model, prompts(8)[-n:]) for n in (1, 8))
    assert len(alone) == len(among) == NUM_NEW
    assert max(float((a - b).abs().max()) for a, b in zip(alone, among, strict=True)) <= 1e-12


def test_a_seeded_sample_is_the_same_in_any_batch_and_order() -> None:
    model, _ = twins("llama")
    samplings = [
        Sampling(max_tokens=NUM_NEW, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=n)
        for n in range(16)
    ]
    alone = [
        engine(model).generate([prompt], sampling)[0]
        for prompt, sampling in zip(prompts(16), samplings, strict=True)
    ]
    backwards = engine(model, block_size=4, budget=9, num_tokens=400)
    assert backwards.generate(prompts(16)[::-1], samplings[::-1])[::-1] == alone
    assert len({tuple(each) for each in alone}) == 16


def test_siblings_continue_as_requests_of_their_own() -> None:
    model, _ = twins("llama")
    samplings = [Sampling(max_tokens=9, seed=seed) for seed in range(5)]
    prompt = prompts(2)[1]
    served = engine(model, block_size=4, budget=16)
    requests = served.add(prompt, *samplings)
    while served.scheduler.has_work:
        served.step()
    found = [request.tokens[len(prompt) :] for request in requests]
    assert found == [engine(model).generate([prompt], each)[0] for each in samplings]
    assert served.counts.computed_tokens == len(prompt) + 4 + 5 * 8


def test_bfloat16_agrees_on_the_most_probable_tokens() -> None:
    model, theirs = twins("mistral")
    half = Decoder(model.shape).to(torch.bfloat16)
    half.load_state_dict({name: p.to(torch.bfloat16) for name, p in model.state_dict().items()})
    served = engine(half.eval(), dtype=torch.bfloat16, budget=7)
    scores: dict[int, set[int]] = {}
    for number, prompt in enumerate(prompts(32)):
        served.add(prompt, Sampling(max_tokens=1, temperature=0, logprobs=5, seed=number))
    while served.scheduler.has_work:
        for new in served.step():
            assert new.score is not None
            scores[new.completion.sampling.seed] = {token for token, _ in new.score.top}
    common: list[int] = []
    for number, prompt in enumerate(prompts(32)):
        with torch.no_grad():
            logits: Any = theirs(torch.tensor([prompt])).logits
        common.append(len(scores[number] & set(logits[0, -1].topk(5).indices.tolist())))
    assert sum(common) >= 0.9 * 5 * 32 and min(common) >= 4


def test_changed_weights_are_used_at_once_and_the_prefixes_forgotten() -> None:
    model, _ = twins("llama")
    other, _ = twins("llama-tied-llama3-rope")
    assert model.shape != other.shape
    live = Decoder(model.shape)
    live.load_state_dict(model.state_dict())
    served = engine(live.eval(), block_size=4)
    before = served.generate(prompts(8), GREEDY)
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.mul_(1.5)
    served.scheduler.preempt_all()
    (request,) = served.add(prompts(8)[1], GREEDY)
    served.step()
    assert request.num_cached == 0
    served.scheduler.preempt_all()  # while a request is under way
    after = served.generate(prompts(8), GREEDY)
    assert after == engine(live).generate(prompts(8), GREEDY) != before


def test_the_attention_of_training_is_back_after_a_step() -> None:
    model, _ = twins("llama")
    tokens = torch.tensor(prompts(1))
    with torch.no_grad():
        before = model(tokens)
        engine(model).generate(prompts(2), GREEDY)
        assert torch.equal(model(tokens), before)


def test_a_model_that_computes_nan_ends_its_requests_with_an_error() -> None:
    model, _ = twins("llama")
    broken = Decoder(model.shape)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    served = engine(broken.eval())
    requests = [
        served.add(each, sampling)[0]
        for each, sampling in zip(prompts(2), (GREEDY, Sampling()), strict=True)
    ]
    served.step()
    assert [each.finish_reason for each in requests] == ["error", "error"]
    assert served.scheduler.pool.num_held == 0


def test_what_was_computed_with_nan_is_not_found_again() -> None:
    model, _ = twins("llama")
    live = Decoder(model.shape)
    live.load_state_dict(model.state_dict())
    served = engine(live.eval(), block_size=4)
    prompt = prompts(8)[1]
    weight = dict(live.named_parameters())["blocks.0.attention.v.weight"]
    with torch.no_grad():
        before = weight.clone()
        weight.fill_(torch.nan)
        (request,) = served.add(prompt, GREEDY)
        served.step()
        weight.copy_(before)
    assert request.finish_reason == "error" and len(prompt) > 18
    assert served.generate([prompt], GREEDY) == engine(live).generate([prompt], GREEDY)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"bad_words": ((3, 4), (40,))}, {"bad_words_ids": [[3, 4], [40]]}),
        ({"min_tokens": 20}, {"min_new_tokens": 20}),
    ],
)
def test_changed_logits_choose_what_transformers_chooses(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    model, twin = twins("llama")
    served = engine(model)
    served.end_ids = frozenset([7])
    for prompt in prompts(8):
        (tokens,) = served.generate([prompt], replace(GREEDY, **ours))
        ids: Any = twin.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=7,
            pad_token_id=7,
            **theirs,
        )
        assert tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("budget", [7, 512])
def test_scores_of_prompts_equal_transformers(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of prompts that were found in the cache or preempted, and without all their logits."""
    model, _ = twins("llama")
    monkeypatch.setattr("phalanx.infer.runner.SCORED_LOGITS", 5 * VOCABULARY)
    own, most = model.read, list[int]()

    def read(x_BTD: torch.Tensor) -> torch.Tensor:
        most.append(x_BTD.shape[1])
        return own(x_BTD)

    monkeypatch.setattr(model, "read", read)
    few = engine(model, block_size=4, budget=budget, num_tokens=int(0.35 * DEMAND))
    few.generate(prompts(32), GREEDY)  # fills the cache
    num_found, num_preempted = few.scheduler.num_cached_tokens, few.scheduler.num_preemptions
    most.clear()
    found = scored(few, 32, max_tokens=24)
    for ours, theirs in zip(found, expected_scores("llama", 32), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-6)
    assert few.scheduler.num_cached_tokens == num_found
    assert few.scheduler.num_preemptions > num_preempted or budget == 7
    assert sum(length > 5 for length in most) <= few.counts.steps
    assert scored(few, 3, max_tokens=0) == scored(few, 3, max_tokens=0)
    assert few.scheduler.pool.num_held == 0


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    model, _ = twins("llama")
    served = engine(model)
    served._num_ids = 5  # pyright: ignore[reportPrivateUsage]
    tokens = served.generate(prompts(4), Sampling(max_tokens=20, temperature=5))
    assert {token for each in tokens for token in each} == set(range(5))
