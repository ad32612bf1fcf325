"""Neighbours of a pipeline have a group for either direction, on any ranks and both backends."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Ledger
from phalanx.comm.meshes import job_mesh, neighbor_rounds, one_way_groups
from phalanx.launch.local import run_ranks


@pytest.mark.parametrize("size", range(2, 10))
def test_rounds_have_each_pair_of_neighbours_once_and_a_rank_at_most_once(size: int) -> None:
    rounds = neighbor_rounds(size)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    found = [frozenset(pair) for pairs in rounds for pair in pairs]
    expected = {frozenset((at, (at + 1) % size)) for at in range(size)}
    assert set(found) == expected and len(found) == len(expected)
    assert len(rounds) == (1 if size == 2 else 2 + size % 2)


def messages(axes: dict[str, int]) -> tuple[dict[tuple[int, int], str], list[Any]]:
    """Send round the ring both ways at once; return this rank's groups, and what was counted."""
    comm = Ranks(axes)
    size, here = comm.size("pp"), comm.coord("pp")
    with Ledger(comm) as ledger:
        for step in (1, -1):
            target, source = (here + step) % size, (here - step) % size
            sent = comm.send_start(torch.tensor([float(dist.get_rank())]), "pp", target)
            got = comm.recv_start(torch.empty(1), "pp", source).wait()
            sent.wait()
            of_pp = dist.get_process_group_ranks(comm.mesh.get_group("pp"))
            assert got.item() == of_pp[source]
    groups = job_mesh(axes).one_way
    assert Ranks(axes)._one_way is groups
    for group in groups.values():
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 77
    names = {ends: group.group_name for ends, group in groups.items()}
    return names, [(e.axis, e.op, e.calls) for e in ledger.entries()]


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"pp": 3}, {"dp": 1, "pp": 4}])
def test_each_direction_has_a_group_of_its_own(axes: dict[str, int]) -> None:
    num_ranks = math.prod(axes.values())
    found = run_ranks(messages, num_ranks, axes, threads=1, timeout_s=77.0)
    for names, entries in found:
        assert len(set(names.values())) == len(names) == (2 if axes["pp"] == 2 else 4)
        assert entries == [("pp", "send", 2)]
    for (mine, _), (theirs, _) in itertools.combinations(found, 2):
        for ends in set(mine) & set(theirs):
            is_same_line = mine[ends] == theirs[ends]
            assert is_same_line or num_ranks > axes["pp"]


@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_nccl_splits_the_job_once_for_all_pairs_of_a_round(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With calls of torch noted in place of made; every rank is in one group of each split."""
    splits: list[list[list[int]]] = []
    options = SimpleNamespace(_timeout="as long as the job")
    job = SimpleNamespace(
        bound_device_id=torch.device("cuda", 0),
        _get_backend=lambda device: SimpleNamespace(options=options),
    )

    def split_group(*, split_ranks: list[list[int]], timeout: Any) -> object:
        assert timeout == options._timeout
        splits.append(split_ranks)
        return object()

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: job)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2 * num)
    monkeypatch.setattr(dist, "split_group", split_group)

    class Mesh:
        mesh = torch.arange(2 * num).view(num, 2)
        mesh_dim_names = ("pp", "dp")
        device_type = "cuda"

        def size(self, axis: int) -> int:
            return (num, 2)[axis]

        def get_local_rank(self, axis: str) -> int:
            return 0

    mesh: Any = Mesh()
    groups = one_way_groups(mesh)
    assert set(groups) == {(0, 1), (1, 0), (0, num - 1), (num - 1, 0)}
    assert len(set(map(id, groups.values()))) == len(groups)
    assert len(splits) == 2 * len(neighbor_rounds(num))
    for parts in splits:
        assert sorted(rank for part in parts for rank in part) == list(range(2 * num))
    pairs = {frozenset(part) for parts in splits for part in parts if len(part) == 2}
    neighbors = [(at, (at + 1) % num) for at in range(num)]
    assert pairs == {frozenset((2 * a + at, 2 * b + at)) for a, b in neighbors for at in (0, 1)}
