"""What a pipeline makes of a decoder, beside the model itself."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.account.flops import step_flops
from phalanx.account.parameters import num_parameters, parameters_of
from phalanx.account.planned import decoder_step
from phalanx.account.rank_memory import least_bytes, memory
from phalanx.models.registry import PRESETS
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.pipeline.cut import chain_flops, cut_of
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy

DEMO = PRESETS["demo"]
GPT2 = PRESETS["gpt2-124m"]
EXPERTS = ExpertShape(num_experts=8, top_k=2, ffn=64, first_dense=1, shared_ffn=32)
SHAPES = {
    "tied": DEMO,
    "untied": dataclasses.replace(DEMO, tied=False),
    "norms of queries and keys": dataclasses.replace(DEMO, qk_norm=True),
    "experts": dataclasses.replace(DEMO, tied=False, experts=EXPERTS),
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


@pytest.mark.parametrize(
    "text", ["ep4", "dp2,ep2", "fsdp2,cp2,ep2", "fsdp2:zero1,ep2", "pp2,fsdp2,ep2"]
)
def test_a_rank_holds_its_part_of_experts_and_of_all_else(text: str) -> None:
    """Experts over ep and (fsdp, cp), the rest over (fsdp, cp, ep): as the plan holds them."""
    strategy, shape = Strategy.parse(text), SHAPES["experts"]
    step = decoder_step(shape, strategy, 512, 1, 2)
    bounds, stages = memory(step, "gpu", "state"), memory(step, "gpu")
    assert [of.weights for of in bounds] == [of.weights for of in stages]
    assert [of.optimizer for of in bounds] == [of.optimizer for of in stages]
    assert least_bytes(step) <= max(of.total for of in stages)
    if strategy.pp.degree == 1:
        count = num_parameters(shape)
        of_experts = strategy.ep.degree * (strategy.fsdp.degree * strategy.cp.degree)
        of_experts //= 1 if strategy.fsdp.degree > 1 else strategy.cp.degree
        others = (count.total - count.experts) / strategy.num_shards
        assert bounds[0].weights / 4 == pytest.approx(others + count.experts / of_experts)


@pytest.mark.parametrize("name", PRESETS)
def test_the_layers_cost_what_the_model_does(name: str) -> None:
    shape = PRESETS[name]
    flops = step_flops(shape, shape.max_seq_len, 1).model / shape.max_seq_len
    assert sum(chain_flops(shape)) == pytest.approx(flops, rel=1e-12)


def test_no_layer_is_left_out() -> None:
    cut = cut_of(Strategy.parse("pp4:interleaved/3"), GPT2)
    assert [link for links in cut for link in links] == [*range(GPT2.num_layers + 2)]
