"""Choose the next token of each request from its logits; all generation uses this sampler.

A draw depends only on the request's seed and the index of the token in the request. So a request
gets the same tokens alone, in any batch and in any order, as long as its logits are the same.

Suffixes: N requests, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.infer.options import Sampling, TokenScore
from phalanx.models.random import key, uniform


class LogitRules:
    """How the options of one request change its logits before temperature and filters.

    Order and definitions are vLLM's: allowed ids, bad words, `min_tokens`, bias, then penalties.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], end_ids: Iterable[int]) -> None:
        """Prepare the rules of a request; `end_ids` end a text of the model."""
        self._sampling, self._prompt = sampling, frozenset(prompt)
        self._ends = sorted({*end_ids, *sampling.stop_token_ids})

    def change(self, generated: Sequence[int], logits_V: Tensor) -> None:
        """Change the logits of the token after `generated`, in place."""
        sampling, device = self._sampling, logits_V.device
        if sampling.allowed_token_ids is not None:
            is_banned_V = torch.ones_like(logits_V, dtype=torch.bool)
            is_banned_V[list(sampling.allowed_token_ids)] = False
            logits_V.masked_fill_(is_banned_V, -math.inf)
        banned = [
            last for *before, last in sampling.bad_words
            if not before or list(generated[-len(before) :]) == before
        ]  # fmt: skip
        banned += self._ends if len(generated) < sampling.min_tokens else ()
        logits_V[[id for id in banned if id < len(logits_V)]] = -math.inf
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            logits_V[ids] += torch.tensor(list(sampling.logit_bias.values()), device=device)
        if sampling.repetition_penalty != 1:
            ids = [id for id in self._prompt.union(generated) if id < len(logits_V)]
            some, penalty = logits_V[ids], sampling.repetition_penalty
            logits_V[ids] = torch.where(some > 0, some / penalty, some * penalty)
        if generated and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = Counter(generated)
            nums = torch.tensor(list(counts.values()), device=device)
            penalties = nums * sampling.frequency_penalty + sampling.presence_penalty
            logits_V[list(counts)] -= penalties


def choose(
    logits_NV: Tensor,
    samplings: Sequence[Sampling],
    numbers: Sequence[int],
    num_ids: int | None = None,
    masks: Mapping[int, Tensor] | None = None,
    changes: Mapping[int, Callable[[Tensor], None]] | None = None,
) -> tuple[list[int], list[TokenScore | None]]:
    """Return the next token of each request, and its score if the request has `logprobs`.

    Args:
        logits_NV: logits of any dtype. A row with a NaN, or whose maximum is infinite, gets the
            token -1.
        samplings: sampling options of each request.
        numbers: number of tokens that each request has generated before.
        num_ids: number of ids that stand for a token; None for all. The others are never chosen.
        masks: row -> for each of the first ids whether it may be chosen, bool; later ones may not.
            The scores do not change.
        changes: row -> function that changes the logits of the row in place, before its mask.
    """
    scored_NV, logits_NV = logits_NV, logits_NV[:, :num_ids]
    largest_N, ids_N = logits_NV.max(-1)
    tokens = ids_N.where(largest_N.isfinite(), -1).tolist()
    masks, changes = masks or {}, changes or {}
    if masks or changes:
        logits_NV = logits_NV.clone()
        for row, change in changes.items():
            change(logits_NV[row])
        for row, mask in masks.items():
            is_legal_V = torch.zeros(logits_NV.shape[1], dtype=torch.bool)
            is_legal_V[: len(mask)] = mask[: len(is_legal_V)]
            logits_NV[row].masked_fill_(~is_legal_V.to(logits_NV.device), -float("inf"))
        for row in {**masks, **changes}:
            largest, id = logits_NV[row].max(-1)
            tokens[row] = int(id) if tokens[row] >= 0 and largest.isfinite() else -1
    drawn = [n for n, each in enumerate(samplings) if each.temperature > 0 and tokens[n] >= 0]
    if drawn:
        few = [samplings[row] for row in drawn]
        choices = _draw(logits_NV[drawn].double(), few, [numbers[row] for row in drawn])
        for row, token in zip(drawn, choices, strict=True):
            tokens[row] = token
    scores: list[TokenScore | None] = [None] * len(tokens)
    nums = {n: s.logprobs for n, s in enumerate(samplings) if s.logprobs is not None}
    if rows := [row for row in nums if tokens[row] >= 0]:
        chosen, tops = [tokens[row] for row in rows], [nums[row] for row in rows]
        found = scores_of_rows(scored_NV[rows], chosen, tops, num_ids)
        for row, score in zip(rows, found, strict=True):
            scores[row] = score
    return tokens, scores


