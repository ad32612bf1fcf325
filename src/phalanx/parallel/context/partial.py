"""Attention to a subset of the keys, and the merge of several subsets into full attention.

Softmax over all keys follows from softmax over subsets of the keys, each with the log-sum-exp of
its scores (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135,
section 3.1). With outputs o, o' and log-sum-exps l, l' of two subsets, the merged output is

    L = log(exp l + exp l'),   O = exp(l - L) o + exp(l' - L) o'

Backward needs from the merged result only L and delta = sum(dO * O) for each query:

    p = exp(s - L),  dv = p^T dO,  ds = p * (dO v^T - delta),  dq = ds k,  dk = ds^T q

Scores are computed for one block of queries at a time, and only for keys that some query of the
block attends to. Sums are in float32 (float64 for float64 inputs). The code is plain PyTorch, for
any device. In float32 and float64 a CPU takes PyTorch's flash attention, which is faster: for each
block, or for whole chunks if neither documents nor windows mask a key.

Suffixes: see models/decoder.py; t is a block of queries, S are keys, and R = H / G is the number of
query heads for each key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.models.kernels import device_type

_MOST_SCORES = 1 << 26
"""Largest number of scores of one row of the batch that are held at a time."""

_MOST_QUERIES, _LEAST_QUERIES = 256, 16
"""Largest number of queries in a block, and the smallest to which `_MOST_SCORES` may reduce it."""

_MOST_IN_CALL = 128
"""Largest number of queries of several rows in one call of flash attention. A call for few queries
takes longer than its products, and the gradients of many take memory."""


class Chunk(NamedTuple):
    """Consecutive positions of a row.

    Attributes:
        local: index range of the positions in this rank's tensor.
        first: first position, counted in the full row.
    """

    local: slice
    first: int


@dataclass(frozen=True)
class AttentionMask:
    """The attention mask: a query attends to its document or window, if causal only up to itself.

    Attributes:
        is_causal: whether positions after a query are masked.
        starts_BT: first position, in the full row, that each of this rank's queries attends to; the
            start of its document or window. None for the start of the row.
        ends_BT: end of the document of each query, in the full row; only used if not causal.
    """

    is_causal: bool = True
    starts_BT: Tensor | None = None
    ends_BT: Tensor | None = None


class _Block(NamedTuple):
    """A block of queries of one row of the batch, and the keys that any of them attends to.

    Attributes:
        masked_tS: True where the key is masked for the query; None if no key is.
    """

    row: int
    queries: slice
    keys: slice
    masked_tS: Tensor | None


class PartialAttention:
    """Running attention output of queries, over the keys processed so far.

    Attributes:
        o_BTHK: attention output, in float32 or float64.
        lse_BTH: log-sum-exp of the scores; -inf for a query without any key so far.
    """

    def __init__(self, q_BTHK: Tensor) -> None:
        wide = torch.promote_types(q_BTHK.dtype, torch.float32)
        self.o_BTHK = torch.zeros_like(q_BTHK, dtype=wide, memory_format=torch.contiguous_format)
        self.lse_BTH = q_BTHK.new_full(q_BTHK.shape[:3], -math.inf, dtype=wide)

    def add(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        queries: Chunk,
        keys: Chunk,
        sight: AttentionMask,
    ) -> None:
        """Attend from one chunk of queries to one chunk of keys, and merge the result."""
        if _has_flash(q_BTHK):
            for part in _flash_parts(q_BTHK, queries, keys, sight):
                self._merge(part.at, *part.forward(q_BTHK, k_BSGK, v_BSGK))
            return
        num_groups = k_BSGK.shape[2]
        for block in _blocks(q_BTHK, queries, keys, sight):
            at = block.row, block.queries
            q_GNK = _grouped(q_BTHK[at], num_groups)
            scores_GNS = _scores(q_GNK, _by_head(k_BSGK[block.row, block.keys]), block.masked_tS)
            lse_GN = scores_GNS.logsumexp(-1)
            # In place: scores and probabilities are the largest tensors, [G, R t, S].
            p_GNS = scores_GNS.sub_(_finite(lse_GN)[..., None]).exp_()
            o_GNK = p_GNS.to(v_BSGK.dtype) @ _by_head(v_BSGK[block.row, block.keys])
            self._merge(at, _ungrouped(o_GNK, q_BTHK[at]), _ungrouped(lse_GN, q_BTHK[at]))

    def _merge(self, at: tuple[int | slice, slice], o_tHK: Tensor, lse_tH: Tensor) -> None:
        # Each output is a mean with weights that sum to 1. The two are weighted by their parts of
        # the softmax's denominator: exp(l - L) and exp(l' - L). Before the first keys l is -inf, so
        # this part is 0, and the zeros of `o_BTHK` do not count.
        before_tH = self.lse_BTH[at]
        both_tH = torch.logaddexp(before_tH, lse_tH)
        finite_tH = _finite(both_tH)
        kept_tHK = self.o_BTHK[at] * (before_tH - finite_tH).exp()[..., None]
        self.o_BTHK[at] = kept_tHK + o_tHK * (lse_tH - finite_tH).exp()[..., None]
        self.lse_BTH[at] = both_tH


@dataclass(frozen=True)
class BackwardState:
    """Backward state of this rank's queries.

    Attributes:
        q_BTHK, o_BTHK, do_BTHK: queries, the attention output, and its gradient.
        lse_BTH: log-sum-exp of the scores over all keys.
        delta_BTH: sum over K of do * o.
        dq_BTHK: accumulated gradient of the queries, in float32 or float64.
    """

    q_BTHK: Tensor
    o_BTHK: Tensor
    do_BTHK: Tensor
    lse_BTH: Tensor
    delta_BTH: Tensor
    dq_BTHK: Tensor

    @classmethod
    def of(cls, q_BTHK: Tensor, o_BTHK: Tensor, lse_BTH: Tensor, do_BTHK: Tensor) -> BackwardState:
        """Return the initial state, given the output of forward and its gradient; dq is zeros."""
        delta_BTH = (do_BTHK.to(lse_BTH.dtype) * o_BTHK).sum(-1)
        dq_BTHK = torch.zeros_like(
            q_BTHK, dtype=lse_BTH.dtype, memory_format=torch.contiguous_format
        )
        return cls(q_BTHK, o_BTHK, do_BTHK, lse_BTH, delta_BTH, dq_BTHK)

    def add(
        self,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        dk_BSGK: Tensor,
        dv_BSGK: Tensor,
        queries: Chunk,
        keys: Chunk,
        sight: AttentionMask,
    ) -> None:
        """Add the gradients of one (query chunk, key chunk) pair to dq, `dk_BSGK` and `dv_BSGK`."""
        q_BTHK, num_groups = self.q_BTHK, k_BSGK.shape[2]
        if _has_flash(q_BTHK):
            for part in _flash_parts(q_BTHK, queries, keys, sight):
                dq_BTHK, dk, dv = part.backward(self, k_BSGK, v_BSGK)
                self.dq_BTHK[part.at] += dq_BTHK
                dk_BSGK[part.others] += dk
                dv_BSGK[part.others] += dv
                del dq_BTHK, dk, dv  # before the next part allocates its own
            return
        scale = q_BTHK.shape[3] ** -0.5
        for block in _blocks(q_BTHK, queries, keys, sight):
            at, others = (block.row, block.queries), (block.row, block.keys)
            k_GSK, v_GSK = _by_head(k_BSGK[others]), _by_head(v_BSGK[others])
            q_GNK, do_GNK = (_grouped(x[at], num_groups) for x in (q_BTHK, self.do_BTHK))
            lse_GN1, delta_GN1 = (
                _grouped(x[at][..., None], num_groups) for x in (self.lse_BTH, self.delta_BTH)
            )
            # [G, R t, S]: the true probabilities at once, because the log-sum-exp is over all keys.
            # So no merge is needed in backward, and the pairs of chunks may come in any order.
            p_GNS = _scores(q_GNK, k_GSK, block.masked_tS).sub_(_finite(lse_GN1)).exp_()
            ds_GNS = (do_GNK @ v_GSK.mT).to(p_GNS.dtype).sub_(delta_GN1).mul_(p_GNS).mul_(scale)
            p_GNS, ds_GNS = p_GNS.to(do_GNK.dtype), ds_GNS.to(q_GNK.dtype)
            self.dq_BTHK[at] += _ungrouped(ds_GNS @ k_GSK, q_BTHK[at])
            dk_BSGK[others] += (ds_GNS.mT @ q_GNK).transpose(0, 1)
            dv_BSGK[others] += (p_GNS.mT @ do_GNK).transpose(0, 1)


def _has_flash(q_BTHK: Tensor) -> bool:
    """Return whether PyTorch's flash attention computes blocks of queries like these."""
    return q_BTHK.dtype in (torch.float32, torch.float64) and device_type(q_BTHK) == "cpu"


