"""A ring on a CPU takes longer than attention to full rows, by the length of its chunks."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.account.parameters import BlockKind
from phalanx.account.planned import decoder_step
from phalanx.models.registry import shape_of
from phalanx.parallel.plan import plan_decoder
from phalanx.planner import parts
from phalanx.planner.hardware import cluster
from phalanx.planner.parts import ring_slowdown
from phalanx.planner.software import DEFAULT, software
from phalanx.strategy import Strategy


def test_a_slowdown_is_by_the_length_of_a_chunk() -> None:
    ring = Strategy.parse("cp4")
    assert ring_slowdown(Strategy.parse("cp4:ulysses"), 4096, "float32") == 1.0
    assert ring_slowdown(Strategy.parse("dp4,tp2"), 4096, "bfloat16") == 1.0
    for precision, longest in (("float32", 1.0), ("bfloat16", 1.25), ("float16", 1.25)):
        found = [ring_slowdown(ring, length, precision) for length in (8, 256, 4096, 1 << 30)]
        assert found == sorted(found, reverse=True)
        assert found[-1] == pytest.approx(longest, rel=1e-5)
    assert ring_slowdown(ring, 8 * 12, "float32") == 2.0  # chunks of 12 positions


def test_attention_of_a_ring_is_priced_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ulysses a rank attends to as many pairs."""
    monkeypatch.setitem(parts._RING_COST, "float32", (7.0, 0.0))
    parts._of_case.cache_clear()
    device, shape = cluster("this").device, shape_of("demo")
    ring_s, heads_s = (
        parts.part_seconds(
            decoder_step(shape, Strategy.parse(text), 1024, 2, 1, "float32"),
            device,
            DEFAULT,
            BlockKind(None, False),
        ).attention
        for text in ("cp2", "cp2:ulysses")
    )
    parts._of_case.cache_clear()
    assert ring_s == pytest.approx(7 * heads_s, rel=0.1)


def test_a_ring_on_a_gpu_is_priced_in_plain_operators() -> None:
    """Ulysses attends to as many pairs, in a fused kernel, as the rings of other programs do."""
    device, shape = cluster("h100").device, shape_of("llama3-1b")
    ring, heads, fused = (
        parts.part_seconds(
            decoder_step(shape, Strategy.parse(text), 8192, 1, 1),
            device,
            software(name),
            BlockKind(None, False),
        )
        for text, name in (
            ("cp4", "phalanx"),
            ("cp4:ulysses", "phalanx"),
            ("cp4", "compiled"),
        )
    )
    # Half of 8192^2 scores of 32 heads, on 4 ranks: 48 bytes each forward and 86 backward.
    scores = 32 * 8192**2 / 2 / 4
    assert ring.attention > scores * (48 + 86) / device.bandwidth > 4 * heads.attention
    assert fused.attention == pytest.approx(heads.attention, rel=0.1)
    # 9 pairs of chunks of 1,024 positions, each in 4 blocks of queries.
    assert ring.block.host - heads.block.host == pytest.approx(36 * 28 * DEFAULT.launch_s, rel=0.1)


@pytest.mark.parametrize("text", ["cp4", "cp4:ulysses", "cp2,tp4", "cp2:ulysses,tp2", "tp2"])
def test_the_unit_of_a_length_is_a_multiple_of_what_the_plan_cuts(text: str) -> None:
    strategy = Strategy.parse(text)
    shards = plan_decoder(strategy, shape_of("demo"), torch.float32).position_shards
    assert strategy.length_unit == math.lcm(shards, strategy.sample_shards * strategy.tp.degree)
