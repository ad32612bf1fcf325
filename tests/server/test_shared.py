"""Weights in memory that others read."""

from __future__ import annotations

import pytest
import torch

from phalanx.server.shared import IS_POSSIBLE, SharedTensors, SharedView

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
