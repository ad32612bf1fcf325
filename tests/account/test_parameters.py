"""What a pipeline makes of a decoder, beside the model itself."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.account.flops import step_flops
from phalanx.account.parameters import parameters_of
from phalanx.models.registry import PRESETS
from phalanx.models.shape import ModelShape
from phalanx.parallel.pipeline.cut import chain_flops, cut_of
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy

DEMO = PRESETS["demo"]
GPT2 = PRESETS["gpt2-124m"]
SHAPES = {
    "tied": DEMO,
    "untied": dataclasses.replace(DEMO, tied=False),
    "norms of queries and keys": dataclasses.replace(DEMO, qk_norm=True),
    "layer norm": GPT2,
    "layer norms of queries and keys": dataclasses.replace(GPT2, qk_norm=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("text", ["pp2", "pp4", "pp2:zbv", "pp2:interleaved/2"])
def test_the_stages_of_a_rank_have_as_many_parameters_as_is_counted(
    text: str, shape: ModelShape
) -> None:
    strategy = Strategy.parse(text)
    for rank in range(strategy.pp.degree):
        plan = plan_decoder(strategy, shape, pp_rank=rank)
        cut, schedule = plan.cut, plan.schedule(1)
        assert cut is not None
        assert schedule is not None
        held = plan.holds().parameter_bytes // 4
        assert held == parameters_of(shape, cut, schedule.stages_of(rank))[0]


@pytest.mark.parametrize("name", PRESETS)
def test_the_layers_cost_what_the_model_does(name: str) -> None:
    shape = PRESETS[name]
    flops = step_flops(shape, shape.max_seq_len, 1).model / shape.max_seq_len
    assert sum(chain_flops(shape)) == pytest.approx(flops, rel=1e-12)


def test_no_layer_is_left_out() -> None:
    cut = cut_of(Strategy.parse("pp4:interleaved/3"), GPT2)
    assert [link for links in cut for link in links] == [*range(GPT2.num_layers + 2)]
