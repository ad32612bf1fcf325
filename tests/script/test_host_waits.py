"""How often the host waits for its device: in a user's loop never, in the trainer once a step.

Tests run on CPUs, where nothing shows it. So the calls are counted that would wait on a GPU: those
that bring a number to the host, and copies to a device that are not told to go on by themselves.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from loops import Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import phalanx
from marks import by_hand
from phalanx.launch.local import run_ranks
from phalanx.script import session
from phalanx.script.guards.replicas import AsyncHostCopy
from phalanx.strategy import Strategy

READS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"),
    *("__index__", "new_tensor"),
}
"""Functions of torch that wait, whatever they are given."""

COPIES = {"to", "cuda", "tensor", "as_tensor", "copy_"}
"""Those that wait if they copy to a device and nothing says otherwise."""

_ROOT = str(Path(phalanx.__file__).parent)


class HostWaits(TorchFunctionMode):
    """Counts the calls of phalanx that would wait, by file and function."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [*args[1:], kwargs.get("device")] if name in COPIES else []
        is_copy = any(isinstance(each, torch.device | str) for each in given)
        if name in READS or (is_copy and not kwargs.get("non_blocking")):
            caller = sys._getframe(1).f_code
            if caller.co_filename.startswith(_ROOT):
                self.found[f"{Path(caller.co_filename).name}: {caller.co_name}"] += 1
        return func(*args, **kwargs)


class Many(nn.Module):
    """Layers that speak to other ranks, and that draw by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Dropout(0.3))
            for momentum in (0.1, None, 0.1)
        )
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def many_of_doubles() -> nn.Module:
    return Many().double()


def waits_of_a_loop(strategy: str) -> Counter[str]:
    """Return the waits of two steps of two microbatches, after two."""
    run = phalanx.init(strategy, accumulation=2)
    model = many_of_doubles()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    loader = DataLoader(Numbers(), 4)  # 9 whole batches
    model, optimizer, loader = run.prepare(model, optimizer, loader, batch_norm="global")
    waits = HostWaits()
    for number, (x, y) in enumerate(loader):
        if number == 4:
            waits.__enter__()
        if number == 8:
            break
        run.backward(sum_of_rows=cross_entropy(model(x), y, reduction="sum"), count=len(y))
        if run.is_step_end:
            optimizer.step()
            optimizer.zero_grad()
    waits.__exit__(None, None, None)
    return waits.found


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2"])
def test_a_loop_of_ones_own_waits_for_nothing(strategy: str) -> None:
    for found in run_ranks(waits_of_a_loop, 2, strategy, threads=1):
        assert found.pop("dropout.py: _draw") == 4 * 3  # of the host's own generator
        # Of a copy that has been on its way since the step before, and of a loss whose backward
        # has been launched.
        assert found == {"replicas.py: tolist": 2 + 4}, found


def waits_of_trainer(folder: Path, strategy: str) -> Counter[str]:
    """Return the waits of the seventh and the eighth step."""
    found: list[Counter[str]] = []
    for steps in (6, 8):
        trainer = phalanx.Trainer(
            many_of_doubles, jobs.Classes(), Numbers(), jobs.adagrad, jobs.halving,
            batch_size=8, accumulation=2, steps=steps, batch_norm="global",
        )  # fmt: skip
        options = phalanx.Options(out=folder / str(steps), threads=1)
        with HostWaits() as waits:
            session.train_module(trainer, Strategy.parse(strategy), options)
        found.append(waits.found)
    return found[1] - found[0]


@pytest.mark.parametrize("strategy", [by_hand("dp2"), "fsdp2"])
def test_the_trainer_waits_once_a_step(tmp_path: Path, strategy: str) -> None:
    for found in run_ranks(waits_of_trainer, 2, tmp_path, strategy, threads=1):
        assert found.pop("dropout.py: _draw") == 2 * 2 * 3  # of the host's own generator
        assert found.pop("step.py: <listcomp>") == 2 * 4  # from the device to itself
        found.pop("together.py: _reduce", None)  # whether to stop or save, by the clock
        assert found == {"step.py: _read": 2}, found


class _OfADevice:
    """A tensor of a device in the eyes of `AsyncHostCopy`, which notes how it is copied."""

    is_cuda = True

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        assert device == "cpu" and non_blocking
        self._calls.append("copy")
        return torch.tensor([True, False])


def test_a_copy_to_the_host_is_waited_for_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    tensor: Any = _OfADevice(calls)
    on_host = AsyncHostCopy(tensor)
    assert calls == ["copy", "record"]
    assert on_host.tolist() == [True, False]
    assert calls == ["copy", "record", "synchronize"]
