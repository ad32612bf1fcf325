"""A dry run holds what a rank holds while it gathers and reduces, by process group and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from phalanx.account.recorder import MetaRecorder
from phalanx.comm.calls import Call
from phalanx.comm.comm import Comm, Ranks
from phalanx.comm.dry_run import CountingComm
from phalanx.comm.watch import Watch
from phalanx.launch.local import run_ranks

SHAPE = 8, 256, 64
"""Above what is copied to shared memory in any case."""


class Heap(Watch):
    """Adds the memory of the heap, which no operator returns, to a trace of allocations."""

    def __init__(self, trace: MetaRecorder) -> None:
        super().__init__()
        self._trace = trace

    @override
    def run_call(self, call: Call, run: Callable[[], Any]) -> Any:
        with patch.object(self, "allocated"):  # what it takes itself is not held
            return run()

    @override
    def allocated(self, tensor: torch.Tensor) -> None:
        self._trace._add(tensor.untyped_storage())


def most_held(comm: Comm, device: str) -> list[int]:
    """Return the most bytes that each call makes, of tensors that it is given."""
    found: list[int] = []
    given = torch.ones(SHAPE, device=device)
    for dim in range(3):
        for name, more in (
            ("all_gather", {}),
            ("reduce_scatter", {}),
            ("reduce_scatter", {"is_spent": True}),
        ):
            tensor = comm.empty(SHAPE, given, "tp").copy_(given)
            with MetaRecorder() as recorder, Heap(recorder):
                getattr(comm, name)(tensor, "tp", dim, **more)
            found.append(max(recorder.levels()))
    return found


def both_held(shares_memory: bool, device: str) -> list[list[int]]:
    ranks = Ranks({"tp": 2}, shares_memory=shares_memory)
    return [most_held(ranks, "cpu"), most_held(CountingComm({"tp": 2}, device=device), "meta")]


@pytest.mark.parametrize(("shares_memory", "device"), [(True, "cpu"), (False, "cuda")])
def test_it_holds_what_a_rank_holds(shares_memory: bool, device: str) -> None:
    ours, counted = run_ranks(both_held, 2, shares_memory, device, threads=1)[0]
    assert ours == counted
    assert len(set(counted)) > 1


def test_a_mesh_equals_none_of_another_rank_or_of_a_job() -> None:
    ranks: Any = {"mesh_dim_names": ("ep",), "_init_backend": False}
    of_job = [DeviceMesh("cpu", [0, 1], _rank=rank, **ranks) for rank in (0, 1)]
    assert of_job[0] == of_job[1]  # so that a cache would confuse them
    meshes = [CountingComm({"ep": 2}, {"ep": coord}).model_mesh for coord in (0, 0, 1)]
    assert meshes[0] == meshes[1] != meshes[2]
    assert meshes[0].mesh_dim_names == ("ep",) and meshes[2].get_coordinate() == (1,)
    assert not any(mesh in of_job for mesh in meshes)
