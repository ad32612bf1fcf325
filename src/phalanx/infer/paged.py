"""Attention over a paged key-value cache.

A step computes the tokens of several sequences as one row [1, N]. Each layer first writes the keys
and values of all N tokens to their slots, and then each sequence attends to its own blocks.

With a block size of the longest sequence, the cache is contiguous: one block per sequence.

Suffixes: see models/decoder.py; N tokens of a step, n tokens of one sequence in the step, S slots
of the cache, T keys of a sequence, M blocks of the longest block table.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from phalanx.infer.options import TokenScore
from phalanx.infer.pool import BlockCopy, BlockPool
from phalanx.infer.quantize import quantized
from phalanx.models.attention import GQA_ARGUMENTS, attend, runs_flash
from phalanx.models.shape import ModelShape

FLASH_BLOCK: Final = 256
"""Flash attention 2 reads blocks in place if their size is a multiple of it
(Dao-AILab/flash-attention #828); with other block sizes each step gathers the keys and values."""

READS_TABLES: Final = "block_table" in inspect.signature(varlen_attn).parameters
"""Whether varlen_attn accepts block tables. In torch 2.11 it does not, and each step gathers the
keys and values."""


_ONE_SPLIT: Final[dict[str, int]] = (
    {"num_splits": 1} if "num_splits" in inspect.signature(varlen_attn).parameters else {}
)
"""Arguments with which the logits of a request do not depend on the rest of the batch; torch 2.11
has none."""

_GATHERED: Final = 1 << 18
"""Most keys that one call gathers: 0.5 GiB of keys, and of values, with 8 heads of 128 in bf16."""


class _FlashCall(NamedTuple):
    """A flash attention call for consecutive sequences of a step.

    Attributes:
        num_queries: their tokens in the step.
        slots: slots to gather keys and values from; None if blocks are read in place.
        arguments: further arguments of `varlen_attn`.
    """

    num_queries: int
    slots: Tensor | None
    arguments: dict[str, Any]


class StepSpan(NamedTuple):
    """Tokens of one sequence in a step: positions [start, stop), and the block table."""

    start: int
    stop: int
    blocks: list[int]


@dataclass
class ScoredRow:
    """A row of a step whose logits score the prompt token after it; the runner sets `score`.

    Attributes:
        row: index into the tokens of the step.
        token: the prompt token after it.
        num_top: number of alternatives to score too.
    """

    row: int
    token: int
    num_top: int
    score: TokenScore | None = None


@dataclass(frozen=True)
class FlatStep:
    """One step as plain numbers, which the first rank of a job broadcasts to the others.

    Attributes:
        tokens: token ids of all sequences, concatenated.
        spans: span of each sequence, in the order of `tokens`.
        rows: indices into `tokens` of the tokens whose logits are returned.
        copies: blocks to copy before the step writes to the cache.
        scored: rows that score prompt tokens; their logits are not returned.
        num_ids: number of ids that stand for a token; None for all.
        adapters: number of the adapter of each span, see lora_modules.py.
    """

    tokens: list[int]
    spans: list[StepSpan]
    rows: list[int]
    copies: Sequence[BlockCopy] = ()
    scored: list[ScoredRow] = field(default_factory=list[ScoredRow])
    num_ids: int | None = None
    adapters: list[int] = field(default_factory=list[int])


class KVCache:
    """Keys and values of all layers on one rank, in blocks; in int8 or float8 with scales.

    Attributes:
        block_size: positions of a block.
        keys, values: [L, S, G, K]; slot = block * block_size + offset.
        scales: of keys and of values, [L, S, G, 1], float32; none unless quantized.
    """

    def __init__(
        self,
        shape: ModelShape,
        pool: BlockPool,
        dtype: torch.dtype,
        device: torch.device,
        num_shards: int = 1,
        stored: torch.dtype | None = None,
    ) -> None:
        """Allocate the blocks of `pool` for a model; a rank has 1 / `num_shards` of its heads.

        `read` returns `dtype`; `stored` is a dtype to quantize to, see quantize.py, or None.
        """
        num_slots, num_groups = pool.num_blocks * pool.block_size, shape.num_kv_heads // num_shards
        sizes = (shape.num_layers, num_slots, num_groups, shape.head_dim)
        self.block_size = pool.block_size
        self.keys = torch.zeros(sizes, dtype=stored or dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.scales: tuple[Tensor, ...] = ()
        if stored is not None:
            scales = self.keys.new_zeros((*sizes[:3], 1), dtype=torch.float32)
            self.scales = scales, torch.zeros_like(scales)
        self._dtype = dtype
        self._layers = list(zip(self.keys, self.values, strict=True))

    @property
    def nbytes(self) -> int:
        """Size of the cache, bytes."""
        return sum(part.nbytes for part in self.parts())

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers, in the order of `copies`."""
        size = self.block_size
        for source, target in copies:
            for part in self.parts():
                part[:, target * size :][:, :size] = part[:, source * size :][:, :size]

    def parts(self) -> tuple[Tensor, ...]:
        """Return all tensors [L, S, ...] of the cache."""
        return self.keys, self.values, *self.scales

    def write(self, layer: int, slots_N: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> None:
        """Write keys and values of one layer to their slots."""
        if not self.scales:
            self.keys[layer].index_copy_(0, slots_N, k_NGK)
            self.values[layer].index_copy_(0, slots_N, v_NGK)
            return
        for number, new in enumerate((k_NGK, v_NGK)):
            home, scales = self.parts()[number], self.scales[number]
            stored, scale = quantized(new, home.dtype)
            # index_copy_ has no float8 kernel: bytes are copied.
            home[layer].view(torch.uint8).index_copy_(0, slots_N, stored.view(torch.uint8))
            scales[layer].index_copy_(0, slots_N, scale)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return k_TGK and v_TGK of `slots`: views for a slice, copies for indices."""
        if self.scales:
            k, v, key_scales, value_scales = (part[layer][slots] for part in self.parts())
            k, v = k.float() * key_scales, v.float() * value_scales
            return k.to(self._dtype), v.to(self._dtype)
        keys, values = self._layers[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        return keys.index_select(0, slots), values.index_select(0, slots)


class PagedAttention:
    """Replacement of `models.attention.attend` for one step.

    Slots and masks are computed once for all layers with the same window.
    """

    def __init__(self, cache: KVCache, step: FlatStep) -> None:
        self._cache, self._spans = cache, step.spans
        self._lengths = [span.stop - span.start for span in step.spans]
        self._device, size = cache.keys.device, cache.block_size
        positions = [(span, at) for span in step.spans for at in range(span.start, span.stop)]
        self.positions_1N = torch.tensor([[at for _, at in positions]], device=self._device)
        slots = [span.blocks[at // size] * size + at % size for span, at in positions]
        self._slots_N = torch.tensor(slots, device=self._device)
        self._keys: dict[int | None, list[tuple[slice | Tensor, Tensor | None]]] = {}
        self._flash: dict[int | None, list[_FlashCall]] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, documents: Any, window: int | None
    ) -> Tensor:
        """Write k and v [1, N, G, K] to the cache; return the attention output [1, N, H, K].

        The arguments after `layer` equal `models.attention.attend`'s; a step has no documents.
        """
        del documents
        self._cache.write(layer, self._slots_N, k[0], v[0])
        if runs_flash(q):
            return self._attend_flash(layer, window, q[0])[None]
        # How a sequence attends depends on its span in this step:
        #
        #     span           keys                         by
        #     start 0        only the step's own          `attend`, causal
        #     one token      its blocks                   `_decode`, without a mask
        #     other chunks   its blocks, own tokens too   a mask [n, T]
        if window not in self._keys:
            self._keys[window] = [self._keys_of(span, window) for span in self._spans]
        if len(self._spans) == q.shape[1]:  # one token of each sequence: decode only
            return self._decode(layer, self._keys[window], q)
        parts = zip(*(x.split(self._lengths, dim=1) for x in (q, k, v)), strict=True)
        mixed: list[Tensor] = []
        for span, keys, part in zip(self._spans, self._keys[window], parts, strict=True):
            if span.start == 0:  # the first tokens of a prompt need nothing from the cache
                mixed.append(attend(part[0], part[1], part[2], None, window))
            elif span.stop - span.start == 1:
                mixed.append(self._decode(layer, [keys], part[0]))
            else:
                slots, mask_nT = keys
                k_1GTK, v_1GTK = (x.transpose(0, 1)[None] for x in self._cache.read(layer, slots))
                q_1HnK = part[0].transpose(1, 2)
                out = F.scaled_dot_product_attention(
                    q_1HnK, k_1GTK, v_1GTK, attn_mask=mask_nT, enable_gqa=True
                )
                mixed.append(out.transpose(1, 2))
        return torch.cat(mixed, dim=1)

    def _decode(
        self, layer: int, keys: Sequence[tuple[slice | Tensor, Tensor | None]], q_1NHK: Tensor
    ) -> Tensor:
        """Return the attention output [1, N, H, K] for one token of each of N sequences.

        Decoding small models is bound by operator launches, so each sequence uses few operators.
        """
        num_groups = self._cache.keys.shape[2]
        # The queries of a group become the rows of one head: one token needs no mask.
        queries = q_1NHK.unflatten(2, (num_groups, -1)).unbind(1)
        mixed: list[Tensor] = []
        for (slots, _), q_1GhK in zip(keys, queries, strict=True):
            k_TGK, v_TGK = self._cache.read(layer, slots)
            k_1GTK, v_1GTK = k_TGK.transpose(0, 1)[None], v_TGK.transpose(0, 1)[None]
            mixed.append(F.scaled_dot_product_attention(q_1GhK, k_1GTK, v_1GTK))
        return torch.cat(mixed).view(q_1NHK.shape)

    def _keys_of(self, span: StepSpan, window: int | None) -> tuple[slice | Tensor, Tensor | None]:
        """Return the slots that a sequence attends to, and the mask [n, T]; None for one token."""
        (slots, first), stop = self._slots(span, window), span.stop
        if isinstance(slots, Tensor):
            slots = slots.to(self._device)
        if stop - span.start == 1:
            return slots, None
        queries_n1 = torch.arange(span.start, stop, device=self._device)[:, None]
        keys_T = torch.arange(first, stop, device=self._device)
        mask_nT = keys_T <= queries_n1
        return slots, mask_nT if window is None else mask_nT & (keys_T > queries_n1 - window)

    def _slots(self, span: StepSpan, window: int | None) -> tuple[slice | Tensor, int]:
        """Return the slots that a sequence attends to, and their first position.

        A tensor of slots is on the host.
        """
        # Block size 4, window none, positions 0 .. 9 in blocks [2, 3, 6]:
        #
        #     slots    8 9 10 11 | 12 13 14 15 | 24 25         block x 4 + offset
        #
        # Consecutive blocks, as [2, 3], are one slice, which is read as a view and not gathered.
        first = 0 if window is None else max(0, span.start - window + 1)
        size = self._cache.block_size
        blocks = span.blocks[first // size : (span.stop - 1) // size + 1]
        offset, length = first % size, span.stop - first
        if all(b - a == 1 for a, b in pairwise(blocks)):
            begin = blocks[0] * size + offset
            return slice(begin, begin + length), first
        slots = torch.tensor(blocks)[:, None] * size + torch.arange(size)
        return slots.flatten()[offset : offset + length], first

    def _attend_flash(self, layer: int, window: int | None, q_NHK: Tensor) -> Tensor:
        """Return the attention output [N, H, K] of all sequences, by one flash call or few."""
        if window not in self._flash:
            is_stored = self._cache.keys.dtype == q_NHK.dtype  # else `read` converts
            is_in_place = READS_TABLES and is_stored and self._cache.block_size % FLASH_BLOCK == 0
            self._flash[window] = [self._in_place()] if is_in_place else self._gathered(window)
        mixed: list[Tensor] = []
        parts = q_NHK.split([call.num_queries for call in self._flash[window]])
        for call, part in zip(self._flash[window], parts, strict=True):
            if call.slots is None:
                size = self._cache.block_size
                k, v = (x[layer].unflatten(0, (-1, size)) for x in self._cache.parts())
            else:
                k, v = self._cache.read(layer, call.slots)
            out = varlen_attn(
                *(part, k, v),
                window_size=(-1 if window is None else window - 1, 0),
                **(GQA_ARGUMENTS if part.shape[1] != k.shape[-2] else {}),
                **call.arguments,
            )
            mixed.append(cast(Tensor, out))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _in_place(self) -> _FlashCall:
        """Return the call that reads the blocks of all sequences in place, by block tables."""
        most = max(len(span.blocks) for span in self._spans)
        tables = [[*span.blocks, *[0] * (most - len(span.blocks))] for span in self._spans]
        stops = [span.stop for span in self._spans]
        arguments = {
            "cu_seq_k": None,
            "max_k": max(stops),
            "seqused_k": torch.tensor(stops, dtype=torch.int32, device=self._device),
            "block_table": torch.tensor(tables, dtype=torch.int32, device=self._device),
        }
        return self._call(self._lengths, None, arguments)

    def _gathered(self, window: int | None) -> list[_FlashCall]:
        """Return calls that each gather at most _GATHERED keys, or the keys of one sequence."""
        # Sequences are cut into calls of at most 256k keys, so that a step of long contexts does
        # not gather all at once:
        #
        #     keys of each sequence    100k 90k | 200k | 80k 80k 80k
        groups: list[tuple[list[int], list[Tensor]]] = []
        num_keys = 0
        for span, length in zip(self._spans, self._lengths, strict=True):
            slots, _ = self._slots(span, window)
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop)
            num_keys += len(slots)
            if not groups or num_keys > _GATHERED:
                groups.append(([], []))
                num_keys = len(slots)
            groups[-1][0].append(length)
            groups[-1][1].append(slots)
        calls: list[_FlashCall] = []
        for lengths, slots_of in groups:
            num_slots = [len(slots) for slots in slots_of]
            arguments = {"cu_seq_k": _borders(num_slots, self._device), "max_k": max(num_slots)}
            calls.append(self._call(lengths, torch.cat(slots_of).to(self._device), arguments))
        return calls

    def _call(
        self, lengths: Sequence[int], slots: Tensor | None, arguments: dict[str, Any]
    ) -> _FlashCall:
        """Return a call for consecutive sequences with `lengths` queries."""
        borders = _borders(lengths, self._device)
        queries = {"cu_seq_q": borders, "max_q": max(lengths), **_ONE_SPLIT}
        return _FlashCall(sum(lengths), slots, arguments | queries)


def _borders(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return 0 and the ends of consecutive sequences of these lengths, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
