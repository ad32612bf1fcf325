"""phalanx.collectives on real ranks: what a reference gives, to the bit on all ranks and runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_jobs import (
    all_collectives,
    all_sums,
    back_to_back,
    counted,
    everything,
    messages,
    reduces,
)

from phalanx import collectives
from phalanx.comm.algorithms.running import REDUCTIONS
from phalanx.errors import ConfigError, ScriptError
from phalanx.launch.local import run_ranks

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def test_all_of_them_on_four_ranks() -> None:
    runs = [run_ranks(job, 4, 4, threads=1) for job in (everything, all_sums)]
    assert len({seen for run in runs for seen in run}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8])
def test_every_number_of_ranks(num_ranks: int) -> None:
    sizes = [0, 1, num_ranks - 1, num_ranks + 1, 1023]
    runs = [
        run_ranks(reduces, num_ranks, sizes, TYPES, list(REDUCTIONS), threads=1) for _ in range(2)
    ]
    assert len({seen for run in runs for seen in run}) == 1
    run_ranks(all_collectives, num_ranks, 1023, torch.bfloat16, num_ranks, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8])
def test_a_mebibyte_and_four_bytes(num_ranks: int) -> None:
    sizes = [(2**20 + 4) // 4]
    run_ranks(reduces, num_ranks, sizes, TYPES[:1], ["sum", "max"], threads=1)
    run_ranks(reduces, num_ranks, [(2**20 + 8) // 8], TYPES[-1:], ["xor"], threads=1)


@pytest.mark.slow
def test_a_thousand_calls_back_to_back() -> None:
    runs = [run_ranks(back_to_back, 4, 1000, threads=1) for _ in range(2)]
    assert len({seen for run in runs for seen in run}) == 1


@pytest.mark.parametrize(
    ("algorithm", "num_steps"), [("ring", 6), ("halving-doubling", 4), ("tree", None)]
)
def test_the_ledger_counts_the_steps_and_the_bytes(algorithm: str, num_steps: int | None) -> None:
    size = 1024
    found = run_ranks(counted, 4, size, algorithm, threads=1)
    sent = [sum(entry.sent_bytes for entry in entries) for entries in found]
    if num_steps is None:  # of a tree the inner ranks send most
        assert sent == [2 * 4096, 4096, 2 * 4096, 4096]
        return
    assert [[(entry.op, entry.calls) for entry in entries] for entries in found] == [
        [("send", num_steps)]
    ] * 4
    assert sent == [2 * 3 / 4 * 4 * size] * 4


def test_messages_with_tags_and_behind_a_collective() -> None:
    found = run_ranks(messages, 3, threads=1)
    assert found == [[2.0, 20.0, 9.0], [0.0, 0.0, 9.0], [1.0, 10.0, 9.0]]


def refused(number: int) -> str:
    """Return what is said of a wrong call; all ranks make it."""
    x, rows = torch.zeros(4), torch.zeros(3, 2)
    calls = [
        lambda: collectives.all_reduce(x, "add"),
        lambda: collectives.all_reduce(x, "xor"),
        lambda: collectives.all_reduce(x, algorithm="rign"),
        lambda: collectives.broadcast(x, 2),
        lambda: collectives.all_gather(x, x),
        lambda: collectives.all_gather(torch.zeros(2, 8).T[:4], x),
        lambda: collectives.all_to_all(torch.zeros(3, 1), torch.zeros(3, 1)),
        lambda: collectives.all_to_all(x.view(2, 2), x.view(2, 2)),
        lambda: collectives.all_to_all(rows[:2], rows[1:]),
        lambda: collectives.scatter(x, None, dist.get_rank()),
        lambda: collectives.send(x, 5),
        lambda: collectives.barrier(algoritm="ring"),
    ]
    with pytest.raises((ConfigError, ScriptError)) as caught:
        calls[number]()
    return str(caught.value)


SAID = [
    "the reduction is 'add' (did you mean 'and'?); expected one of sum, min, max, product",
    "the reduction 'xor' combines bits, and the tensor is torch.float32",
    "algorithm is 'rign'",
    "broadcast: rank 2 is not in the group of 2 ranks; the nearest is 1",
    "all_gather: the full tensor is (4,) of torch.float32",
    "all_gather: the full tensor is not contiguous",
    "expected the same shape and dtype, with 2 rows",
    "all_to_all: given and output overlap in memory",
    "overlap in memory",
    "is the root, but its full tensor is None",
    "rank 5 is not in the group of 2 ranks",
    "a collective accepts the keywords algorithm, group, async_op, but not 'algoritm'",
]


def all_refused() -> list[str]:
    return [refused(number) for number in range(len(SAID))]


def test_wrong_calls_get_one_message() -> None:
    (said, _) = run_ranks(all_refused, 2, threads=1)
    for found, expected in zip(said, SAID, strict=True):
        assert expected in found


def test_a_process_that_has_not_joined_is_told_so() -> None:
    with pytest.raises(ScriptError, match=r"call phalanx\.init\(\) or"):
        collectives.all_reduce(torch.zeros(1))
