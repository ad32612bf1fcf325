"""Uneven all-to-alls: by value over gloo and shared memory, by NCCL's rules, and counted."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from marks import by_hand
from nccl_trace import traced
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry, Ledger
from phalanx.comm.row_counts import RowCounts, note, noted
from phalanx.comm.shared_memory import SMALL_BYTES
from phalanx.errors import CollectiveMismatch
from phalanx.launch.local import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
DEVICE = torch.device("cpu")  # named, so that the rules of NCCL take its tensors for a GPU's


def test_a_matrix_of_ranks_follows_from_the_groups_of_each_rank() -> None:
    #            groups of rank 0   of rank 1
    counts = RowCounts(((2, 0, 3, 1), (0, 5, 0, 0)))
    assert counts.matrix == ((2, 4), (5, 0))
    assert (counts.sent(0), counts.received(0)) == ([2, 4], [2, 5])
    assert (counts.sent(1), counts.received(1)) == ([5, 0], [4, 0])
    assert counts.received_groups(0) == [(2, 0), (0, 5)]
    assert counts.received_groups(1) == [(3, 1), (0, 0)]
    assert counts.reversed.matrix == ((2, 5), (4, 0))
    assert counts.reversed.reversed.matrix == counts.matrix


def test_rows_spread_evenly_differ_by_one_at_most() -> None:
    assert RowCounts.even(2, 4, 10).groups == ((3, 3, 2, 2),) * 2
    assert RowCounts.even(3, 3, 3).matrix == ((1, 1, 1),) * 3


def matrices(num_ranks: int, num_random: int) -> list[RowCounts]:
    """Return counts of `num_random` random all-to-alls, and of those at the limits."""
    draw, ranks = random.Random(num_ranks), range(num_ranks)
    cases: list[list[list[int]]] = []
    for _ in range(num_random):
        cases.append([[draw.choice((0, 0, 1, 2, 7)) for _ in ranks] for _ in ranks])
    cases.append([[0] * num_ranks for _ in ranks])  # nobody has a row
    cases.append([[0 if r == 1 else 3 for _ in ranks] for r in ranks])  # a rank sends nothing
    cases.append([[0 if r == 1 else 3 for r in ranks] for _ in ranks])  # a rank receives nothing
    cases.append([[5 if (r, s) == (0, 1) else 0 for s in ranks] for r in ranks])  # one way alone
    cases.append([[5 if r == s else 0 for s in ranks] for r in ranks])  # each to itself
    return [RowCounts(tuple(map(tuple, case))) for case in cases]


def rows_of(rank: int, number: int, width: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return rows in which a rank and the place of a value can be read, in every data type."""
    size = number * math.prod(width)
    return ((torch.arange(size, device=DEVICE) * 8 + rank) % 251).to(dtype).view(number, *width)


