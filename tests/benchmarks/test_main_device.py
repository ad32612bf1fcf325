"""DataParallel with a main device computes what `dp` does; only its bytes lie otherwise."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch.local import run_ranks

SCRIPT = str(Path(__file__).parents[2] / "benchmarks/data_parallel/main_device.py")
NUM_DEVICES = 2


def with_dp() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    counts, gradients = runpy.run_path(SCRIPT)["with_dp"](torch.float64)
    return vars(counts), gradients


def test_gradients_equal_those_of_dp_and_the_main_device_carries_more() -> None:
    script = runpy.run_path(SCRIPT)
    (first, other), gradients = script["with_main_device"](NUM_DEVICES, torch.float64)
    ranks = run_ranks(with_dp, NUM_DEVICES, threads=1)
    assert script["largest_gap"](ranks[0][1], gradients) <= 1e-10
    size = sum(gradient.nbytes for gradient in gradients.values())
    shape, rows = script["SHAPE"], script["NUM_ROWS"] // NUM_DEVICES
    tokens, logits = (rows * shape.max_seq_len * n for n in (8, 8 * shape.vocab_size))
    # Weights, tokens and the gradient of logits out; logits and gradients of weights in.
    assert (first.sent, first.received) == (size + tokens + logits, logits + size)
    assert (other.sent, other.received) == (first.received, first.sent)
    for each, _ in ranks:
        assert each["sent"] == pytest.approx(
            size, rel=0.01
        )  # 2 (N-1)/N; a byte a parameter besides
        assert other.peak < each["peak"] < first.peak
