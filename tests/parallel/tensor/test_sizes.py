"""Sizes that a layout does not divide are refused before any process starts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from marks import by_hand
from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.tensor.check import dtensor_shards_agree
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.verify import harness
from phalanx.verify.batches import decoder_batches

SHAPE = ModelShape(
    vocab_size=67, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
    max_seq_len=32, tied=True,
)  # fmt: skip

HEADS = {"num_heads": 6, "num_kv_heads": 6, "head_dim": 8}


@pytest.mark.parametrize(
    "text, changes, words",
    [
        ("fsdp3,tp2", {}, "fsdp3,tp2: 'embedding.weight' has 67 rows, which tp splits unevenly, "
         "and PyTorch assigns wrong rows to fsdp's shards of uneven parts; give it 68 rows, "
         "or use fsdp2"),
        ("tp3", {}, "tp3: 'blocks.0.attention.q' has 8 heads, which is not a multiple of 3; "
                    "the nearest is tp2"),
        ("tp8", {}, "'blocks.0.attention.k' has 4 heads, which is not a multiple of 8; "
                    "the nearest is tp4"),
        ("tp4", {"ffn": 50}, "'blocks.0.mlp.gate.weight' is of shape (50, 32), and 50 is not a "
                             "multiple of 4; the nearest is tp2"),
        ("tp2", {"num_heads": 3, "num_kv_heads": 1}, "'blocks.0.attention.q' has 3 heads, which is "
         "not a multiple of 2; no degree of this kind fits it"),
        ("tp9:2d", {}, "tp9:2d: 'embedding.weight' is of shape (67, 32), and 32 is not a multiple "
                       "of 3; the nearest is tp4:2d"),
        ("tp4:2d", {"hidden": 33}, "'embedding.weight' is of shape (67, 33), and 33 is not a "
                                   "multiple of 2; no degree of this kind fits it"),
        ("tp16:2d", HEADS, "'blocks.0.attention.q' has 6 heads, which is not a multiple of 4; "
                           "the nearest is tp4:2d"),
        ("tp16:2d", {"num_kv_heads": 2}, "'blocks.0.attention.k' has 2 heads, which is not a "
         "multiple of 4; the nearest is tp4:2d"),
        ("tp4:2d", {"ffn": 49}, "'blocks.0.mlp.gate.weight' is of shape (49, 32), and 49 is not a "
                                "multiple of 2; no degree of this kind fits it"),
        ("tp18:2.5d/2", {}, "tp18:2.5d/2: 'embedding.weight' is of shape (67, 32), and 32 is not a "
                            "multiple of 3; the nearest is tp8:2.5d/2"),
        ("tp32:2.5d/2", HEADS, "'blocks.0.attention.q' has 6 heads, which is not a multiple of 4; "
                               "the nearest is tp8:2.5d/2"),
        ("tp8:2.5d/2", {"ffn": 49}, "'blocks.0.mlp.gate.weight' is of shape (49, 32), and 49 is "
                                    "not a multiple of 2"),
        ("tp27:3d", {}, "tp27:3d: 'embedding.weight' is of shape (67, 32), and 32 is not a "
                        "multiple of 9; the nearest is tp8:3d"),
        ("tp8:3d", {"hidden": 34}, "'embedding.weight' is of shape (67, 34), and 34 is not a "
                                   "multiple of 4; no degree of this kind fits it"),
        ("tp8:3d", {"ffn": 50}, "'blocks.0.mlp.down.weight' is of shape (32, 50), and 50 is not a "
                                "multiple of 4; no degree of this kind fits it"),
        ("tp8:3d", {"num_kv_heads": 1}, "'blocks.0.attention.k' has 1 heads, which is not a "
                                        "multiple of 2"),
    ],
)  # fmt: skip
def test_the_parameter_and_the_nearest_degree_are_named(
    text: str, changes: dict[str, Any], words: str
) -> None:
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(SHAPE, **changes))
    with pytest.raises(StrategyError) as error:
        Plan(Strategy.parse(text), model)
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["tp4", "tp16:2d", "tp8:2.5d/2", "tp8:3d", "dp2,fsdp2,tp2"])
def test_what_divides_is_taken_whatever_the_vocabulary(text: str) -> None:
    with torch.device("meta"):
        Plan(Strategy.parse(text), Decoder(SHAPE))


def decoder() -> Decoder:
    return Decoder(SHAPE)


def test_no_process_is_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    batches = decoder_batches(SHAPE, 1, 4, 8, 1)
    with pytest.raises(StrategyError, match=r"tp3: .* has 8 heads"):
        harness.verify(decoder, batches, "tp3", NextToken())


def place(size: int, degree: int, number: int) -> tuple[int, int]:
    """Return where a part begins that torch.chunk makes, and its size."""
    part = -(-size // degree)
    first = min(size, number * part)
    return first, min(part, size - first)


@pytest.mark.parametrize("tp_sizes", [(2,), (2, 2), *map(by_hand, [(3,), (8,), (3, 3)])])
def test_rows_are_refused_where_dtensor_takes_them_for_others(tp_sizes: tuple[int, ...]) -> None:
    placements = [_StridedShard(0, split_factor=math.prod(tp_sizes)), *[Shard(0)] * len(tp_sizes)]

    def is_place_right(num_rows: int, fsdp: int, coords: tuple[int, ...]) -> bool:
        begin, size = 0, num_rows
        for degree, number in zip((*tp_sizes, fsdp), (*coords[1:], coords[0]), strict=True):
            first, size = place(size, degree, number)
            begin += first
        sizes, begins = _compute_local_shape_and_global_offset(
            (num_rows,), (fsdp, *tp_sizes), list(coords), placements
        )
        return sizes == (size,) and (size == 0 or begins == (begin,))

    found = set()
    for num_rows, fsdp in itertools.product(range(10, 90), range(2, 6)):
        ranks = itertools.product(range(fsdp), *map(range, tp_sizes))
        is_right = all(is_place_right(num_rows, fsdp, coords) for coords in reversed([*ranks]))
        is_taken = dtensor_shards_agree(num_rows, tp_sizes, fsdp)
        # Over several axes it refuses some that are right.
        assert is_taken <= is_right, (num_rows, fsdp)
        assert is_taken == is_right or len(tp_sizes) > 1, (num_rows, fsdp)
        found.add(is_taken)
    assert found == {True, False}
