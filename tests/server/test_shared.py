"""Weights in memory that others read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from phalanx.server import shared
from phalanx.server.liveness import LEASE_S
from phalanx.server.shared import IS_POSSIBLE, MappedShards, SharedTensors, SharedView

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="memory of others is read on Linux and x86")


def test_a_reader_sees_whole_changes_and_none_that_is_under_way() -> None:
    made = SharedTensors([3, 2], torch.float64)
    view = SharedView(made.place, [3, 2], torch.float64)
    found = [torch.empty(3, dtype=torch.float64), torch.empty(2, dtype=torch.float64)]
    targets = [[found[0][:1], found[0][1:]], [found[1]]]
    made.tensors[0].fill_(1.0)
    made.tensors[1].fill_(2.0)
    assert view.read(targets) and found[0].tolist() == [1.0] * 3 and found[1].tolist() == [2.0] * 2
    with made.changing():
        assert not view.read(targets)
    assert view.read(targets)
    made.close()


def test_a_change_that_fails_does_not_keep_readers_out() -> None:
    made = SharedTensors([1], torch.float64)
    view, found = SharedView(made.place, [1], torch.float64), [[torch.empty(1).double()]]
    with pytest.raises(ValueError, match="a step"), made.changing():
        raise ValueError("a step that failed")
    assert view.read(found)
    made.close()


def test_closing_memory_twice_leaves_the_file_that_has_its_number_by_then() -> None:
    made = SharedTensors([1], torch.float64)
    made.close()
    reader, writer = os.pipe()
    made.close()
    del made
    os.write(writer, b"open")
    assert os.read(reader, 4) == b"open"
    os.close(reader)
    os.close(writer)


def test_a_file_of_another_container_under_the_same_numbers_is_refused(tmp_path: Path) -> None:
    """Its name or its size tells; one of both alike has another mark."""
    made, other = SharedTensors([4], torch.float32), SharedTensors([5], torch.float32)
    alike = SharedTensors([4], torch.float32)
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 9)
    files = [os.open(tmp_path / name, os.O_RDONLY) for name in ("empty", "short")]
    try:
        for number in (*files, other.place[1], alike.place[1]):
            place = [made.place[0], number, *made.place[2:]]
            with pytest.raises(OSError):
                SharedView(place, [4], torch.float32)
    finally:
        for file in files:
            os.close(file)
        for each in (made, other, alike):
            each.close()


def test_memory_is_ready_for_less_than_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared.FRESH_S < LEASE_S
    made, now_ns = SharedTensors([2], torch.float32), [0]
    view = SharedView(made.place, [2], torch.float32)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    made.touch()
    made.publish(3)
    for age_s, version in ((0.0, 3), (0.9, 3), (1.1, -1), (-0.1, -1)):
        now_ns[0] = round(age_s * 1e9)
        assert view.version == version
    made.close()


def test_only_memory_of_the_current_primary_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "FRESH_S", 1e6)
    made, held = SharedTensors([2], torch.float32), MappedShards()
    assert held.ready(0, "a", 0) is None  # not mapped
    view = held.map(0, "a", made.place, [2], torch.float32)
    assert view is not None
    made.publish(3)
    assert held.ready(0, "a", 3) == (3, view)
    assert held.ready(0, "a", 4) is None and held.ready(1, "a", 0) is None
    assert held.ready(0, "b", 0) is None
    assert held.map(0, "b", made.place, [2], torch.float32) is view
    assert held.ready(0, "b", 0) == (3, view)
    made.close()
    made.publish(4)
    assert held.ready(0, "b", 0) is None
    assert held.map(0, "b", [*made.place[:3], 0], [2], torch.float32) is None
