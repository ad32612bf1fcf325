"""Prices of exchanges of ep and of the optimizer's step."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.account.planned import decoder_step
from phalanx.models.block_weights import newton_schulz_flops
from phalanx.models.registry import shape_of
from phalanx.planner.hardware import cluster
from phalanx.planner.price import Price, price
from phalanx.planner.software import DEFAULT
from phalanx.strategy import Strategy


def test_rows_of_later_stages_are_exchanged_though_the_first_stage_is_dense() -> None:
    """Four stages of two blocks: the first three blocks are dense, or none."""
    shape = dataclasses.replace(shape_of("deepseek-v3-671b"), num_layers=8)
    assert shape.experts is not None
    none_dense = dataclasses.replace(shape.experts, first_dense=0)
    strategy = Strategy.parse("pp4,ep8")
    sparse, dense_first = (
        price(decoder_step(each, strategy, 4096, 1, 8), cluster("h100:32"), DEFAULT).experts_s
        for each in (dataclasses.replace(shape, experts=none_dense), shape)
    )
    # The busiest stage has blocks 2 to 4, of which the first is dense.
    assert sparse > 0 and dense_first == pytest.approx(2 / 3 * sparse)


def test_owners_of_muon_share_its_iteration() -> None:
    def priced(text: str, *, is_muon: bool) -> Price:
        step = decoder_step(shape_of("llama3-8b"), Strategy.parse(text), 4096, 1, 4)
        step = dataclasses.replace(step, model=dataclasses.replace(step.model, is_muon=is_muon))
        return price(step, cluster("h100:16"), DEFAULT)

    adamw, of_2, of_8 = (
        priced(text, is_muon=is_muon)
        for text, is_muon in (("fsdp8", False), ("fsdp2", True), ("fsdp8", True))
    )
    shape = shape_of("llama3-8b")
    kv = shape.num_kv_heads * shape.head_dim
    sizes = [(shape.hidden, each) for each in (shape.hidden,) * 2 + (kv,) * 2 + (shape.ffn,) * 3]
    flops = shape.num_layers * sum(map(newton_schulz_flops, sizes))
    least_s = flops / 8 / cluster("h100").device.flops
    assert least_s < of_8.optimizer_s - adamw.optimizer_s < 5 * least_s
    assert 3 < of_2.optimizer_s / of_8.optimizer_s < 4.01
    assert of_8.step_s - of_8.optimizer_s == pytest.approx(adamw.step_s - adamw.optimizer_s)