def received_rows(
    counts: RowCounts, coord: int, width: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return what the rank at `coord` must receive, from what each rank has."""
    parts: list[Tensor] = []
    for rank, sizes in enumerate(counts.matrix):
        parts.append(rows_of(rank, sum(sizes), width, dtype).split(list(sizes))[coord])
    return torch.cat(parts)


def exchange_all(num_outer: int, num_ranks: int, shares_memory: bool, num_random: int) -> None:
    comm = Ranks({"outer": num_outer, "ep": num_ranks}, shares_memory=shares_memory)
    coord = comm.coord("ep")
    large = SMALL_BYTES // 8
    cases = [(dtype, (3,)) for dtype in DTYPES] + [(torch.float32, ()), (torch.float32, (large,))]
    for dtype, width in cases:
        pending = []
        for counts in matrices(num_ranks, num_random):
            rows = rows_of(coord, sum(counts.sent(coord)), width, dtype)
            there = comm.exchange_rows(rows, "ep", counts)
            assert there.dtype == dtype and there.shape[1:] == width
            assert torch.equal(there, received_rows(counts, coord, width, dtype))
            back = comm.exchange_rows(there, "ep", counts.reversed)
            assert torch.equal(back, rows)
            pending.append((comm.exchange_rows_start(rows, "ep", counts), there))
        for started, there in reversed(pending):  # in another order than they were started
            assert torch.equal(started.wait(), there)


@pytest.mark.parametrize(
    "num_outer, num_ranks, num_random",
    [(1, 2, 3), by_hand(1, 3, 60), by_hand(2, 2, 20), by_hand(1, 4, 60)],
)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_rows_arrive_and_return_in_every_engine_by_the_rules_of_nccl(
    num_outer: int, num_ranks: int, num_random: int, shares_memory: bool
) -> None:
    run_ranks(
        traced, num_outer * num_ranks,
        exchange_all, num_outer, num_ranks, shares_memory, num_random,
        threads=1,
    )  # fmt: skip


def test_four_ranks() -> None:
    run_ranks(exchange_all, 4, 1, 4, True, 2, threads=1)


COUNTS = RowCounts(((2, 1), (5, 0)))


def count_bytes(shares_memory: bool, bytes_per_s: float | None) -> tuple[list[Entry], list[Entry]]:
    comm = Ranks({"ep": 2}, shares_memory=shares_memory, bytes_per_s=bytes_per_s)
    coord = comm.coord("ep")
    counting = CountingComm({"ep": 2}, {"ep": coord})
    with Ledger(comm) as ledger:
        for each in (comm, counting):
            rows = torch.ones(sum(COUNTS.sent(coord)), 4, device=each.device)
            there = each.exchange_rows(rows, "ep", COUNTS)
            each.exchange_rows(there, "ep", COUNTS.reversed)
            each.swap(torch.ones(3, device=each.device), "ep", coord)
    return ledger.entries(), counting.entries()


@pytest.mark.fresh_ranks
@pytest.mark.parametrize("shares_memory, bytes_per_s", [(True, None), (False, None), (False, 1e6)])
def test_ledger_and_dry_run_count_the_bytes_that_each_rank_sends(
    shares_memory: bool, bytes_per_s: float | None
) -> None:
    # Rows of 16 bytes. Rank 0 sends 1 of 3 away, and returns 5 of 7; rank 1 sends 5 of 5 away, and
    # returns its only row. A swap of 12 bytes counts half of them, whoever is the partner.
    own = [Entry("other", "ep", "all_to_all", 3, 10 * 16 + 12, 6 * 16 + 6.0)]
    other = [Entry("other", "ep", "all_to_all", 3, 6 * 16 + 12, 6 * 16 + 6.0)]
    found = run_ranks(count_bytes, 2, shares_memory, bytes_per_s)
    assert found == [(own, own), (other, other)]


def announce_other_rows() -> str:
    comm = Ranks({"ep": 2})
    with pytest.raises(AssertionError, match="4 rows, and the counts announce 3"):
        comm.exchange_rows(torch.ones(4, 2), "ep", RowCounts(((2, 1), (2, 1))))
    # A defect that no caller of gather_counts has: ranks that believe in different counts.
    coord = comm.coord("ep")
    counts = RowCounts(((2, 1 + coord),) * 2)
    with pytest.raises(CollectiveMismatch) as caught:
        comm.exchange_rows(torch.ones(sum(counts.sent(coord)), 2), "ep", counts)
    return str(caught.value)


@pytest.mark.fresh_ranks
def test_rows_that_the_counts_do_not_announce_are_not_sent() -> None:
    for words in run_ranks(announce_other_rows, 2):
        assert "all_to_all of 6 float32" in words and "all_to_all of 8 float32" in words


def gather_counts() -> tuple[RowCounts, list[Entry], list[Entry]]:
    comm = Ranks({"ep": 2})
    counting = CountingComm({"ep": 2})
    counts_G = torch.tensor([1, 2, 3, 4]) * (1 + comm.coord("ep"))
    with Ledger(comm) as ledger:
        counts = comm.gather_counts(counts_G, "ep", int(counts_G.sum()))
    even = counting.gather_counts(counts_G.to("meta"), "ep", 10)
    assert even.matrix == ((6, 4), (6, 4))
    return counts, ledger.entries(), counting.entries()


def test_all_ranks_gather_the_same_counts() -> None:
    for counts, sent, of_dry_run in run_ranks(gather_counts, 2):
        assert counts.groups == ((1, 2, 3, 4), (2, 4, 6, 8))
        assert sent == of_dry_run == [Entry("other", "ep", "all_gather", 1, 64, 32.0)]


def test_counts_of_forwards_with_gradients_are_noted_once() -> None:
    weight = torch.ones(1, requires_grad=True)
    with noted() as seen:
        product = note(COUNTS) and 2 * weight
        product.register_hook(lambda _: note(COUNTS) and None)  # as if backward recomputed it
        product.backward()
        with torch.no_grad():
            note(COUNTS)
    note(COUNTS)
    assert seen == [COUNTS]
