"""The ledger counts what crosses the wire, whoever sends it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger, sent_bytes
from phalanx.launch.local import run_ranks


def test_bytes_of_optimal_algorithms() -> None:
    assert sent_bytes("all_reduce", 100, 4) == 150
    assert sent_bytes("all_gather", 100, 4) == 75
    assert sent_bytes("send", 100, 4) == 100
    assert sent_bytes("all_reduce", 100, 1) == 0


def count_everything() -> list[Entry]:
    comm = Ranks({"outer": 2, "inner": 2})
    tensor = torch.ones(6)
    pieces = [torch.empty(6) for _ in range(2)]
    inner = comm.mesh.get_group("inner")
    with Ledger(comm) as ledger:
        with ledger.phase("ours"):
            comm.all_reduce(tensor, "inner")
            comm.all_reduce_start(tensor, "outer", "max").wait()
            comm.broadcast(tensor, "inner")
        with ledger.phase("torch"):
            dist.all_gather(pieces, tensor, group=inner)
            dist.reduce_scatter(torch.empty(6), pieces, group=inner)
            dist.all_to_all_single(torch.empty(6), tensor, group=inner)
            dist.all_reduce(tensor)
            is_root = comm.coord("inner") == 0
            dist.gather(tensor, pieces if is_root else None, group=inner, group_dst=0)
            dist.scatter(torch.empty(6), pieces if is_root else None, group=inner, group_src=0)
            if comm.coord("inner") == 0:
                dist.send(tensor, group=inner, group_dst=1)
            else:
                dist.recv(tensor, group=inner, group_src=0)
            dist.barrier()
    return ledger.entries()


def test_every_collective_by_phase_axis_and_bytes() -> None:
    sender, receiver, *_ = run_ranks(count_everything, 4)
    expected = [
        Entry("ours", "inner", "all_reduce", 1, 24, 24.0),
        Entry("ours", "outer", "all_reduce", 1, 24, 24.0),
        Entry("ours", "inner", "broadcast", 1, 24, 12.0),
        Entry("torch", "inner", "all_gather", 1, 48, 24.0),
        Entry("torch", "inner", "reduce_scatter", 1, 48, 24.0),
        Entry("torch", "inner", "all_to_all", 1, 24, 12.0),
        Entry("torch", "outer_inner", "all_reduce", 1, 24, 36.0),
        Entry("torch", "inner", "gather", 1, 48, 24.0),
        Entry("torch", "inner", "scatter", 1, 48, 24.0),
    ]
    assert receiver == expected
    assert sender == [*expected, Entry("torch", "inner", "send", 1, 24, 24.0)]


def count_wrappers() -> dict[str, list[Entry]]:
    comm = Ranks({"dp": 2})
    inputs = torch.ones(3, 8)
    counted: dict[str, list[Entry]] = {}
    with Ledger(comm) as ledger:
        sharded = nn.Linear(8, 8, bias=False)
        fully_shard(sharded, mesh=comm.mesh)
        sharded(inputs).sum().backward()
    counted["fsdp"] = ledger.entries()
    replicated = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with Ledger(comm) as ledger:
        replicated(inputs).sum().backward()
    counted["ddp"] = ledger.entries()
    whole = distribute_tensor(torch.ones(8, 8), comm.mesh, [Shard(0)])
    with Ledger(comm) as ledger:
        whole.redistribute(placements=[Replicate()]).to_local()
    counted["dtensor"] = ledger.entries()
    return counted


@pytest.mark.filterwarnings("default")
def test_what_pytorchs_own_wrappers_send() -> None:
    size = 8 * 8 * 4
    for counted in run_ranks(count_wrappers, 2):
        # The block of a lone fully_shard keeps its parameters after forward: one gather.
        assert [(e.op, e.payload_bytes, e.sent_bytes) for e in counted["fsdp"]] == [
            ("all_gather", size, size / 2),
            ("reduce_scatter", size, size / 2),
        ]
        assert [(e.op, e.payload_bytes, e.sent_bytes) for e in counted["ddp"]] == [
            ("all_reduce", size, size)
        ]
        assert [(e.op, e.payload_bytes, e.sent_bytes) for e in counted["dtensor"]] == [
            ("all_gather", size, size / 2)
        ]
