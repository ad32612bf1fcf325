"""A job's meshes and groups are its own, wait as long as it says, and are named by their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import join
from phalanx.comm.axes import DENSE, EXPERT, axes_of, flattened, single_axis
from phalanx.comm.comm import Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.meshes import job_mesh
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy


def groups_of(axes: dict[str, int]) -> tuple[Ranks, list[object], float]:
    """Return what is made of a mesh of `axes` once, and a sum over a second group of dp."""
    comm = Ranks(axes)
    other: Any = comm.with_separate_groups("dp")
    job = job_mesh(axes)
    made = [job, job.whole, job.stage_mesh, other.engine("dp").group, *job.groups.values()]
    return comm, [*made, *job.one_way.values()], float(other.all_reduce(torch.ones(()), "dp"))


def leave_for_another_job(folder: str) -> list[bool]:
    axes = {"pp": 2, "dp": 2}
    rank = dist.get_rank()
    _, before, total = groups_of(axes)
    dist.destroy_process_group()
    join.join(rank, 4, store=dist.FileStore(f"{folder}/second job", 4), timeout_s=60)
    comm, after, again = groups_of(axes)
    other = 1 - comm.coord("pp")
    sent = comm.send_start(torch.tensor([float(rank)]), "pp", other)
    got = comm.recv_start(torch.empty(1), "pp", other).wait()
    sent.wait()
    old = set(map(id, before))
    return [
        comm.mesh == before[1],  # by which nothing may be found
        old.isdisjoint(map(id, after)),
        total == again == 2,
        got.item() == comm.ranks("pp")[other],
    ]


def test_a_second_job_of_a_process_finds_no_group_of_the_first(tmp_path: Path) -> None:
    assert run_ranks(leave_for_another_job, 4, str(tmp_path), threads=1) == [[True] * 4] * 4


def numbers_and_names(text: str) -> tuple[float, bool]:
    """Compare a rank's number and the ranks of its groups with what torch says of them."""
    comm = Ranks(Strategy.parse(text))
    assert (comm.rank, comm.is_first) == (dist.get_rank(), dist.get_rank() == 0)
    groups = job_mesh(comm.axes).groups
    assert set(groups) == {*comm.axes, *flattened(comm.axes)}
    named = comm.axis_by_ranks()
    for name, group in groups.items():
        assert comm.ranks(name) == tuple(dist.get_process_group_ranks(group))
        assert named[comm.ranks(name)] == name
    assert named[tuple(range(dist.get_world_size()))]
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()}
    (limit,) = limits
    return limit.total_seconds(), len(named) == len({*named.values()})


@pytest.mark.parametrize(
    "text", ["tp4:2d", *(pytest.param(t, marks=pytest.mark.slow) for t in ("fsdp2,cp2", "pp2,dp2"))]
)
def test_ranks_of_groups_are_those_of_torch(text: str) -> None:
    num_ranks = Strategy.parse(text).num_ranks
    assert run_ranks(numbers_and_names, num_ranks, text, timeout_s=77.0) == [(77.0, True)] * 4


def test_flattened_axes() -> None:
    assert flattened({"fsdp": 2, "tp": 2}) == {}
    assert flattened(("dp", "fsdp", "cp")) == {"fsdp_cp": ("fsdp", "cp")}
    assert flattened(("tp_row", "tp_col")) == {"tp": ("tp_row", "tp_col")}
    assert flattened(("dp", "cp", "ep")) == {}
    assert flattened(("dp", "fsdp", "ep")) == {"fsdp_ep": ("fsdp", "ep")}
    assert flattened(("fsdp", "cp", "ep", "tp")) == {
        "fsdp_cp_ep": ("fsdp", "cp", "ep"),
        "fsdp_cp": ("fsdp", "cp"),
    }


def test_the_sets_of_axes_of_dense_parameters_and_of_experts() -> None:
    every = ("pp", "dp", "fsdp", "cp", "ep", "tp_row", "tp_col")
    assert axes_of("fsdp_cp", every) == axes_of(EXPERT.shards, every) == ("fsdp", "cp")
    assert axes_of("tp", every) == ("tp_row", "tp_col")
    assert axes_of("tp_row", ("tp",)) == ()
    assert axes_of("job", every) == every
    assert axes_of("data", every) == ("dp", "fsdp", "ep")
    assert axes_of("loss", every) == ("pp", "dp", "fsdp", "cp", "ep")
    assert axes_of(DENSE.sums, every) == ("dp", "fsdp", "cp", "ep")
    assert axes_of(EXPERT.sums, every) == ("dp", "fsdp", "cp")
    assert single_axis(DENSE.shards, ("dp", "fsdp")) == "fsdp"
    assert single_axis(DENSE.shards, ("fsdp", "cp")) == "fsdp_cp"
    assert single_axis(DENSE.shards, ("fsdp", "cp", "ep")) == "fsdp_cp_ep"
    assert single_axis(EXPERT.shards, ("fsdp", "ep")) == "fsdp"


def test_a_rank_that_only_counts_knows_its_number() -> None:
    comm = CountingComm({"pp": 2, "dp": 3, "tp": 4}, {"pp": 1, "dp": 1, "tp": 2})
    assert (comm.rank, comm.is_first) == (18, False)
    assert comm.ranks("dp") == (14, 18, 22)
    assert comm.axis_by_ranks()[6, 18] == "pp"
    assert CountingComm({"dp": 2}).is_first
