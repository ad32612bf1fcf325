"""Steps of collectives, run in one process: results, bytes, and the rules of NCCL."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nccl_rules import Call, Event, Message, Wait, check
from phalanx.comm.algorithms.catalogue import COLLECTIVES, ROOTED, algorithms_of, list_steps
from phalanx.comm.algorithms.running import REDUCTIONS, AllToAllChunks, Chunks, FlatChunks
from phalanx.comm.algorithms.steps import Steps, cut
from phalanx.debug.fingerprint import Fingerprint
from phalanx.errors import ConfigError

NUMBERS_OF_RANKS = (1, 2, 3, 4, 5, 7, 8, 9)


def named(collective: str) -> list[str]:
    """Return the algorithms of a collective, a hierarchical one for several sizes of hosts."""
    names = algorithms_of(collective)
    hosts = [f"hierarchical/{size}" for size in (1, 2, 3, 8) if "hierarchical" in names]
    return [name for name in names if name != "hierarchical"] + hosts


CASES = [(collective, name) for collective in COLLECTIVES for name in named(collective)]


def simulate(
    steps: Steps, held: list[Chunks], combine: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> None:
    """Run the steps on what all ranks hold: each sends what it held when the step began."""
    for step in steps:
        sent = [held[move.source][move.chunks].clone() for move in step.moves]
        for move, incoming in zip(step.moves, sent, strict=True):
            mine = held[move.target][move.chunks]
            mine.copy_(combine(mine, incoming) if move.is_reduced else incoming)


def values(num_ranks: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a row of small integers for each rank, of which products and sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    high = 3 if num_ranks <= 5 else 2
    return torch.randint(1, high, (num_ranks, size), generator=draw).to(dtype)


def flats(rows: Tensor) -> list[Chunks]:
    return [FlatChunks(row, len(rows)) for row in rows]


def expected(rows: Tensor, reduction: str) -> Tensor:
    """Return the reduction by torch's own functions over all rows at once."""
    wide = rows.to(torch.float64) if rows.is_floating_point() else rows
    if reduction in ("and", "or", "xor"):
        columns = [[int(x) for x in column] for column in wide.T]
        whole = {"and": all, "or": any}.get(reduction)
        assert whole is None or all(x in (1, 2) for column in columns for x in column)
        bits = [[x >> bit & 1 for x in column] for column in columns for bit in range(3)]
        reduced = [whole(b) if whole else sum(b) % 2 for b in bits]
        numbers = [
            sum(int(reduced[3 * c + bit]) << bit for bit in range(3)) for c in range(len(columns))
        ]
        return torch.tensor(numbers, dtype=rows.dtype)
    functions = {
        "product": lambda x: x.prod(0),
        "min": lambda x: x.amin(0),
        "max": lambda x: x.amax(0),
    }
    return functions.get(reduction, lambda x: x.sum(0))(wide).to(rows.dtype)


