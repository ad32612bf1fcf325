"""Muon on one process beside torch's, and which parameters it updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint.optimizer_state import dry_state
from phalanx.comm.comm import SingleRankComm
from phalanx.config import OptimizerConfig
from phalanx.errors import ScriptError
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.train.optimizer import (
    Muon,
    bind,
    build_optimizer,
    muon_groups,
    newton_schulz_flops,
    orthogonalize,
)

SHAPE = ModelShape(
    vocab_size=61, num_layers=2, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=24,
    max_seq_len=16,
)  # fmt: skip


def stepped(optimizer: Any, weights: list[nn.Parameter], num_steps: int = 3) -> list[Tensor]:
    """Return the weights after steps whose gradients depend on the step and the shape."""
    for step in range(num_steps):
        for weight in weights:
            generator = torch.Generator().manual_seed(step)
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "momentum": 0.8, "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"nesterov": False},
    ],
)
def test_one_process_has_the_bits_of_torchs_muon(settings: dict[str, Any]) -> None:
    shapes = ((12, 20), (20, 12), (8, 8))
    ours, theirs = matrices(*shapes), matrices(*shapes)
    found = stepped(Muon(ours, 0.05, **settings), ours)
    expected = stepped(torch.optim.Muon(theirs, 0.05, **settings), theirs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_without_nesterov_keeps_the_momentum() -> None:
    """torch.optim.Muon normalises it in place there (pytorch/pytorch#194664)."""
    (weight,) = matrices((8, 8), dtype=torch.bfloat16)
    optimizer = torch.optim.Muon([weight], 0.05, nesterov=False)
    bind(optimizer, SingleRankComm())
    stepped(optimizer, [weight], 1)
    gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    expected = torch.zeros(8, 8, dtype=torch.bfloat16).lerp_(gradient, 1 - 0.95)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


def test_float64_is_orthogonalized_in_float64() -> None:
    (matrix,) = matrices((6, 9), dtype=torch.float64)
    x = matrix.detach()
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    found = orthogonalize(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.allclose(found, u @ torch.diag(s) @ v, rtol=0, atol=1e-12)
    weights = matrices((6, 9), dtype=torch.float64)
    before = weights[0].detach().clone()
    stepped(Muon(weights, 0.05, weight_decay=0.0), weights, 1)
    gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = orthogonalize(gradient, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.allclose(before - weights[0].detach(), 0.05 * step, rtol=0, atol=1e-13)


def test_parts_of_a_fused_weight_are_matrices() -> None:
    fused, *parts = matrices((12, 8), (4, 8), (4, 8), (4, 8))
    with torch.no_grad():
        fused.copy_(torch.cat([*parts]))
    one = Muon([{"params": [fused], "parts": (1, 1, 1)}], 0.05)
    several = Muon(parts, 0.05)
    for _ in range(2):
        for part in parts:
            part.grad = torch.randn_like(part)
        fused.grad = torch.cat([part.grad for part in parts if part.grad is not None])
        one.step()
        several.step()
    assert torch.equal(fused, torch.cat([*parts]))


def test_groups_of_the_decoder() -> None:
    """Embedding, head and norms are AdamW's, and routers; experts are stacks of matrices."""
    experts = ExpertShape(num_experts=4, top_k=2, ffn=8, shared_ffn=8, has_shared_gate=True)
    model = Decoder(ModelShape(**{**vars(SHAPE), "experts": experts}))
    model.initialize(0)
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon", matrix_lr=0.02, lr=0.001))
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_muon = {
        names[p].split(".", 2)[2]
        for group in optimizer.param_groups
        if group["use_muon"]
        for p in group["params"]
    }
    assert of_muon == {
        *(f"attention.{name}.weight" for name in ("q", "k", "v", "output")),
        *(f"mlp.experts.{name}" for name in ("gate", "up", "down")),
        *(f"mlp.shared.{name}.weight" for name in ("gate", "up", "down")),
    }
    every = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(every) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    assert optimizer.param_groups[-1]["lr_ratio"] == pytest.approx(20)
    keys = [set(dry_state(optimizer, group) or {}) for group in optimizer.param_groups]
    assert keys == [{"step", "exp_avg", "exp_avg_sq"}] * 2 + [{"momentum_buffer"}]


def test_a_fused_weight_has_one_moment() -> None:
    optimizer = Muon([{"params": matrices((12, 4)), "parts": (4, 1, 1)}])
    assert set(dry_state(optimizer, optimizer.param_groups[0]) or {}) == {"momentum_buffer"}


def test_frozen_parameters_are_in_no_group() -> None:
    model = Decoder(SHAPE)
    trained = {
        parameter.requires_grad_(name in ("output.weight", "blocks.0.attention.q.weight"))
        for name, parameter in model.named_parameters()
    }
    trained = {parameter for parameter in trained if parameter.requires_grad}
    assert len(trained) == 2
    assert {p for group in muon_groups(model) for p in group["params"]} == trained


def test_what_muon_does_not_take() -> None:
    with pytest.raises(ScriptError, match=r"a parameter has the shape \(4,\); expected a matrix"):
        Muon([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ScriptError, match="10 rows do not divide into matrices"):
        optimizer = Muon([{"params": matrices((10, 4)), "parts": (2, 1, 1)}])
        stepped(optimizer, optimizer.param_groups[0]["params"], 1)
    with pytest.raises(ScriptError, match="adjust_lr_fn is 'rms'; expected one of original, match"):
        Muon(matrices((4, 4)), adjust_lr_fn="rms")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScriptError, match="ns_dtype is 'bf16'; the nearest is 'bfloat16'"):
        Muon(matrices((4, 4)), ns_dtype="bf16")


def test_cost() -> None:
    """5 steps of 2 products of [2, 3] and [3, 2] sizes and one of [2, 2]."""
    assert newton_schulz_flops((3, 2)) == 5 * (2 * 2 * 2 * 3 * 2 + 2 * 2 * 2 * 2)
    assert newton_schulz_flops((4, 2, 3)) == 4 * newton_schulz_flops((3, 2))


@pytest.mark.slow
def test_groups_by_roles_of_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
    phi = transformers.Phi3Config(
        **small, num_key_value_heads=2, intermediate_size=24, pad_token_id=0
    )
    groups = muon_groups(transformers.Phi3ForCausalLM(phi))
    assert [(g.get("parts"), len(g["params"])) for g in groups] == [
        ((1,), 2), ((2, 1, 1), 1), ((1, 1), 1), (None, 2), (None, 3),
    ]  # fmt: skip
    gpt = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=4, n_positions=8)
    groups = muon_groups(transformers.GPT2LMHeadModel(gpt))
    assert [(g.get("parts"), len(g["params"])) for g in groups] == [
        ((1,), 3), (None, 3), (None, 10),
    ]  # fmt: skip
