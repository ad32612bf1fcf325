"""Routers, experts and limits: against transformers, the plain decoder, and by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import ShapeConfig
from phalanx.errors import ConfigError
from phalanx.models import experts
from phalanx.models.decoder import Decoder
from phalanx.models.experts import Experts, MoE, Router, places_in_rows
from phalanx.models.registry import shape_of, with_sizes
from phalanx.models.shape import ExpertShape, Lora, ModelShape
from phalanx.verify import plain

FEW = ExpertShape(num_experts=8, top_k=2, ffn=24)
SHAPE = ModelShape(
    vocab_size=61, num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn=48,
    max_seq_len=64, experts=FEW,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    FEW, top_k=3, score="sigmoid", renormalizes=True, scaling=2.5, num_groups=4, top_groups=2,
    group_score="top2", has_bias=True, shared_ffn=40,
)  # fmt: skip
KINDS = {
    "softmax": FEW,
    "renormalized": dataclasses.replace(FEW, top_k=3, renormalizes=True),
    "groups by max": dataclasses.replace(FEW, num_groups=4, top_groups=2, scaling=16.0),
    "deepseek-v3": DEEPSEEK,
    "shared gate": dataclasses.replace(FEW, shared_ffn=20, has_shared_gate=True),
    "capacity": dataclasses.replace(FEW, capacity=0.7),
}


def branch(of: ExpertShape, dtype: torch.dtype = torch.float64, **changes: Any) -> MoE:
    """Return experts with random weights and bias."""
    torch.manual_seed(0)
    made = MoE(dataclasses.replace(SHAPE, experts=of, **changes), of, 0).to(dtype)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.detach().normal_(std=0.3)
    return made


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return x_BTD."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 10, 32, generator=generator, dtype=torch.float64).to(dtype)


def gradients(module: torch.nn.Module, x: Tensor, **names: str) -> dict[str, Tensor]:
    """Return the output, and gradients of a random product with it, by (replaced) name."""
    x = x.clone().requires_grad_()
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    module.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert x.grad is not None
    found = {names.get(n, n): p.grad for n, p in module.named_parameters()}
    assert None not in found.values(), "each expert has a gradient, also without tokens"
    return {"": y.detach(), "x": x.grad, **{n: g for n, g in found.items() if g is not None}}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        error = (tensor - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30)
        assert error <= limit, (name, float(error))


@pytest.mark.parametrize("name", KINDS)
def test_experts_equal_the_plain_loop(name: str) -> None:
    ours = branch(KINDS[name])
    theirs = plain.PlainMoE(dataclasses.replace(SHAPE, experts=KINDS[name]), KINDS[name]).double()
    theirs.load_state_dict(ours.state_dict())
    assert_close(gradients(ours, inputs()), gradients(theirs, inputs()), 1e-12)


def test_geglu_experts_equal_the_plain_loop() -> None:
    ours = branch(FEW, mlp="geglu")
    theirs = plain.PlainMoE(dataclasses.replace(SHAPE, mlp="geglu"), FEW).double()
    theirs.load_state_dict(ours.state_dict())
    assert_close(gradients(ours, inputs()), gradients(theirs, inputs()), 1e-12)


def transformers_block(family: str, renormalizes: bool) -> torch.nn.Module:
    """Return the MoE block of a transformers model, of the sizes of SHAPE."""
    from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_experts_per_tok": 2, "vocab_size": 61, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "experts_implementation": "eager",
    }  # fmt: skip
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(**sizes, num_local_experts=8, intermediate_size=24)
        return MixtralSparseMoeBlock(config)
    sizes |= {"num_experts": 8, "norm_topk_prob": renormalizes}
    if family == "qwen3":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, moe_intermediate_size=24))
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    return OlmoeSparseMoeBlock(OlmoeConfig(**sizes, intermediate_size=24))


@pytest.mark.parametrize(
    ("family", "renormalizes"),
    [("mixtral", True), ("qwen3", True), ("qwen3", False), ("olmoe", False)],
)
def test_blocks_of_transformers(
    family: str, renormalizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = branch(dataclasses.replace(FEW, renormalizes=renormalizes))
    theirs = transformers_block(family, renormalizes).double()
    own = ours.state_dict()
    theirs.load_state_dict(
        {
            "gate.weight": own["router.weight"],
            "experts.gate_up_proj": torch.cat([own["experts.gate"], own["experts.up"]], 1),
            "experts.down_proj": own["experts.down"],
        }
    )
    router, x = ours.router.float(), inputs(torch.float32).flatten(0, 1)
    _, their_weights, their_experts = theirs.gate.float()(x)  # type: ignore[operator, union-attr]
    found, weights = router(x)
    assert torch.equal(found, their_experts), "the same experts, best first"
    assert torch.equal(weights, their_weights), "float32 weights to the bit"

    # transformers computes scores in float32 for every model: here in the model's float64.
    softmax: Any = torch.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    of_theirs = gradients(theirs.double(), inputs())
    monkeypatch.undo()
    of_ours = gradients(ours.double(), inputs())
    of_ours["gate.weight"] = of_ours.pop("router.weight")
    halves = of_ours.pop("experts.gate"), of_ours.pop("experts.up")
    of_ours["experts.gate_up_proj"] = torch.cat(halves, 1)
    of_ours["experts.down_proj"] = of_ours.pop("experts.down")
    assert_close(of_ours, of_theirs, 1e-12)


def test_the_router_of_deepseek_v3() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    ours, theirs = branch(DEEPSEEK, torch.float32).router, DeepseekV3TopkRouter(config)
    state = ours.state_dict()
    theirs.load_state_dict({"weight": state["weight"], "e_score_correction_bias": state["bias"]})
    x = inputs(torch.float32).flatten(0, 1)
    found, weights = ours(x)
    _, their_weights, their_experts = theirs(x)
    dense, their_dense = (
        torch.zeros(30, 8).scatter(1, chosen, of)
        for chosen, of in ((found, weights), (their_experts, their_weights))
    )
    torch.testing.assert_close(dense, their_dense, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["softmax", "deepseek-v3"])
def test_equal_scores_select_lower_numbers(name: str) -> None:
    router = Router(32, KINDS[name], 0)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.detach().zero_()
    found, _ = router(torch.randn(500, 32))
    assert torch.equal(found, torch.arange(KINDS[name].top_k).expand(500, -1))


def test_the_bias_selects_and_never_weighs() -> None:
    router = branch(dataclasses.replace(FEW, has_bias=True)).router
    x = inputs().flatten(0, 1)
    assert router.bias is not None
    router.bias.zero_()
    before, weights = router(x)
    router.bias += 7.0  # the same for all experts
    same, same_weights = router(x)
    assert torch.equal(before, same)
    assert torch.equal(weights, same_weights)
    router.bias[5] += 1.0  # above the range of a softmax
    found, weights = router(x)
    assert (found[:, 0] == 5).all()
    scores = (x @ router.weight.T).softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, found), rtol=1e-12, atol=0)


def test_narrow_types_select_by_float32_scores_and_biases() -> None:
    router = branch(DEEPSEEK, torch.float32).router
    x = inputs(torch.float32).flatten(0, 1)
    assert router.bias is not None
    router.bias += 5.0  # beyond which bfloat16 has steps of 1/32
    expected, weights = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found[0], expected) and torch.equal(found[1], weights)
    bias = router.bias.clone()
    assert router.bfloat16().weight.dtype == torch.bfloat16
    assert router.bias.dtype == torch.float32 and torch.equal(router.bias, bias)
    assert router.double().bias.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_equals_slices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = branch(FEW, dtype)
    made.router.weight.detach()[3:5] -= 100 * made.router.weight.detach()[3:5]
    x = inputs(dtype).abs()
    grouped = gradients(made, x)
    monkeypatch.setattr(experts, "_ALIGNMENT", 1 << 20)  # divides no width
    sliced = gradients(made, x)
    if dtype == torch.float32:
        assert all(torch.equal(tensor, sliced[name]) for name, tensor in grouped.items())
    assert_close(grouped, sliced, 2e-2)
    idle = torch.bincount(made.router(x.flatten(0, 1))[0].flatten(), minlength=8) == 0
    assert idle.any(), "some expert gets no token"
    assert not grouped["experts.gate"][idle].any(), "its gradient is zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_of_other_experts_change_no_bit(dtype: torch.dtype) -> None:
    made = branch(FEW, dtype).experts
    rows = inputs(dtype).flatten(0, 1)
    few = made(rows[:12], torch.tensor([0, 5, 0, 7, 0, 0, 0, 0]))
    all_rows = torch.cat([rows[12:15], rows[:5], rows[15:16], rows[5:12], rows[16:]])
    many = made(all_rows, torch.tensor([3, 5, 1, 7, 10, 0, 4, 0]))
    assert torch.equal(few[:5], many[3:8])
    assert torch.equal(few[5:], many[9:16])


def test_no_token_at_all() -> None:
    for dtype in (torch.float32, torch.float64):
        made = branch(FEW, dtype)
        found = gradients(made, torch.empty(0, 10, 32, dtype=dtype))
        assert found[""].shape == (0, 10, 32)
        assert not any(found[name].any() for name in found)


def test_places_in_rows() -> None:
    experts_BTk = torch.tensor([[[2, 0], [2, 1], [0, 2]], [[2, 1], [1, 0], [2, 1]]])
    places, length = places_in_rows(experts_BTk, 3)
    assert length == 3
    assert places.tolist() == [[[0, 0], [1, 0], [1, 2]], [[0, 0], [1, 0], [1, 2]]]


def test_a_full_expert_drops_the_last_tokens_of_a_row() -> None:
    of = dataclasses.replace(FEW, capacity=1.2)
    made, x = branch(of), inputs()
    made.router.weight.detach()[:2] = 100.0  # all tokens with a positive sum choose 0 and 1
    x[1] = x[1].abs()
    found, _ = made.router(x.flatten(0, 1))
    assert (found.view(3, 10, 2)[1].sort(-1).values == torch.tensor([0, 1])).all()
    kept = made(x)
    made.eval()  # without a limit
    free = made(x)
    assert torch.equal(kept[1, :3], free[1, :3]), "ceil(1.2 * 2 * 10 / 8) = 3 tokens are kept"
    assert not kept[1, 3:].any(), "the other seven lose both experts"
    alone = made.train()(x[1:2])[0]  # other rows take no places
    torch.testing.assert_close(alone, kept[1], rtol=1e-12, atol=1e-12)
    made.router.experts = dataclasses.replace(of, capacity=8.0)
    assert torch.equal(made(x), free), "a limit of all tokens drops none"


def test_initial_values() -> None:
    shape = dataclasses.replace(SHAPE, experts=dataclasses.replace(DEEPSEEK, first_dense=1))
    model = Decoder(shape)
    model.initialize(3)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [name for name in tensors if "blocks.0.mlp." in name] == [
        f"blocks.0.mlp.{name}.weight" for name in ("gate", "up", "down")
    ]
    assert {n.removeprefix("blocks.1.mlp."): tuple(t.shape) for n, t in tensors.items()
            if n.startswith("blocks.1.mlp.")} == {
        "router.weight": (8, 32), "router.bias": (8,), "experts.gate": (8, 24, 32),
        "experts.up": (8, 24, 32), "experts.down": (8, 32, 24), "shared.gate.weight": (40, 32),
        "shared.up.weight": (40, 32), "shared.down.weight": (32, 40),
    }  # fmt: skip
    assert not tensors["blocks.1.mlp.router.bias"].any()
    for name, std in (("gate", 0.02), ("up", 0.02), ("down", 0.01)):  # 2 layers: / sqrt(4)
        weight = tensors[f"blocks.1.mlp.experts.{name}"]
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert not torch.equal(weight[0], weight[1]), "experts begin different"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "experts: top_k is 0; expected at least 1 and finite; the nearest is 1"),
        ({"top_k": 9}, "top_k is 9; expected at most num_experts, 8; the nearest is 8"),
        ({"num_groups": 3}, "num_groups is 3; expected a divisor of 8 experts; the nearest is 2"),
        ({"num_groups": 2, "top_groups": 3}, "at most num_groups 2; the nearest is 2"),
        (
            {"num_groups": 4, "top_k": 3},
            "top_k is 3; expected at most top_groups * 2, 2; the nearest is 2",
        ),
        ({"num_groups": 8, "top_groups": 2, "group_score": "top2"}, "the nearest is max"),
        ({"bias_rate": 0.1}, "bias_rate is 0.1; expected 0 without has_bias; the nearest is 0.0"),
        ({"has_shared_gate": True}, "expected false without shared_ffn; the nearest is false"),
        ({"capacity": 0.0}, "capacity is 0.0; expected above 0 and finite, or none"),
        ({"aux_loss": -1.0}, "aux_loss is -1.0; expected at least 0 and finite; the nearest is 0"),
        ({"scaling": float("nan")}, "scaling is nan; expected above 0 and finite"),
    ],
)
def test_illegal_experts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(FEW, **changes)
    assert message in str(caught.value)


def test_a_limit_is_rounded_up_from_its_decimal_number() -> None:
    of = dataclasses.replace(FEW, num_experts=4, top_k=3)
    assert of.limit(1000) == 1000
    assert dataclasses.replace(of, capacity=1.1).limit(1000) == 825  # 826 in binary
    assert dataclasses.replace(of, capacity=1.1).limit(1001) == 826


def test_illegal_experts_of_a_model() -> None:
    dense = dataclasses.replace(FEW, first_dense=2)
    with pytest.raises(ConfigError, match="none of 2 blocks has experts; the nearest is 1"):
        dataclasses.replace(SHAPE, experts=dense)
    with pytest.raises(ConfigError, match="experts have a gate and no biases, but mlp is gelu"):
        dataclasses.replace(SHAPE, mlp="gelu")
    lora = Lora(rank=2, alpha=4.0, targets=("attention.q", "mlp.up"))
    with pytest.raises(ConfigError, match="experts have no adapters, but the targets contain mlp"):
        dataclasses.replace(SHAPE, lora=lora)


def test_experts_in_a_setting() -> None:
    demo = shape_of("demo")
    text = "num_experts=8,top_k=2,ffn=704,aux_loss=0.01,score=sigmoid,has_bias=true,capacity=none"
    made = with_sizes(demo, ShapeConfig(experts=text))
    assert made.experts == ExpertShape(
        num_experts=8, top_k=2, ffn=704, aux_loss=0.01, score="sigmoid", has_bias=True
    )
    changed = with_sizes(made, ShapeConfig(experts="top_k=4,aux_loss=0"))
    assert changed.experts == dataclasses.replace(made.experts, top_k=4, aux_loss=0)
    for wrong, message in (
        ("num_experts=8,topk=2", "(did you mean 'top_k'?)"),
        ("num_experts=8", "expected also top_k and ffn, without default"),
        ("num_experts=8,top_k=two,ffn=4", "experts: top_k is 'two'; expected a whole number"),
        ("num_experts=8,top_k=2,ffn=4,score=tanh", "score is 'tanh'; expected one of softmax"),
    ):
        with pytest.raises(ConfigError) as caught:
            with_sizes(demo, ShapeConfig(experts=wrong))
        assert message in str(caught.value)


def test_experts_are_stacked_parameters() -> None:
    made = Experts(SHAPE, FEW)
    assert [tuple(p.shape) for p in (made.gate, made.up, made.down)] == [
        *[(8, 24, 32)] * 2, (8, 32, 24),
    ]  # fmt: skip
    assert all(p.is_contiguous() for p in made.parameters())
