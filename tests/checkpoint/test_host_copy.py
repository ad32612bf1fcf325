"""Host memory for saving: taken before the first step, and a way on where there is too little."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from torch import nn

import phalanx
from phalanx.checkpoint import host_copy, manifest, state
from phalanx.checkpoint.host_copy import HostCopy
from phalanx.checkpoint.saver import Saver
from phalanx.launch.local import run_ranks


def reserve_before_steps(run: Path, split: str) -> tuple[bool, bool]:
    """Reserve before the first step; return whether the first save finds all it needs."""
    model, optimizer = runs.build(split, width=64)
    with Saver(run) as saver:
        assert saver.reserve(model, optimizer, 1 << 30) is None
        buffer = saver._copy._buffer
        assert buffer is not None
        runs.step(model, optimizer)
        frozen = {"frozen.weight": "0", "frozen.bias": "0"}
        saver.begin(model, optimizer, dataclasses.replace(runs.about(1), frozen=frozen))
        same = saver._copy._buffer is buffer
        held = state.local_shards(model, optimizer, {})
        num_bytes = sum(e.local.nbytes for name, e in held.items() if name[6:] not in frozen)
        return same, buffer.nbytes <= num_bytes


@pytest.mark.parametrize("split", ["whole", "fsdp"])
def test_the_first_save_needs_no_more_memory_than_was_reserved(tmp_path: Path, split: str) -> None:
    for same, is_bounded in run_ranks(reserve_before_steps, 2, tmp_path, split, threads=1):
        assert same and is_bounded
    assert list(manifest.complete_checkpoints(tmp_path)) == [1]


def save_without_memory(run: Path, free_bytes: int | None) -> tuple[str, bool]:
    """Save without memory for a copy; return what was said, and whether all was saved."""
    model, optimizer = runs.build("fsdp", width=64)
    host_copy.CHUNK_BYTES = 1000
    saver = Saver(run)
    if free_bytes is None:
        saver._copy.reserve = lambda *_, **__: False
    words = saver.reserve(model, optimizer, free_bytes)
    runs.step(model, optimizer)
    with saver:
        saver.begin(model, optimizer, runs.about(1))
        assert not saver.is_writing  # the step has waited for it
        expected = runs.whole_state(model, optimizer)
    loaded, loaded_optimizer = runs.build("fsdp", width=64)
    state.load(manifest.find(run), loaded, loaded_optimizer)
    actual = runs.whole_state(loaded, loaded_optimizer)
    return words or "", all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("free_bytes", [None, 1000])
def test_where_memory_is_short_the_step_waits_and_nothing_is_lost(
    tmp_path: Path, free_bytes: int | None
) -> None:
    for words, same in run_ranks(save_without_memory, 2, tmp_path, free_bytes, threads=1):
        assert same
        assert re.match("the copy of a checkpoint takes [0-9.]+ KiB of host memory per rank", words)
        assert words.endswith("; training will wait while checkpoints are written")
        assert ("but only 1000 bytes are free" in words) == (free_bytes is not None)


def test_memory_that_the_system_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    copy = HostCopy()
    fewer, some, more = ([torch.zeros(n, dtype=torch.uint8)] for n in (1999, 2000, 2001))
    assert not copy.reserve(some, 1999)
    assert not copy.reserve(some)  # the system might promise it, and end the process later
    assert copy.reserve(some, 2000)
    monkeypatch.setattr(torch, "empty", refuse)
    assert copy.reserve(fewer) and copy.take(more) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_pinned_as_it_is() -> None:
    copy = HostCopy()
    tensors = [torch.arange(1000.0, device="cuda"), torch.arange(77, device="cuda").double()]
    (held,) = copy.take(tensors) or ()
    assert copy._is_pinned
    assert torch.equal(held[:4000].view(torch.float32), torch.arange(1000.0))
    assert torch.equal(held[4000:].view(torch.float64), torch.arange(77).double())
    copy.release()
    pieces = list(host_copy.InPieces(tensors))
    assert torch.equal(pieces[1], torch.arange(77).double())


class Cuda:
    """Notes what CUDA is asked to pin, as it is done to memory that is held."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> SimpleNamespace:
        assert not any(
            at < address + num_bytes and address < at + n for at, n in self.pinned.items()
        )
        self.pinned[address] = num_bytes
        self.calls.append("register")
        return SimpleNamespace(value=0)

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]
        self.calls.append("unregister")


def noting_cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Have copies to the host take their tensors for those of a GPU."""
    cuda, reserve = Cuda(), HostCopy.reserve

    def as_on_gpu(self: HostCopy, *args: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
            return reserve(self, *args)

    monkeypatch.setattr(HostCopy, "reserve", as_on_gpu)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return cuda


def save_by_a_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = noting_cuda(monkeypatch)
    run = phalanx.init("dp1")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.prepare(model, optimizer)
    for _ in range(3):
        run.backward(sum_of_rows=model(torch.ones(2, 8)).sum(), count=2)
        optimizer.step()
        optimizer.zero_grad()
        run.save(folder)
    return cuda


def pins_of_saves(folder: Path) -> list[list[str]]:
    """Return what is asked of CUDA by a script, by savers that end, and by one that grows."""
    found: list[list[str]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        found.append(save_by_a_script(folder / "script", monkeypatch).calls)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = noting_cuda(monkeypatch)
        model, optimizer = runs.build()
        runs.step(model, optimizer)
        for number in (1, 2):
            with Saver(folder / f"{number}") as saver:
                saver.begin(model, optimizer, runs.about(1))
        assert not cuda.pinned
        found.append(cuda.calls)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda, copy = noting_cuda(monkeypatch), HostCopy()
        assert copy.reserve([torch.zeros(10)]) and copy.reserve([torch.zeros(20)])
        found.append(list(cuda.calls))
        copy.release()
        assert not cuda.pinned
    return found


def test_memory_that_is_pinned_is_kept_for_the_next_save_and_unpinned_at_the_end(
    tmp_path: Path,
) -> None:
    """With CUDA's calls noted in place of made."""
    (found,) = run_ranks(pins_of_saves, 1, tmp_path, threads=1)
    of_a_script, of_two_savers, of_one_that_grows = found
    assert of_a_script == ["register"]  # a process keeps its saver
    assert of_two_savers == ["register", "unregister"] * 2
    assert of_one_that_grows == ["register", "unregister", "register"]
