"""What blocks a rank is told to whoever measures its time, in the middle of a layer too."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from phalanx.comm.comm import Ranks
from phalanx.comm.waits import around_waits, waiting
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy


class Waits:
    """Counts the waits it is told of."""

    def __init__(self) -> None:
        self.number = 0
        self.axes = set[str]()

    @contextmanager
    def __call__(self, _: object, axis: str) -> Generator[None]:
        self.number += 1
        self.axes.add(axis)
        yield

    def taken(self) -> int:
        number, self.number = self.number, 0
        return number


def waits_of_collectives() -> dict[str, int]:
    comm = Ranks(Strategy.parse("tp2"))
    waits, found = Waits(), dict[str, int]()
    with around_waits(waits):
        for name, collective in {
            "all_reduce": lambda x: comm.all_reduce(x, "tp"),
            "all_gather": lambda x: comm.all_gather(x, "tp", 0),
            "reduce_scatter": lambda x: comm.reduce_scatter(x, "tp", 0),
            "all_to_all": lambda x: comm.all_to_all(x, "tp", 0, 1),
            "broadcast": lambda x: comm.broadcast_start(x, "tp", 0).wait(),
            "reduce": lambda x: comm.reduce_start(x, "tp", 0).wait(),
            "swap": lambda x: comm.swap(x, "tp", 1 - comm.coord("tp")),
        }.items():  # fmt: skip
            collective(torch.ones(4, 4))
            found[name] = waits.taken()
            assert waits.axes == {"tp"}
    comm.all_reduce(torch.ones(4), "tp")
    found["afterwards"] = waits.taken()
    return found


def test_each_collective_that_blocks_is_a_wait() -> None:
    for found in run_ranks(waits_of_collectives, 2, threads=1):
        assert found.pop("afterwards") == 0
        assert set(found.values()) == {1}, found


def waits_of_layers() -> tuple[int, int]:
    comm = Ranks(Strategy.parse("fsdp2"))
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
    model.forward = lambda x: model[0][2](model[0][1](model[0][0](x)))  # type: ignore
    Plan(Strategy.parse("fsdp2"), model).build(comm)
    waits = Waits()
    with around_waits(waits):
        loss = model(torch.ones(2, 4)).sum()
        forward = waits.taken()
        loss.backward()
        assert waits.axes == {"fsdp"}
        return forward, waits.taken()


def test_the_gathers_of_fsdp_within_forward_and_backward_are_waits() -> None:
    # Three blocks; the last stays gathered. Backward gathers two again and scatters three.
    assert run_ranks(waits_of_layers, 2, threads=1) == [(3, 5), (3, 5)]


def test_the_waits_of_another_thread_are_its_own() -> None:
    def wait() -> None:
        with waiting():
            pass

    waits = Waits()
    with around_waits(waits):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert waits.taken() == 0
        wait()
        assert waits.taken() == 1
