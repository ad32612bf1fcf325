from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.errors import ConfigError
from phalanx.models.decoder import Decoder
from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.planner.model_shape import attention_pairs, num_parameters, step_flops

BASE = ModelShape(
    vocab_size=96,
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn=80,
    max_seq_len=64,
)
SHAPES = {
    "llama": BASE,
    "grouped queries": replace(BASE, num_kv_heads=2, num_layers=3),
    "gpt2": replace(
        BASE, norm="layer", position="learned", mlp="gelu", bias=True, tied=True, ffn=128
    ),
    "tied, odd vocabulary": replace(BASE, tied=True, vocab_size=101),
    "wide heads, qk norm": replace(BASE, head_dim=16, num_kv_heads=1, qk_norm=True, ffn=72),
    "layer norm without bias": replace(BASE, norm="layer", qk_norm=True),
}


def counted_by_torch(shape: ModelShape, num_sequences: int, seq_len: int) -> int:
    decoder = Decoder(shape)
    decoder.initialize(0)
    tokens_BT = torch.arange(num_sequences * seq_len).view(num_sequences, seq_len) % 90
    labels_BT = tokens_BT.roll(-1, dims=1)
    # The fused kernel of the CPU is unknown to the counter; plain products are counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(tokens_BT, labels_BT).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_flops_equal_those_that_torch_counts(name: str) -> None:
    shape = SHAPES[name]
    assert step_flops(shape, 24, 3, "full").model == counted_by_torch(shape, 3, 24)


def test_forward_alone_equals_what_torch_counts() -> None:
    decoder = Decoder(BASE)
    decoder.initialize(0)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        decoder(torch.zeros(2, 16, dtype=torch.int64))
    assert step_flops(BASE, 16, 2, "full").forward == counter.get_total_flops()


def test_recomputed_block_costs_its_forward_once_more() -> None:
    block = Decoder(BASE).blocks[0]
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        block(torch.zeros(2, 16, BASE.hidden))
    one_block = counter.get_total_flops()
    assert step_flops(BASE, 16, 2, "full", num_recomputed_blocks=2).recompute == 2 * one_block


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_equal_those_of_the_module(name: str) -> None:
    shape = SHAPES[name]
    decoder = Decoder(shape)
    assert num_parameters(shape).total == sum(p.numel() for p in decoder.parameters())
    matrices = [p for n, p in decoder.named_parameters() if p.ndim == 2 and "embedding" not in n]
    tied = decoder.embedding.weight.numel() if shape.tied else 0
    assert num_parameters(shape).matmul == sum(p.numel() for p in matrices) + tied


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_parameters_of_published_models(preset: str, published: int) -> None:
    assert num_parameters(shape_of(preset)).total == published


def test_palm_formula_holds_with_full_attention() -> None:
    # Appendix B of arXiv 2204.02311: 6 N + 12 L H Q T FLOPs a token, N without the embedding.
    shape, seq_len = shape_of("llama3-8b"), 8192
    per_token = 6 * num_parameters(shape).matmul + 12 * 32 * 32 * 128 * seq_len
    assert step_flops(shape, seq_len, 4, "full").model == 4 * seq_len * per_token


@given(seq_len=st.integers(1, 10_000))
def test_causal_pairs_are_the_triangle_with_its_diagonal(seq_len: int) -> None:
    full, causal = (attention_pairs(seq_len, kind) for kind in ("full", "causal"))
    assert causal - (full - causal) == seq_len
    assert full == seq_len**2


@settings(max_examples=50)
@given(
    seq_len=st.integers(1, 4096),
    num_sequences=st.integers(1, 64),
    blocks=st.integers(0, 2),
)
def test_flops_are_linear_in_sequences_and_recompute(
    seq_len: int, num_sequences: int, blocks: int
) -> None:
    one = step_flops(BASE, seq_len, 1, num_recomputed_blocks=blocks)
    many = step_flops(BASE, seq_len, num_sequences, num_recomputed_blocks=blocks)
    assert many.hardware == num_sequences * one.hardware
    assert many.model == 3 * many.forward
    assert many.hardware == many.model + many.recompute


def test_selective_recompute_runs_only_attention_again() -> None:
    flops = step_flops(BASE, 64, 2, num_recomputed_attentions=BASE.num_layers)
    assert flops.recompute == flops.attention_forward > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_len": 0, "num_sequences": 1},
        {"seq_len": 8, "num_sequences": -1},
        {"seq_len": 8, "num_sequences": 1, "num_recomputed_blocks": 3},
        {"seq_len": 8, "num_sequences": 1, "num_recomputed_attentions": -1},
        {
            "seq_len": 8,
            "num_sequences": 1,
            "num_recomputed_blocks": 1,
            "num_recomputed_attentions": 2,
        },
    ],
)
def test_impossible_counts_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        step_flops(BASE, **settings)
