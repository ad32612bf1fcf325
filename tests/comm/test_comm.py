"""Collectives by the name of an axis or a set, and the account that runs them on nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.ledger import Entry, Ledger
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy

GRID = {"dp": 2, "fsdp": 3, "tp_row": 2, "tp_col": 2}


def test_sizes_and_coordinates_of_axes_and_sets() -> None:
    comm = CountingComm(GRID, {"dp": 1, "fsdp": 2, "tp_col": 1})
    assert comm.axes == GRID
    assert comm.axes_of("tp") == ("tp_row", "tp_col")
    assert comm.axes_of("data") == comm.axes_of("loss") == comm.axes_of("grad") == ("dp", "fsdp")
    assert comm.axes_of("job") == tuple(GRID)
    assert (comm.size("data"), comm.coord("data")) == (6, 5)
    assert (comm.size("tp"), comm.coord("tp")) == (4, 1)
    assert (comm.size("tp_row"), comm.coord("tp_row")) == (2, 0)


def test_what_a_job_lacks_is_of_one_rank() -> None:
    comm = CountingComm(Strategy.parse("tp4").mesh_axes())
    assert comm.axes == {"tp": 4} and comm.axes_of("tp") == ("tp",)
    x = torch.empty(4, 2, device="meta")
    for name in ("data", "dp", "cp"):
        assert (comm.axes_of(name), comm.size(name), comm.coord(name)) == ((), 1, 0)
        assert comm.all_reduce(x, name) is x
        assert comm.broadcast(x, name) is x
        assert comm.all_gather(x, name, 0) is x
        assert comm.reduce_scatter(x, name, 0) is x
        assert comm.all_to_all(x, name, 0, 1) is x
        assert comm.broadcast_start(x, name, 0).wait() is x
        assert comm.reduce_start(x, name, 0).wait() is x
        assert comm.swap(x, name, 0) is x
    assert comm.entries() == []


def run_all(comm: Comm, axis: str, name: str) -> list[Tensor]:
    """Run each collective, on numbers that differ from rank to rank."""
    n, coord = comm.size(axis), comm.coord(axis)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        start = 100 * comm.coord("job")
        return (
            torch.arange(start, start + torch.Size(shape).numel(), device=comm.device)
            .to(dtype)
            .view(shape)
        )

    return [
        comm.all_reduce(numbers(3), name),
        comm.all_reduce(numbers(3), name, "max"),
        comm.all_reduce_start(numbers(3, dtype=torch.float64), name, "min").wait(),
        comm.all_gather(numbers(2, 3), axis, 1),
        comm.all_gather(numbers(2, 3).T, axis, 0),
        comm.reduce_scatter(numbers(2, 3 * n), axis, 1),
        comm.all_to_all(numbers(2 * n, 3), axis, 0, 1),
        comm.broadcast(numbers(2, 3, dtype=torch.bfloat16).T, name),
        comm.broadcast(numbers(0), name),
        comm.all_reduce(numbers(4, 2)[:, 1], name),
        comm.broadcast(numbers(4, 2)[:, 1], name),
        comm.broadcast_start(numbers(5), axis, n - 1).wait(),
        # All but the target hold nothing of use.
        comm.reduce_start(numbers(5), axis, 1).wait() * (coord == 1),
    ]


def results(axes: dict[str, int], axis: str, name: str, shares_memory: bool) -> list[list[Tensor]]:
    """Return what each of the job's ranks has, and check that `CountingComm` notes what is sent."""
    comm = Ranks(axes, shares_memory=shares_memory)
    with Ledger(comm) as ledger, ledger.phase("forward"):
        found = run_all(comm, axis, name)
    counting = CountingComm(axes, {axis: comm.coord(axis) for axis in axes})
    with counting.phase("forward"):
        noted = run_all(counting, axis, name)
    assert ledger.entries() == counting.entries()
    for one, other in zip(found, noted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
    everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return everyone


@pytest.mark.parametrize(
    "axes, axis, name, shares_memory",
    [
        ({"dp": 2}, "dp", "data", True),
        ({"fsdp": 3}, "fsdp", "fsdp", False),
        ({"dp": 2, "fsdp": 2}, "fsdp", "data", True),
    ],
)
def test_collectives_give_what_they_say_and_are_counted(
    axes: dict[str, int], axis: str, name: str, shares_memory: bool
) -> None:
    num_ranks = torch.Size(axes.values()).numel()
    everyone = run_ranks(results, num_ranks, axes, axis, name, shares_memory)[0]
    n = axes[axis]
    for rank, found in enumerate(everyone):
        group = range(rank - rank % n, rank - rank % n + n)  # the axis is the innermost
        whole = range(num_ranks)  # and the set is all ranks

        def of(rank: int, *shape: int) -> Tensor:
            return (100 * rank + torch.arange(torch.Size(shape).numel())).float().view(shape)

        expected = [
            sum((of(r, 3) for r in whole), torch.zeros(3)),
            of(whole[-1], 3),
            of(0, 3).double(),
            torch.cat([of(r, 2, 3) for r in group], 1),
            torch.cat([of(r, 2, 3).T for r in group]),
            sum((of(r, 2, 3 * n) for r in group), torch.zeros(2, 3 * n)).chunk(n, 1)[rank % n],
            torch.cat([of(r, 2 * n, 3).chunk(n)[rank % n] for r in group], 1),
            of(0, 2, 3).T.bfloat16(),
            torch.zeros(0),
            sum((of(r, 4, 2)[:, 1] for r in whole), torch.zeros(4)),
            of(0, 4, 2)[:, 1],
            of(group[-1], 5),
            sum((of(r, 5) for r in group), torch.zeros(5)) * (rank % n == 1),
        ]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def swap(text: str) -> tuple[Tensor, list[Entry], list[Entry]]:
    """Change with the rank across the diagonal."""
    comm = Ranks(Strategy.parse(text))
    counting = CountingComm(comm.axes)
    partner = comm.coord("tp_col") * comm.size("tp_row") + comm.coord("tp_row")
    with Ledger(comm) as ledger:
        found = comm.swap(torch.full((2, 3), float(comm.coord("tp"))).T, "tp", partner)
    counting.swap(torch.empty(3, 2, device="meta"), "tp", partner)
    return found, ledger.entries(), counting.entries()


def test_partners_change_tensors_over_all_of_tp() -> None:
    """It runs in a group that DeviceMesh._flatten makes, which is private."""
    for (found, sent, noted), partner in zip(
        run_ranks(swap, 4, "tp4:2d"), (0, 2, 1, 3), strict=True
    ):
        assert torch.equal(found, torch.full((3, 2), float(partner)))
        assert sent == noted == [Entry("other", "tp", "all_to_all", 1, 24, 18.0)]


def ranks_of_tp() -> list[int]:
    return dist.get_process_group_ranks(Ranks(Strategy.parse("dp2,tp4:2d")).engine("tp").group)


def test_all_of_tp_are_a_group_beside_other_axes() -> None:
    assert run_ranks(ranks_of_tp, 8, threads=1) == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def too_few() -> None:
    with pytest.raises(StrategyError, match="needs 2 ranks, but there are 1"):
        Ranks(Strategy.parse("dp2"))
    assert Ranks(Strategy.parse("dp1")).axes == {"dp": 1}


def test_a_strategy_of_another_number_of_ranks_is_refused() -> None:
    run_ranks(too_few, 1)
