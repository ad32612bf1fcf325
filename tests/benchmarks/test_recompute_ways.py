"""The four ways of recomputation as they are taught: exact, counted, and of the order they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models.decoder import Decoder

WAYS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "benchmarks/recompute/four_ways.py")
)


def gradients(model: Decoder) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_every_way_is_exact_and_runs_blocks_as_often_as_arithmetic_says() -> None:
    num_blocks = 5
    expected: list[Tensor] | None = None
    for name, way in WAYS["ways"](num_blocks).items():
        model = WAYS["build"](num_blocks, way)
        trace = WAYS["step"](model)
        if expected is None:
            expected = gradients(model)
        for found, exact in zip(gradients(model), expected, strict=True):
            assert torch.equal(found, exact), name
        assert trace.count("forward") == trace.count("backward") == num_blocks
        again = num_blocks if way != "none" else 0
        if isinstance(way, int):  # of a chain of k blocks, 1 + 2 + ... + k
            full, rest = divmod(num_blocks, way)
            again = full * way * (way + 1) // 2 + rest * (rest + 1) // 2
        assert trace.count("again") == again, name


@pytest.mark.slow
def test_what_is_held_grows_as_it_is_taught() -> None:
    """N, 1, C and sqrt(N): the depth grows fourfold."""
    peaks: list[list[int]] = []
    for num_blocks in (4, 16):
        ways = dict(list(WAYS["ways"](num_blocks).items())[:4]).values()
        peaks.append([WAYS["step"](WAYS["build"](num_blocks, way)).peak_bytes for way in ways])
    (all_4, nothing_4, two_4, root_4), (all_16, nothing_16, two_16, root_16) = peaks
    assert all_16 == pytest.approx(4 * all_4, rel=0.1)
    assert nothing_16 == pytest.approx(nothing_4, rel=0.02)
    assert two_16 == pytest.approx(two_4, rel=0.02)
    input_bytes = 4 * 64 * 32 * 4
    assert root_16 - root_4 == pytest.approx(2 * input_bytes, rel=0.1)