def scores_of_rows(
    logits_NV: Tensor, tokens: Sequence[int], nums: Sequence[int], num_ids: int | None = None
) -> list[TokenScore]:
    """Return the score of a token in each row, with `nums` alternatives, of ids below `num_ids`.

    As in transformers and vLLM, the probabilities are over all ids of the model.
    """
    logprobs_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    own_N1 = logprobs_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])
    ranks = ((logprobs_NV > own_N1).sum(-1) + 1).tolist()
    tokens_NV = logprobs_NV[:, :num_ids]
    values, ids = tokens_NV.topk(min(max(nums), tokens_NV.shape[1]))
    rows = zip(own_N1[:, 0].tolist(), values.tolist(), ids.tolist(), nums, ranks, strict=True)
    return [
        # -inf: no token
        TokenScore(
            own, tuple((i, p) for i, p in zip(ids, top, strict=True) if p > -math.inf)[:n], r
        )
        for own, top, ids, n, r in rows
    ]


def _draw(logits_NV: Tensor, samplings: Sequence[Sampling], numbers: Sequence[int]) -> list[int]:
    """Sample a token of each row by inverting the cumulative distribution."""

    def column(name: str) -> Tensor:
        values = [getattr(each, name) for each in samplings]
        return torch.tensor(values, dtype=torch.float64, device=logits_NV.device)[:, None]

    below_NV = logits_NV - logits_NV.amax(-1, keepdim=True)  # so that no temperature overflows
    p_NV = torch.softmax(below_NV / column("temperature"), dim=-1)
    if any(each.top_k or each.top_p < 1 for each in samplings):
        # top_p is relative to the sum of the top_k. The most probable token always stays:
        #
        #     p, sorted       0.5  0.2  0.15  0.1  0.05
        #     top_k 3         0.5  0.2  0.15  0    0         sum 0.85
        #     before          0    0.5  0.7
        #     top_p 0.6       0.5  0.2  0     0    0         before < 0.6 x 0.85 = 0.51
        top_k_N1, top_p_N1 = column("top_k"), column("top_p")
        sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
        ranks_V = torch.arange(p_NV.shape[1], device=p_NV.device)
        sorted_NV = sorted_NV.where((ranks_V < top_k_N1) | (top_k_N1 == 0), 0.0)
        before_NV = sorted_NV.cumsum(-1) - sorted_NV
        is_kept = before_NV < top_p_N1 * sorted_NV.sum(-1, keepdim=True)
        sorted_NV = sorted_NV.where(is_kept | (ranks_V == 0), 0.0)
        p_NV = torch.zeros_like(p_NV).scatter_(-1, order_NV, sorted_NV)
    if any(each.min_p for each in samplings):
        least_N1 = p_NV.amax(-1, keepdim=True) * column("min_p")
        p_NV = p_NV.where(p_NV >= least_N1, 0.0)
    draws = torch.tensor(
        [
            float(uniform(key(each.seed, "sample"), torch.tensor([number])))
            for each, number in zip(samplings, numbers, strict=True)
        ],
        dtype=torch.float64,
    ).to(logits_NV.device)
    # The draw in [0, 1) falls into one token's part of the cumulative sum:
    #
    #     p 0.5 0.2 0.3    sums 0.5 0.7 1.0    draw 0.6 -> token 1
    sums_NV = p_NV.cumsum(-1)
    found_N1 = torch.searchsorted(sums_NV, draws[:, None] * sums_NV[:, -1:])
    return found_N1.clamp_(max=logits_NV.shape[1] - 1)[:, 0].tolist()