class _FlashPart(NamedTuple):
    """Queries of some rows of the batch, and the keys that they attend to.

    Attributes:
        at, others: index of the queries, and of the keys, in tensors of [B, T, ...].
        is_causal: whether the queries are at the positions of the keys, under a causal mask.
        masked_tS: True where the key is masked for the query; None if `is_causal`, or if no key is.
    """

    at: tuple[slice, slice]
    others: tuple[slice, slice]
    is_causal: bool
    masked_tS: Tensor | None = None

    def forward(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention output of these queries, and its log-sum-exp."""
        q, k, v = self._heads_first((q_BTHK,), (k_BSGK, v_BSGK))
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o_BHTK, lse_BHT = operator(q, k, v, 0.0, self.is_causal, attn_mask=self._bias(q))
        if self.masked_tS is not None:  # of a query without keys the operator returns 0
            lse_BHT.masked_fill_(self.masked_tS.all(1), -math.inf)
        return o_BHTK.transpose(1, 2), lse_BHT.transpose(1, 2)

    def backward(
        self, state: BackwardState, k_BSGK: Tensor, v_BSGK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of these queries, of their keys and of their values."""
        mine = state.do_BTHK, state.q_BTHK, state.o_BTHK, state.lse_BTH
        do, q, o, lse, k, v = self._heads_first(mine, (k_BSGK, v_BSGK))
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = operator(do, q, k, v, o, lse, 0.0, self.is_causal, attn_mask=self._bias(q))
        dq, dk, dv = (each.transpose(1, 2) for each in gradients)
        return dq, dk, dv

    def _heads_first(self, mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> Iterator[Tensor]:
        parts = [*(x[self.at] for x in mine), *(x[self.others] for x in theirs)]
        for x in parts:  # the operators read the last dimension as if its stride were 1
            yield (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)

    def _bias(self, q: Tensor) -> Tensor | None:
        """Return what the operator adds to the scores."""
        if self.masked_tS is None:
            return None
        return q.new_zeros(self.masked_tS.shape).masked_fill_(self.masked_tS, -math.inf)


def _flash_parts(
    q_BTHK: Tensor, queries: Chunk, keys: Chunk, sight: AttentionMask
) -> Iterator[_FlashPart]:
    """Yield the rows of a pair of chunks; by blocks, if documents or windows mask some keys."""
    if sight.is_causal and keys.first > queries.first:
        return
    if sight.starts_BT is None:
        is_causal = sight.is_causal and queries.first == keys.first
        # Only the diagonal pair has a mask, and it is the operator's own causal one; earlier chunks
        # are attended to in full.
        num_rows = max(1, _MOST_IN_CALL // (queries.local.stop - queries.local.start))
        for row in range(0, len(q_BTHK), num_rows):
            at = slice(row, row + num_rows)
            yield _FlashPart((at, queries.local), (at, keys.local), is_causal)
        return
    for row, block, seen, masked_tS in _blocks(q_BTHK, queries, keys, sight):
        at = slice(row, row + 1)
        yield _FlashPart((at, block), (at, seen), is_causal=False, masked_tS=masked_tS)


def _blocks(q_BTHK: Tensor, queries: Chunk, keys: Chunk, sight: AttentionMask) -> Iterator[_Block]:
    """Yield the blocks of queries that attend to any of the keys."""
    num_rows, _, num_heads, _ = q_BTHK.shape
    num_keys = keys.local.stop - keys.local.start
    size = max(_LEAST_QUERIES, min(_MOST_QUERIES, _MOST_SCORES // (num_heads * num_keys)))
    last = queries.local.stop
    rows, starts = range(num_rows), range(queries.local.start, last, size)
    if q_BTHK.is_meta:  # only peak memory counts: no block is larger than the last two of a row
        rows, starts = rows[:1], starts[-2:]
    for row in rows:
        for start in starts:
            block = slice(start, min(start + size, last))
            first = queries.first + start - queries.local.start  # position in the full row
            # The keys that any query of the block attends to, as positions in the full row.
            # Documents are in row order, so the first query has the smallest start, and the last
            # one the largest end. On a GPU, reading them would make the host wait; the mask still
            # applies.
            begin, end = keys.first, keys.first + num_keys
            if sight.is_causal:
                end = min(end, first + block.stop - block.start)
            if sight.starts_BT is not None and sight.starts_BT.is_cpu:
                begin = max(begin, int(sight.starts_BT[row, block.start]))
            if sight.ends_BT is not None and sight.ends_BT.is_cpu and not sight.is_causal:
                end = min(end, int(sight.ends_BT[row, block.stop - 1]))
            if begin < end:
                seen = slice(begin - keys.first, end - keys.first)
                yield _Block(
                    row,
                    block,
                    slice(keys.local.start + seen.start, keys.local.start + seen.stop),
                    _block_mask(row, block, first, begin, seen, sight, q_BTHK.device),
                )


def _block_mask(
    row: int,
    block: slice,
    first: int,
    first_key: int,
    seen: slice,
    sight: AttentionMask,
    device: torch.device,
) -> Tensor | None:
    """Return the mask of a block, True where a key is masked for a query; None if no key is."""
    num_queries, num_keys = block.stop - block.start, seen.stop - seen.start
    is_cut = sight.is_causal and first_key + num_keys - 1 > first
    if not is_cut and sight.starts_BT is None:
        return None
    keys_S = torch.arange(first_key, first_key + num_keys, device=device)
    hidden_tS = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=device)
    if is_cut:
        hidden_tS |= keys_S > torch.arange(first, first + num_queries, device=device)[:, None]
    if sight.starts_BT is not None:
        hidden_tS |= keys_S < sight.starts_BT[row, block][:, None]
    if sight.ends_BT is not None and not sight.is_causal:
        hidden_tS |= keys_S >= sight.ends_BT[row, block][:, None]
    return hidden_tS


def _scores(q_GNK: Tensor, k_GSK: Tensor, hidden_tS: Tensor | None) -> Tensor:
    """Return the scores, in float32 or float64, -inf where a key is masked; N is R times t."""
    scores_GNS = (q_GNK @ k_GSK.mT).to(torch.promote_types(q_GNK.dtype, torch.float32))
    scores_GNS *= q_GNK.shape[2] ** -0.5
    if hidden_tS is not None:
        scores_GNS.unflatten(1, (-1, len(hidden_tS))).masked_fill_(hidden_tS, -math.inf)
    return scores_GNS


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that exp(-inf - lse) is 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0)


def _by_head(x_SGK: Tensor) -> Tensor:
    return x_SGK.transpose(0, 1).contiguous()


def _grouped(x_tHK: Tensor, num_groups: int) -> Tensor:
    """Return [t, H, ...] with the R query heads of each key head stacked, as [G, R t, ...]."""
    # [t, H, K] -> [t, G, R, K] -> [G, R, t, K] -> [G, R t, K]: one product for each key head serves
    # its R query heads, without repeated keys.
    return x_tHK.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _ungrouped(x: Tensor, like_tHK: Tensor) -> Tensor:
    """Return [G, R t, ...] as [t, H, ...]."""
    num_queries = like_tHK.shape[0]
    return x.unflatten(1, (-1, num_queries)).flatten(0, 1).transpose(0, 1)
