"""phalanx.collectives on real ranks: what a reference gives, to the bit on all ranks and runs."""

from __future__ import annotations

import os

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

from marks import by_hand
from phalanx import collectives
from phalanx.comm.algorithms.running import REDUCTIONS
from phalanx.errors import CollectiveMismatch, ConfigError, PeerLost, ScriptError
from phalanx.launch.local import run_ranks

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("sizes", [[5], by_hand([0, 3, 5])])
def test_all_of_them_on_four_ranks(sizes: list[int]) -> None:
    runs = [run_ranks(job, 4, sizes, threads=1) for job in (everything, all_sums)]
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
        lambda: collectives.all_gather(torch.zeros(1).expand(8), x),
        lambda: collectives.all_to_all(torch.zeros(3, 1), torch.zeros(3, 1)),
        lambda: collectives.all_to_all(x.view(2, 2), x.view(2, 2)),
        lambda: collectives.all_to_all(rows[:2], rows[1:]),
        lambda: collectives.scatter(x, None, dist.get_rank()),
        lambda: collectives.send(x, 5),
        lambda: collectives.barrier(algoritm="ring"),
        lambda: collectives.all_reduce(x.numpy()),  # type: ignore
        lambda: collectives.all_reduce(torch.ones(3, device="meta")),
        lambda: collectives.all_reduce(x > 0, "avg"),
        lambda: collectives.all_to_all(x[0], x[0]),
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
    "all_gather: the tensor of shape (8,) is expanded",
    "expected the same shape and dtype, with 2 rows",
    "all_to_all: given and output overlap in memory",
    "overlap in memory",
    "is the root, but its full tensor is None",
    "rank 5 is not in the group of 2 ranks",
    "a collective accepts the keywords algorithm, group, async_op, but not 'algoritm'",
    "all-reduce: expected a tensor, but it is a ndarray",
    "all-reduce: the tensor is on meta",
    "torch.bool, which has no average; the nearest are 'and' and 'or'",
    "all_to_all: given is () of torch.float32",
]


def all_refused() -> list[str]:
    said = [refused(number) for number in range(len(SAID))]
    x = torch.ones(3)
    collectives.all_reduce(x)  # no earlier call is left
    assert x.tolist() == [2.0] * 3
    return said


def test_wrong_calls_get_one_message() -> None:
    (said, _) = run_ranks(all_refused, 2, threads=1)
    for found, expected in zip(said, SAID, strict=True):
        assert expected in found


def differing() -> list[str]:
    """Return what this rank is told of each call that differs on a rank; then it makes another."""
    rank = dist.get_rank()
    x, integers = torch.ones(6), torch.ones(6, dtype=torch.int32)
    calls = [
        lambda: collectives.all_reduce(x if rank else integers),
        lambda: collectives.all_reduce(x, ("sum", "max", "sum")[rank]),
        lambda: collectives.broadcast(torch.ones(4 + rank // 2)),
        lambda: collectives.broadcast(x, rank % 2),
        lambda: collectives.all_reduce(x, algorithm="tree" if rank else "ring"),
        lambda: collectives.barrier() if rank else collectives.all_reduce(x),
        lambda: collectives.all_reduce(torch.ones(3, device="meta") if rank == 1 else x),
    ]
    said = list[str]()
    for call in calls:
        with pytest.raises((CollectiveMismatch, PeerLost, ScriptError)) as caught:
            call()
        said.append(str(caught.value).partition("; ")[0])
        right = torch.full((2,), 1.0 + rank)
        collectives.all_reduce(right)
        assert right.tolist() == [6.0, 6.0]
    pid = os.fork()
    if pid == 0:
        try:
            collectives.all_reduce(x)
        except ScriptError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    return said


def test_calls_that_differ_are_an_error_on_all_ranks_and_leave_the_next_call_right() -> None:
    found = run_ranks(differing, 3, threads=1)
    sum_of_6 = "all-reduce sum of 6 {} by ring"
    ring = sum_of_6.format("float32")
    refusal = "all-reduce: the tensor is on meta, from which ranks cannot send"
    expected = [
        f"rank 0 calls {sum_of_6.format('int32')}, but ranks 1, 2 {ring}",
        f"ranks 0, 2 call {ring}, but rank 1 all-reduce max of 6 float32 by ring",
        "ranks 0, 1 call broadcast of 4 float32 with root 0 by tree, but rank 2 broadcast of 5 "
        "float32 with root 0 by tree",
        "ranks 0, 2 call broadcast of 6 float32 with root 0 by tree, but rank 1 broadcast of 6 "
        "float32 with root 1 by tree",
        f"rank 0 calls {ring}, but ranks 1, 2 all-reduce sum of 6 float32 by tree",
        f"rank 0 calls {ring}, but ranks 1, 2 barrier of 3 uint8 by halving-doubling",
    ]
    assert all(said[:-1] == expected for said in found)
    assert [said[-1].removeprefix("rank 1 has refused: ") for said in found] == [refusal] * 3


def laid_out() -> None:
    """Give tensors with strides, and averages whose sums leave the range of the dtype."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    column, total = torch.arange(12.0).view(4, 3)[:, rank], torch.tensor([3.0, 12.0, 21.0, 30.0])
    collectives.all_reduce(column, dist.ReduceOp.SUM, algorithm=None)
    assert torch.equal(column, total)
    broad = torch.ones(1).expand(num_ranks)
    gathered = torch.zeros(num_ranks * num_ranks, 2)[:, 1]
    collectives.all_gather(gathered, broad)
    assert torch.equal(gathered, torch.ones(num_ranks * num_ranks))
    part = torch.zeros(1, 2)[:, 0]
    collectives.reduce_scatter(part, broad)
    assert part.item() == num_ranks
    rows = torch.zeros(num_ranks, 2)[:, 0]
    collectives.all_to_all(rows, torch.tensor(float(rank)).expand(num_ranks))
    assert torch.equal(rows, torch.arange(float(num_ranks)))
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    work = collectives.isend(torch.arange(6.0)[::2] + rank, after)
    collectives.recv(rows, before)
    work.wait()
    assert torch.equal(rows, torch.arange(6.0)[::2] + before)
    for value, dtype in ((60000, torch.float16), (100, torch.int8), (-2e9, torch.int32)):
        x = torch.full((2,), int(value), dtype=dtype)
        collectives.all_reduce(x, "avg")
        assert x.tolist() == [value] * 2


def test_strides_and_averages_near_the_end_of_the_range() -> None:
    run_ranks(laid_out, 3, threads=1)


def test_a_process_that_has_not_joined_is_told_so() -> None:
    with pytest.raises(ScriptError, match=r"call phalanx\.init\(\) or"):
        collectives.all_reduce(torch.zeros(1))
