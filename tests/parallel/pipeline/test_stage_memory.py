"""A model that does not fit one device is trained by two, under the same limit of memory each."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import resource
import sys
from pathlib import Path

import pytest

from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.initial import fill_initial
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split

pytestmark = pytest.mark.fresh_ranks

SHAPE = ModelShape(
    vocab_size=64, num_layers=2, hidden=1152, num_heads=12, num_kv_heads=12, head_dim=96, ffn=4608,
    max_seq_len=16, norm="layer", position="learned", mlp="gelu", bias=True, tied=False,
)  # fmt: skip

M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4
"""Of malloc.h: what is as large has pages of its own, and how many may be; a rank allows none."""

LAYER_BYTES = 16 * 12 * SHAPE.hidden**2
"""Weights, gradients and moments of a layer, float32."""

DEVICE_BYTES = LAYER_BYTES * 10 // 8
"""Two layers of 8 GB, a device of 10 GB, scaled down.

What is left beside a layer, 64 MB, is for activations and for the stacks of threads, of 8 MB each.
"""


def train(strategy: Strategy, comm: Ranks, shape: ModelShape) -> float:
    """Take two steps; return the loss of the last."""
    plan = plan_decoder(strategy, shape, pp_rank=comm.coord("pp"))
    runner = plan.build(comm, functools.partial(fill_initial, shape, 0))
    config = OptimizerConfig()
    step = Step(
        plan.model, build_optimizer(plan.model, config), NextToken(), config,
        comm=comm, num_steps=2, run=runner,
    )  # fmt: skip
    batches = decoder_batches(shape, 2, 2, 16, 1, 0)
    # One microbatch: a gradient is never held twice, once to be added.
    return [step(split(batch, 0, 1, 1)).loss for batch in batches][-1]


def train_under_limit(text: str, is_too_large: bool) -> float | None:
    """Train in DEVICE_BYTES more than is held now; None if that is too little, as is expected."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    # What is freed goes back at once: the holes of a heap depend on the order of threads.
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 1 << 16)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    # A small one first: its threads have stacks, which count too.
    train(strategy, comm, dataclasses.replace(SHAPE, hidden=48, head_dim=4, ffn=96))
    held = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    limit = int(held[1]) * 1024 + DEVICE_BYTES
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        return train(strategy, comm, SHAPE)
    except RuntimeError as error:
        if not (is_too_large and "allocate memory" in str(error)):
            raise
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process allocates")
def test_two_stages_train_where_one_device_is_too_small() -> None:
    assert run_ranks(train_under_limit, 1, "dp1", True, threads=1) == [None]
    losses = run_ranks(train_under_limit, 2, "pp2:naive", False, threads=1)
    assert losses[0] == losses[1] is not None
