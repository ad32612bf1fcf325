"""Attention over shards of the positions against attention over the whole row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.models.attention import documents_of
from phalanx.parallel.context import partial
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.context.split import cut_documents
from phalanx.parallel.context.ulysses import Ulysses

NUM_ROWS, WIDTH = 3, 6


@dataclass(frozen=True)
class Case:
    """What attends; a document begins at `begins` of the positions.

    Without flash attention a ring computes as on a GPU.
    """

    kind: str = "ring"
    num_heads: int = 4
    num_groups: int = 2
    length: int = 40
    begins: float = 0.0
    is_causal: bool = True
    dtype: torch.dtype = torch.float64
    window: int | None = None
    has_flash: bool = True
    most_queries: int | None = None  # in a block


RINGS = [
    Case(),
    Case(num_heads=5, num_groups=1),
    Case(num_heads=3, num_groups=3, begins=0.1),
    Case(begins=0.4),
    Case(is_causal=False),
    Case(is_causal=False, begins=0.1),
    Case(length=336, num_heads=1, num_groups=1, begins=0.03, most_queries=32),  # several blocks
    Case(length=8),  # two positions a chunk for two ranks, one for four
    Case(dtype=torch.float32, begins=0.1),
    Case(dtype=torch.bfloat16, begins=0.1),
    Case(dtype=torch.bfloat16, num_heads=3, num_groups=1),
    Case(dtype=torch.bfloat16, window=7),
    Case(dtype=torch.bfloat16, is_causal=False),
    Case(window=2),
    Case(window=7, begins=0.1),
    Case(length=336, num_heads=1, num_groups=1, window=90, most_queries=32),
    Case(window=40),  # of all positions
]
IN_PLAIN_OPERATORS = [replace(case, has_flash=False) for case in RINGS]
BY_HEADS = [
    Case("ulysses"),
    Case("ulysses", num_heads=12, num_groups=3, begins=0.1),  # key heads that no degree divides
    Case("ulysses", num_heads=8, num_groups=1),
    Case("ulysses", num_heads=4, num_groups=4, begins=0.3),
    Case("ulysses", is_causal=False),
    Case("ulysses", dtype=torch.bfloat16, begins=0.1),
    Case("ulysses", window=7),
    Case("ulysses", window=7, begins=0.1),
]
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def plain(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, is_causal: bool, window: int | None
) -> Tensor:
    """Attend by the definition, with the mask of the full row."""
    length = q.shape[1]
    is_seen_BTT = documents[:, :, None] == documents[:, None, :]
    if is_causal:
        is_seen_BTT = is_seen_BTT & torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        places_T = torch.arange(length)
        is_seen_BTT = is_seen_BTT & (places_T[:, None] - places_T < window)
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores_BHTT = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[3] ** -0.5
    p_BHTT = scores_BHTT.masked_fill(~is_seen_BTT[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", p_BHTT, v)


def full_by_heads(q: Tensor, k: Tensor, v: Tensor, documents: None, window: None) -> Tensor:
    """Attend to all positions, as a kernel given to Ulysses."""
    assert documents is None and window is None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def errors_on_rank(cases: Sequence[Case], num_ranks: int) -> list[list[float]]:
    """Return for each case the largest error of the result and of dq, dk, dv, of their size."""
    # An outer axis, so that ranks of cp are not those of the job.
    comm = Ranks({"dp": 2, "cp": num_ranks})
    found: list[list[float]] = []
    for number, case in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        sizes = [
            (NUM_ROWS, case.length, heads, WIDTH)
            for heads in (case.num_heads, case.num_groups, case.num_groups, case.num_heads)
        ]
        q, k, v, do = (
            torch.randn(size, generator=generator, dtype=torch.float64).to(case.dtype)
            for size in sizes
        )
        begins = torch.rand(NUM_ROWS, case.length, generator=generator) < case.begins
        documents_BT = begins.cumsum(1)
        attend = Ring(comm, case.is_causal)
        if case.kind == "ulysses":
            attend = Ulysses(comm) if case.is_causal else Ulysses(comm, full_by_heads)
        held = case.length // num_ranks
        here = attend.order.positions(comm.coord("cp"), held)
        whole = [x.double().clone().requires_grad_() for x in (q, k, v)]
        expected = plain(*whole, documents_BT, case.is_causal, case.window)
        expected.backward(do.double())
        parts = [x[:, here].clone().requires_grad_() for x in (q, k, v)]
        documents = cut_documents(documents_of(documents_BT), q[..., 0, 0], attend, comm)
        with pytest.MonkeyPatch.context() as patch:
            if case.most_queries is not None:
                patch.setattr(partial, "_MOST_QUERIES", case.most_queries)
            if not case.has_flash:
                patch.setattr(partial, "_has_flash", lambda _: False)
            mixed = attend(*parts, documents, case.window)
            mixed.backward(do[:, here])
        pairs = [(mixed, expected), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
        found.append(
            [float(((a - b[:, here]).abs().max() / b.abs().max()).detach()) for a, b in pairs]
        )
    return found


@pytest.mark.parametrize("num_ranks", [2, by_hand(4)])
def test_each_rank_computes_its_positions_of_the_whole(
    num_ranks: int, subtests: pytest.Subtests
) -> None:
    cases = [*RINGS, *IN_PLAIN_OPERATORS, *BY_HEADS]
    ranks = run_ranks(errors_on_rank, 2 * num_ranks, cases, num_ranks, threads=1)
    for case, *errors in zip(cases, *ranks, strict=True):
        with subtests.test(str(case)):
            worst = max(max(of_rank) for of_rank in errors)
            assert worst < LIMITS[case.dtype], errors


def test_scores_are_made_for_blocks_of_queries() -> None:
    """No block is longer than 256 queries, nor sees keys that all of it may not look at."""
    q_BTHK = torch.zeros(1, 1024, 2, 4)
    chunk = partial.Chunk(slice(0, 1024), 2048)
    blocks = list(partial._blocks(q_BTHK, chunk, chunk, partial.AttentionMask()))
    assert [block.queries for block in blocks] == [slice(i, i + 256) for i in range(0, 1024, 256)]
    assert [block.keys for block in blocks] == [slice(0, i + 256) for i in range(0, 1024, 256)]
    starts_BT = torch.full((1, 1024), 2048 + 300)
    starts_BT[:, :300] = 0
    blocks = list(partial._blocks(q_BTHK, chunk, chunk, partial.AttentionMask(starts_BT=starts_BT)))
    assert [block.keys.start for block in blocks] == [0, 0, 300, 300]
    before = partial.Chunk(slice(0, 1024), 0)
    assert not list(partial._blocks(q_BTHK, before, chunk, partial.AttentionMask()))


@pytest.mark.parametrize("has_flash", [True, False])
def test_a_query_that_sees_no_key_of_a_part_takes_nothing_of_it(
    has_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_has_flash", lambda _: has_flash)
    q_BTHK, k_BTHK = torch.randn(2, 1, 4, 1, 8).double()
    here = partial.Chunk(slice(0, 4), 4)
    sight = partial.AttentionMask(starts_BT=torch.tensor([[0, 0, 6, 6]]))
    mixed = partial.PartialAttention(q_BTHK)
    mixed.add(q_BTHK, k_BTHK, k_BTHK, here, partial.Chunk(slice(0, 4), 0), sight)
    assert mixed.lse_BTH.isneginf().flatten().tolist() == [False, False, True, True]
    assert not mixed.o_BTHK[:, 2:].any() and mixed.o_BTHK.isfinite().all()
    mixed.add(q_BTHK, k_BTHK, k_BTHK, here, here, sight)
    assert mixed.lse_BTH.isfinite().all()
    assert torch.equal(mixed.o_BTHK[:, 2], k_BTHK[:, 2])  # it sees itself alone


def test_what_many_hops_give_is_merged_in_float32() -> None:
    """In bfloat16 a sum over 16 hops would round 16 times."""
    generator = torch.Generator().manual_seed(0)
    q_BTHK, k_BSHK, v_BSHK = torch.randn(3, 1, 256, 2, 16, generator=generator).bfloat16()
    here, sight = partial.Chunk(slice(0, 256), 0), partial.AttentionMask(is_causal=False)
    errors: list[float] = []
    for hops in (1, 16):
        mixed = partial.PartialAttention(q_BTHK)
        for at in range(0, 256, 256 // hops):
            chunk = partial.Chunk(slice(at, at + 256 // hops), at)
            mixed.add(q_BTHK, k_BSHK, v_BSHK, here, chunk, sight)
        heads = (x.double().transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
        due_BTHK = F.scaled_dot_product_attention(*heads).transpose(1, 2)
        assert mixed.o_BTHK.dtype == torch.float32
        errors.append(float((mixed.o_BTHK - due_BTHK).abs().max() / due_BTHK.abs().max()))
    assert errors[1] < 1.5 * errors[0]


def test_queries_of_any_strides_attend_alike_and_later_keys_are_not_seen() -> None:
    q_BTHK, k_BTHK, v_BTHK, do_BTHK = torch.randn(4, 2, 8, 3, 8).double()
    here, sight = partial.Chunk(slice(0, 8), 8), partial.AttentionMask()
    found: list[list[torch.Tensor]] = []
    for q in (q_BTHK, q_BTHK.transpose(2, 3).contiguous().transpose(2, 3)):
        mixed = partial.PartialAttention(q)
        mixed.add(q, k_BTHK, v_BTHK, here, partial.Chunk(slice(0, 8), 16), sight)
        assert mixed.lse_BTH.isneginf().all()
        mixed.add(q, k_BTHK, v_BTHK, here, here, sight)
        state = partial.BackwardState.of(q, mixed.o_BTHK, mixed.lse_BTH, do_BTHK)
        dk, dv = torch.zeros(2, *k_BTHK.shape, dtype=torch.float64)
        state.add(k_BTHK, v_BTHK, dk, dv, here, here, sight)
        found.append([mixed.o_BTHK, state.dq_BTHK, dk, dv])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