@pytest.mark.parametrize("algorithm", named("all-reduce"))
@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_all_reduce_gives_the_reduction_of_all_ranks_to_the_bit(
    algorithm: str, num_ranks: int
) -> None:
    steps = list_steps("all-reduce", algorithm, num_ranks)
    for size in {0, 1, num_ranks - 1, num_ranks + 1, 65}:
        for reduction, combine in REDUCTIONS.items():
            for dtype in (torch.int64, torch.float32, torch.bfloat16):
                if reduction in ("and", "or", "xor") and dtype.is_floating_point:
                    continue
                rows = values(num_ranks, size, dtype)
                total = expected(rows, reduction)
                simulate(steps, flats(rows), combine)
                assert all(torch.equal(row, total) for row in rows), (size, reduction, dtype)
        noisy = torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(size))
        exact = noisy.double().sum(0)
        simulate(steps, flats(noisy))
        assert all(torch.equal(row, noisy[0]) for row in noisy)
        assert torch.allclose(noisy[0].double(), exact, rtol=0, atol=num_ranks**2 * 2**-22)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_every_collective_by_every_algorithm(collective: str, algorithm: str) -> None:
    for num_ranks, root in ((p, r) for p in NUMBERS_OF_RANKS for r in {0, p // 2, p - 1}):
        if root and collective not in ROOTED:
            continue
        steps = list_steps(collective, algorithm, num_ranks, root)
        if collective == "all-to-all":
            given = torch.arange(num_ranks**2 * 3).view(num_ranks, num_ranks, 3)
            output = torch.full_like(given, -1)
            simulate(steps, [AllToAllChunks(given[r], output[r], r) for r in range(num_ranks)])
            assert torch.equal(output, given.transpose(0, 1))
            continue
        rows = torch.randint(99, (num_ranks, 5 * num_ranks))
        before = rows.clone()
        simulate(steps, flats(rows))
        chunks = before.view(num_ranks, num_ranks, 5)
        diagonal = torch.stack([chunks[rank, rank] for rank in range(num_ranks)])
        found = rows.view(num_ranks, num_ranks, 5)
        if collective == "broadcast":
            assert torch.equal(rows, before[root].expand_as(rows))
        elif collective == "reduce":
            assert torch.equal(rows[root], before.sum(0))
        elif collective == "all-reduce":
            assert torch.equal(rows, before.sum(0).expand_as(rows))
        elif collective == "scatter":
            assert all(torch.equal(found[r, r], chunks[root, r]) for r in range(num_ranks))
        elif collective == "gather":
            assert torch.equal(found[root], diagonal)
        elif collective == "reduce-scatter":
            total = chunks.sum(0)
            assert all(torch.equal(found[r, r], total[r]) for r in range(num_ranks))
        else:  # all-gather, and barrier
            assert torch.equal(found, diagonal.expand_as(found))


def log2(num_ranks: int) -> int:
    return math.ceil(math.log2(num_ranks))


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_numbers_of_steps_and_bytes(num_ranks: int) -> None:
    steps = {
        name: len(list_steps("all-reduce", name, num_ranks))
        for name in algorithms_of("all-reduce")[:4]
    }
    assert steps == {
        "ring": 2 * (num_ranks - 1),
        "tree": 2 * log2(num_ranks),
        "halving-doubling": 2 * log2(num_ranks),
        "direct": 2 * (num_ranks > 1),
    }
    for algorithm in ("ring", "halving-doubling", "direct"):
        sent = Counter[int]()
        for step in list_steps("all-reduce", algorithm, num_ranks):
            for move in step.moves:
                sent[move.source] += len(move.chunks)
        # Chunks are P-ths: 2 (P - 1)/P of the tensor.
        assert all(sent[rank] == 2 * (num_ranks - 1) for rank in range(num_ranks))


def test_a_ring_speaks_to_the_next_rank_alone_and_a_hierarchy_across_hosts_by_leaders() -> None:
    for collective in COLLECTIVES:
        moves = (
            [m for step in list_steps(collective, "ring", 5, 0) for m in step.moves]
            if ("ring" in algorithms_of(collective))
            else []
        )
        ways = {(move.target - move.source) % 5 for move in moves}
        assert ways <= ({4} if collective in ("reduce", "gather") else {1})
    across = [
        move
        for step in list_steps("all-reduce", "hierarchical/4", 8)
        for move in step.moves
        if move.source // 4 != move.target // 4
    ]
    assert {(move.source, move.target) for move in across} == {(0, 4), (4, 0)}
    # 2 (H - 1)/H of 8 chunks, from either host.
    assert sum(len(move.chunks) for move in across) == 2 * 8


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_no_rank_writes_what_it_sends_in_the_same_step(collective: str, algorithm: str) -> None:
    for num_ranks in NUMBERS_OF_RANKS:
        for step in list_steps(collective, algorithm, num_ranks, num_ranks - 1):
            for one, other in itertools.product(step.moves, repeat=2):
                assert one.source != one.target
                if one.source == other.target:
                    assert not set(one.chunks) & set(other.chunks)


def events_of(steps: Steps, rank: int, number: Iterator[int]) -> Iterator[Event]:
    """Yield the calls of a rank, a batch for each step, as NCCL gets them."""
    for step in steps:
        messages = tuple(
            Message(
                move.source == rank,
                move.target if move.source == rank else move.source,
                Fingerprint(
                    "send" if move.source == rank else "recv", "", "int64", str(move.chunks)
                ),
            )
            for move in step.moves
            if rank in (move.source, move.target)
        )
        if messages:
            call = Call(next(number), "job", (), messages[0].what, messages)
            yield call
            yield Wait(call.number)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_nccl_would_run_every_list(collective: str, algorithm: str) -> None:
    for num_ranks in range(1, 10):
        steps = list_steps(collective, algorithm, num_ranks, num_ranks // 2)
        check([[*events_of(2 * steps, r, itertools.count())] for r in range(num_ranks)])


def test_ranges_are_cut_evenly() -> None:
    assert [len(part) for part in cut(7, 3)] == [2, 2, 3]
    assert [*itertools.chain(*cut(7, 3))] == [*range(7)]


@pytest.mark.parametrize(
    ("collective", "algorithm", "said"),
    [
        ("all-reduce", "rign", "did you mean 'ring'"),
        ("all-to-all", "tree", "all-to-all is implemented by ring, halving-doubling, direct"),
        ("all-reduce", "hierarchical", "the nearest is hierarchical/2"),
        ("all-reduce", "hierarchical/0", "expected hierarchical/RANKS"),
        ("all-reduce", "ring/2", "ring takes no option; write 'ring'"),
    ],
)
def test_what_is_not_there_gets_one_message(collective: str, algorithm: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list_steps(collective, algorithm, 4)
