"""The sampler, beside the definitions of its filters, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.infer.options import Sampling
from phalanx.infer.sampler import LogitRules, choose


def kept(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the tokens that may be drawn, and their probabilities, by the definitions."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, found, mass = sum(weights[i] for i in order), list[int](), 0.0
    for i in order:
        if mass >= sampling.top_p * total and found:
            break
        found.append(i)
        mass += weights[i]
    least = sampling.min_p * weights[order[0]]
    found = [i for i in found if weights[i] >= least]
    total = sum(weights[i] for i in found)
    return {i: weights[i] / total for i in found}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.3, 3.0]), min_size=2, max_size=9),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 10),
    st.sampled_from([0.0, 0.1, 0.55, 0.93, 1.0]),
    st.sampled_from([0.0, 0.07, 0.61]),
)
def test_draws_follow_the_filtered_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    num = 300
    rows = torch.tensor([logits] * num)
    tokens, _ = choose(rows, [sampling] * num, range(num))
    expected = kept(logits, sampling)
    counts = Counter(tokens)
    assert set(counts) <= set(expected)
    for token, p in expected.items():  # five standard deviations
        assert abs(counts[token] - num * p) <= 5 * math.sqrt(num * p * (1 - p)) + 1


def changed(logits: list[float], sampling: Sampling, prompt: list[int], new: list[int]) -> Any:
    """Return the logits of the next token by vLLM's definitions, one token at a time."""
    result: list[float] = []
    for token, logit in enumerate(logits):
        x = logit + sampling.logit_bias.get(token, 0.0)
        if token in prompt or token in new:
            penalty = sampling.repetition_penalty
            x = x / penalty if x > 0 else x * penalty
        x -= new.count(token) * sampling.frequency_penalty
        x -= sampling.presence_penalty if token in new else 0.0
        allowed = sampling.allowed_token_ids
        is_banned = allowed is not None and token not in allowed
        is_banned |= len(new) < sampling.min_tokens and token in (1, *sampling.stop_token_ids)
        is_banned |= any((*new, token)[-len(word) :] == word for word in sampling.bad_words)
        result.append(-math.inf if is_banned else x)
    return result


IDS = st.integers(0, 5)
PENALTIES = st.sampled_from([-2.0, 0.0, 0.3, 2.0])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(IDS, min_size=1, max_size=5),
    st.lists(IDS, max_size=6),
    st.builds(
        Sampling,
        presence_penalty=PENALTIES,
        frequency_penalty=PENALTIES,
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
        min_tokens=st.integers(0, 3),
        max_tokens=st.just(9),
        logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -0.5, 4.0])),
        allowed_token_ids=st.none() | st.sets(IDS, min_size=1).map(tuple),
        bad_words=st.lists(st.lists(IDS, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
        stop_token_ids=st.sets(IDS, max_size=2).map(frozenset),
    ),
)
def test_logits_change_by_their_definitions(
    prompt: list[int], new: list[int], sampling: Sampling
) -> None:
    logits = [-3.0, 0.5, 0.0, 2.0, -0.25, 1.0]
    row = torch.tensor(logits)
    LogitRules(sampling, prompt, [1]).change(new, row)
    assert row.tolist() == pytest.approx(changed(logits, sampling, prompt, new), abs=1e-5)
    if not sampling.changes_logits:
        assert row.tolist() == logits


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    samplings = [
        Sampling(seed=n, temperature=n % 3, top_k=n % 5, top_p=0.8 if n % 2 else 1)
        for n in range(40)
    ]
    together, _ = choose(logits, samplings, range(40))
    alone = [choose(logits[n : n + 1], [samplings[n]], [n])[0][0] for n in range(40)]
    assert together == alone
    assert together[::3] == logits.argmax(-1).tolist()[::3]  # temperature 0


def test_scores_are_of_the_model_not_of_the_filters() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (token,), (score,) = choose(logits, [Sampling(temperature=0, top_k=1, logprobs=2)], [0])
    logprobs = torch.log_softmax(logits[0].double(), -1).tolist()
    assert (token, score.logprob if score else None) == (1, logprobs[1])
    assert score is not None and score.top == ((1, logprobs[1]), (2, logprobs[2]))
    assert choose(logits, [Sampling()], [0])[1] == [None]


def test_ids_that_no_token_stands_for_have_no_score() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    _, (score,) = choose(logits, [Sampling(temperature=0, logprobs=4)], [0])
    assert score is not None and [token for token, _ in score.top] == [1, 0]


def test_a_row_with_a_nan_has_no_token() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, math.inf], [0.0, 1.0]])
    for temperature in (0.0, 1.0):
        tokens, scores = choose(
            logits, [Sampling(temperature=temperature, logprobs=1)] * 3, [0] * 3
        )
        assert tokens[:2] == [-1, -1] and tokens[2] >= 0 and scores[:2] == [None, None]


def test_the_least_temperature_takes_the_largest() -> None:
    logits = torch.tensor([[-9.0, 50.0, 20.0, -math.inf]])
    assert choose(logits, [Sampling(temperature=5e-324)], [0])[0] == [1]


def test_a_tail_without_weight_is_never_drawn() -> None:
    logits = torch.full((500, 6), -math.inf)
    logits[:, 2] = 0.0
    assert set(choose(logits, [Sampling()] * 500, range(500))[0]) == {2}
