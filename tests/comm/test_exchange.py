"""Direct exchange: what gloo's own collectives give, at any number of ranks, inside any group."""

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import exchange
from phalanx.comm.comm import Ranks
from phalanx.comm.fsdp import ShardGather, ShardReduction
from phalanx.comm.ledger import Entry, Ledger
from phalanx.launch.local import run_ranks


def gather_and_scatter(num_outer: int, num_ranks: int, dtype: torch.dtype) -> list[Entry]:
    """On the outer axis ranks repeat the job, so that global ranks differ from coordinates."""
    comm = Ranks({"outer": num_outer, "axis": num_ranks})
    group = comm.mesh.get_group("axis")
    coord = comm.coord("axis")
    part = (torch.arange(7) + 10 * dist.get_rank()).to(dtype)
    expected = torch.empty(7 * num_ranks, dtype=dtype)
    dist.all_gather_into_tensor(expected, part, group=group)
    with Ledger(comm) as ledger:
        for in_place in (False, True):
            output = torch.full_like(expected, -1)
            mine = output[7 * coord : 7 * coord + 7].copy_(part) if in_place else part
            exchange.all_gather(output, mine, group)
            assert torch.equal(output, expected)
        whole = (expected.double().sin() * (1 + dist.get_rank())).to(dtype)
        share = torch.empty(7, dtype=dtype)
        exchange.reduce_scatter(share, whole, group)
    parts = [torch.empty_like(whole) for _ in range(num_ranks)]
    dist.all_gather(parts, whole, group=group)
    total = torch.stack(parts).double().sum(0)[7 * coord : 7 * coord + 7]
    assert torch.allclose(share.double(), total, rtol=torch.finfo(dtype).eps * num_ranks, atol=0)
    return ledger.entries()


@pytest.mark.parametrize("num_outer, num_ranks", [(2, 1), (1, 2), (2, 2), (1, 3), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_to_glooes_own_and_counted_as_one_collective(
    num_outer: int, num_ranks: int, dtype: torch.dtype
) -> None:
    size = 7 * num_ranks * dtype.itemsize
    sent = size * (num_ranks - 1) / num_ranks
    for entries in run_ranks(
        gather_and_scatter, num_outer * num_ranks, num_outer, num_ranks, dtype
    ):
        assert [(e.op, e.calls, e.payload_bytes, e.sent_bytes) for e in entries] == [
            ("all_gather", 2, 2 * size, 2 * sent),
            ("reduce_scatter", 1, size, sent),
        ]


def many_at_once() -> list[bool]:
    """Return whether transfers of many sizes give, waited for in reverse, what they give alone."""
    group, rank = dist.group.WORLD, dist.get_rank()
    pairs, transfers = [], []
    for number, size in enumerate((1, 700_001, 5, 0, 90_000, 300_000)):
        full = torch.arange(3.0 * size).sin() * (1 + rank + number)
        alone, share = torch.full((size,), float("nan")), torch.full((size,), float("nan"))
        exchange.reduce_scatter(alone, full, group)
        transfers.append(exchange.reduce_scatter_start(share, full, group))
        pairs.append((share, alone))
        whole_alone, whole = torch.full((2, 3 * size), float("nan"))
        exchange.all_gather(whole_alone, alone, group)
        transfers.append(exchange.all_gather_start(whole, alone, group))
        pairs.append((whole, whole_alone))
    for each in reversed(transfers):
        assert not each.is_waited_for
        assert each.wait() and each.wait()  # the second does nothing
        assert each.is_waited_for
    output, engine = torch.empty(3), exchange.ProcessGroupEngine(group)
    gather = ShardGather(engine)
    assert gather(output, torch.ones(1), group) is None and not gather.is_under_way
    work = gather(output, torch.ones(1), group, async_op=True)
    assert isinstance(work, dist.Work) and gather.is_under_way
    work.wait()
    assert not gather.is_under_way
    ones = torch.ones(3)
    reduction = ShardReduction(engine)(output[:1], ones, group, dist.ReduceOp.SUM, async_op=True)
    assert reduction is not None and reduction.wait() and output[0] == 3
    assert ShardReduction(engine)(output[:1], ones, group, dist.ReduceOp.SUM) is None
    return [torch.equal(pending, alone) for pending, alone in pairs]


def test_transfers_at_one_time_are_kept_apart() -> None:
    assert run_ranks(many_at_once, 3, threads=1) == [[True] * 12] * 3


def refuse_another_reduction() -> None:
    group = dist.group.WORLD
    with pytest.raises(NotImplementedError, match="only sums"):
        engine = exchange.ProcessGroupEngine(group)
        ShardReduction(engine)(torch.empty(1), torch.ones(2), group, dist.ReduceOp.AVG)


def test_only_sums() -> None:
    run_ranks(refuse_another_reduction, 1)
