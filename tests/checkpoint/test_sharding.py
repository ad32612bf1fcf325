"""Who writes and who reads what: every element once, whatever the two splits are."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from phalanx.checkpoint.sharding import (
    Box,
    ShardedAxis,
    Sharding,
    WritePlan,
    check_cover,
    file_of,
    plan_reads,
    reads_of,
    sharding_of,
)
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

NUM_RANKS = 8


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """Split a small tensor over some of the axes of a mesh of 2 x 2 x 2."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    axes = [
        ShardedAxis(Shard(draw(st.integers(0, len(shape) - 1))), 2, stride)
        for stride in (4, 2, 1)
        if draw(st.booleans())
    ]
    return Sharding(shape, torch.float32, tuple(axes))


def box_of(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]


@given(shardings(), st.data())
def test_any_split_reads_what_any_other_wrote(saved: Sharding, data: st.DataObject) -> None:
    written = WritePlan({"a": saved}, NUM_RANKS)
    whole = np.arange(math.prod(saved.shape)).reshape(saved.shape)
    files = {
        file_of(rank): box_of(whole, saved.box(rank))
        for rank in range(NUM_RANKS)
        if written.writes_of(rank)
    }
    assert sum(part.size for part in files.values()) == whole.size
    layout = written.layouts()["a"]
    assert check_cover(layout) is None
    loaded = Sharding(saved.shape, saved.dtype, data.draw(shardings()).axes)
    if any(axis.placement.dim >= len(saved.shape) for axis in loaded.axes):
        return
    for rank in range(NUM_RANKS):
        box = loaded.box(rank)
        found = np.full(box.sizes, -1)
        for read in reads_of(layout, box):
            assert (found[read.target] == -1).all()
            found[read.target] = files[read.shard.file][read.source]
        assert np.array_equal(found, box_of(whole, box))


def test_replicas_share_the_work() -> None:
    """Of 8 ranks, 2 x 4 as hsdp holds them, each writes an eighth, nearly."""
    axes = (ShardedAxis(Shard(0), 4, 1),)
    held = {f"w{number}": Sharding((64, 8), torch.float32, axes) for number in range(10)}
    held |= {f"v{number}": Sharding((64,), torch.float32) for number in range(16)}
    written = WritePlan(held, NUM_RANKS)
    loads = [sum(i.num_bytes for i in written.writes_of(r).values()) for r in range(NUM_RANKS)]
    assert sum(loads) == 4 * (10 * 64 * 8 + 16 * 64)
    assert max(loads) - min(loads) <= 4 * 64


def test_one_rank_writes_the_buffers_of_a_shard() -> None:
    axes = (ShardedAxis(Shard(0), 4, 1),)
    held = {f"w{number}": Sharding((64, 8), torch.float32) for number in range(9)}
    held |= {f"b{n}": Sharding((8 - n,), torch.float32, is_buffer=True) for n in range(5)}
    held |= {f"s{n}": Sharding((64,), torch.float32, axes, is_buffer=True) for n in range(2)}
    written = WritePlan(held, NUM_RANKS)
    buffers = [[n for n in written.writes_of(r) if n[0] != "w"] for r in range(NUM_RANKS)]
    of_shards = ["s0", "s1"]
    assert [sorted(each) for each in buffers] == [
        ["b0", "b1", "b2", "b3", "b4", *of_shards],
        *[of_shards] * 3,
        *[[]] * 4,
    ]


def test_scalars_are_in_one_file() -> None:
    held = {f"optimizer.{number}.step": Sharding((), torch.float32) for number in range(50)}
    written = WritePlan(held, NUM_RANKS)
    assert [len(written.writes_of(rank)) for rank in range(NUM_RANKS)] == [50] + [0] * 7


SHAPE = ModelShape(
    vocab_size=67, num_layers=1, hidden=16, num_heads=8, num_kv_heads=4, head_dim=2, ffn=24,
    max_seq_len=16,
)  # fmt: skip


def boxes_as_torch_says(text: str) -> list[tuple[str, Box, Box, bool]]:
    """Return this rank's box of each parameter, as the plan has it and as DTensor does."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    model = Decoder(SHAPE)
    Plan(strategy, model).build(comm)
    boxes: list[tuple[str, Box, Box, bool]] = []
    rank = torch.distributed.get_rank()
    for name, parameter in model.state_dict(keep_vars=True).items():
        if isinstance(parameter, DTensor):
            (chunk,) = parameter.__create_chunk_list__()
            is_strided = any(isinstance(p, _StridedShard) for p in parameter.placements)
            theirs = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            boxes.append((name, sharding_of(parameter).box(rank), theirs, is_strided))
    return boxes


@pytest.mark.parametrize("text", ["fsdp3", "dp2,fsdp2", "fsdp2,tp2", "tp4:2d"])
def test_a_rank_holds_what_dtensor_says(text: str) -> None:
    for found in run_ranks(boxes_as_torch_says, Strategy.parse(text).num_ranks, text, threads=1):
        assert found
        for name, ours, theirs, _ in found:
            assert ours == theirs or 0 == ours.num_elements == theirs.num_elements, name
        assert any(is_strided for *_, is_strided in found) == (text == "fsdp2,tp2")


def test_a_save_of_thousands_of_ranks_is_planned_in_a_moment() -> None:
    """Of 300 tensors of a few shapes and their moments, split over 2 x 2,048 ranks."""
    axes = (ShardedAxis(Shard(0), 2048, 1),)
    shapes = [(128_256, 4096), (4096, 4096), (1024, 4096), (14_336, 4096), (4096, 14_336), (4096,)]
    held = {
        f"{key}.{number}": Sharding(shapes[number % 6], torch.float32, axes)
        for number in range(300)
        for key in ("model", "exp_avg", "exp_avg_sq")
    }
    start_s = time.process_time()
    written = WritePlan(held, 4096)
    ours, layouts = written.writes_of(4095), written.layouts()
    plan_reads(layouts, {name: sharding.box(17) for name, sharding in held.items()})
    assert ours and time.process_time() - start_s < 10  # gathering took 37 s; this takes 0.5 s
    assert len({id(layout) for layout in layouts.values()}) <= 2 * len(shapes)
