"""Speculative decoding by prompt lookup: the tokens without it, in fewer steps."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from models_and_prompts import GRID, engine, prompts, twins

from phalanx.errors import ConfigError
from phalanx.infer.options import Sampling
from phalanx.infer.scheduler import Completion
from phalanx.infer.speculation import Ngrams

FEW = [GRID[number] for number in (10, 31)]


@pytest.mark.parametrize(
    ("cases", "num"),
    [(FEW, 6), pytest.param(GRID[::3], 8, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_tokens_are_those_without_speculation(
    cases: list[tuple[int, int, bool, bool]], num: int
) -> None:
    model = copy.deepcopy(twins("llama")[0]).double()
    texts = [(prompt * 3)[:40] for prompt in prompts(num)]
    samplings = [  # greedy, nearly greedy and drawn; of one prompt also two choices
        Sampling(max_tokens=16, temperature=(0, 0.3, 1)[n % 3], seed=n, logprobs=1)
        for n in range(num)
    ]

    def generated(**options: object) -> tuple[list[list[int]], list[float], int]:
        made = engine(model, dtype=torch.float64, **options)  # pyright: ignore[reportArgumentType]
        completions = [
            each
            for text, sampling in zip(texts, samplings, strict=True)
            for each in made.add(text, sampling, Sampling(max_tokens=9, temperature=0))
        ]
        while made.scheduler.has_work:
            made.step()
        assert made.scheduler.pool.num_held == 0
        counts = made.counts
        assert 0 <= counts.accepted_tokens <= counts.guessed_tokens
        scores = [score.logprob for each in completions for score in each.scores]
        return [each.new_tokens for each in completions], scores, counts.accepted_tokens

    expected, scores, num_accepted = generated()
    assert num_accepted == 0
    for block, budget, has_prefixes, is_ample in cases:
        tokens, found, num_accepted = generated(
            block_size=block, budget=budget, has_prefix_cache=has_prefixes,
            num_tokens=4096 if is_ample else 320, slots=8, guess=Ngrams(4, 3, 1).draft,
        )  # fmt: skip
        assert tokens == expected
        assert found == pytest.approx(scores, abs=1e-9)
        assert num_accepted > 10 or budget == 1


def test_a_draft_continues_the_latest_occurrence() -> None:
    draw = random.Random(0)
    for _ in range(300):
        ngrams = Ngrams(draw.randint(1, 5), draw.randint(2, 4), draw.randint(1, 2))
        completion = Completion([draw.randrange(4) for _ in range(draw.randint(1, 12))], Sampling())
        for _ in range(12):
            tokens, most = completion.tokens, draw.randint(1, 5)
            expected = list[int]()
            for n in range(min(ngrams.longest, len(tokens) - 1), ngrams.shortest - 1, -1):
                ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
                if ends:
                    period = len(tokens) - ends[-1]
                    num = min(most, ngrams.tokens)
                    expected = [tokens[ends[-1] + i % period] for i in range(num)]
                    break
            assert ngrams.draft(completion, most) == expected
            completion.tokens += [draw.randrange(4) for _ in range(draw.randint(1, 3))]


def test_the_setting_has_a_short_form_and_that_of_vllm() -> None:
    assert Ngrams.parse("none") is None
    assert Ngrams.parse("ngram") == Ngrams()
    assert Ngrams.parse("ngram,6,5,3") == Ngrams(6, 5, 3)
    text = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 5}'
    assert Ngrams.parse(text) == Ngrams(6, 5)
    wrongs = ["eagle", "ngram,0", "ngram,4,2,3", "ngram,a", "ngram,1,2,3,4", "{}", "[1]", text[:9]]
    wrongs += ['{"method": "ngram", "model": "a"}', '{"method": "ngram", "prompt_lookup_max": "4"}']
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="the nearest is ngram"):
            Ngrams.parse(wrong)
