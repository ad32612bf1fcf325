from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from marks import by_hand
from phalanx.account.flops import KEEP_ALL, attention_pairs, step_flops
from phalanx.account.parameters import num_parameters
from phalanx.errors import ConfigError, StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.random import row_keys
from phalanx.models.registry import shape_of
from phalanx.models.shape import ExpertShape, LatentShape, ModelShape
from phalanx.parallel import recompute
from phalanx.strategy import Recompute, Strategy

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
# Rows of 18 floats are no multiple of 16 bytes, so experts are products that torch counts.
EXPERTS = ExpertShape(num_experts=4, top_k=2, ffn=18, first_dense=1, shared_ffn=18)
LATENT = LatentShape(query_rank=20, kv_rank=14, plain_dim=8, rope_dim=4, value_dim=12)
SHAPES = {
    "llama": BASE,
    "grouped queries": replace(BASE, num_kv_heads=2, num_layers=3),
    "gpt2": replace(
        BASE, norm="layer", position="learned", mlp="gelu", bias=True, tied=True, ffn=128
    ),
    "tied, odd vocabulary": replace(BASE, tied=True, vocab_size=101),
    "wide heads, qk norm": replace(BASE, head_dim=16, num_kv_heads=1, qk_norm=True, ffn=72),
    "layer norm without bias": replace(BASE, norm="layer", qk_norm=True),
    "qwen2": replace(BASE, num_kv_heads=2, bias="qkv"),
    "olmo2": replace(BASE, norm_at="output", num_kv_heads=2, qk_norm="projection"),
    "gemma3": replace(BASE, norm="rms+1", norm_at="both", qk_norm=True, mlp="geglu", tied=True),
    "experts": replace(BASE, num_layers=3, experts=EXPERTS),
    "latent": replace(BASE, head_dim=12, latent=LATENT),
    "latent, experts": replace(
        BASE, head_dim=12, latent=replace(LATENT, query_rank=None), experts=EXPERTS
    ),
}
WINDOWED = replace(BASE, window=5, full_every=2, num_layers=3)


POLICIES = {
    text: Strategy.parse(f"recompute:{text}").recompute
    for text in ("none", "full", "every/2", "every/3", "sqrt", "selective")
}


def counted_by_torch(
    shape: ModelShape, num_sequences: int, seq_len: int, policy: Recompute = KEEP_ALL
) -> int:
    decoder = Decoder(shape)
    decoder.initialize(0)
    recompute.apply(decoder, policy)
    keys_B = row_keys(0, 0, torch.arange(num_sequences))
    tokens_BT = torch.arange(num_sequences * seq_len).view(num_sequences, seq_len) % 90
    labels_BT = tokens_BT.roll(-1, dims=1)
    # The fused kernel of the CPU is unknown to the counter; plain products are counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(tokens_BT, labels_BT, dropout_keys_B=keys_B).backward()
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropout", [by_hand(0.0), 0.1])
@pytest.mark.parametrize("name", ["grouped queries", "gpt2", "experts", by_hand("olmo2")])
def test_recomputed_flops_equal_those_that_torch_counts(
    name: str, dropout: float, policy: str
) -> None:
    shape = replace(SHAPES[name], num_layers=5, dropout=dropout)
    flops = step_flops(shape, 24, 3, "full", POLICIES[policy])
    assert flops.hardware == counted_by_torch(shape, 3, 24, POLICIES[policy])
    assert (flops.recompute > 0) == (policy not in ("none", "selective"))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_equal_those_of_the_module(name: str) -> None:
    shape = SHAPES[name]
    decoder = Decoder(shape)
    assert num_parameters(shape).total == sum(p.numel() for p in decoder.parameters())
    matrices = [p for n, p in decoder.named_parameters() if p.ndim == 2 and "embedding" not in n]
    tied = decoder.embedding.weight.numel() if shape.tied else 0
    stacked = [p for p in decoder.parameters() if p.ndim == 3]
    active = sum(p.numel() * EXPERTS.top_k // EXPERTS.num_experts for p in stacked)
    count = num_parameters(shape)
    assert count.matmul == sum(p.numel() for p in matrices) + active + tied
    assert count.experts == sum(p.numel() for p in stacked) == 2 * count.idle


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


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mixtral-8x7b", "46.7", "12.9"),
        ("qwen3-30b-a3b", "30.5", "3.4"),
        ("qwen3-235b-a22b", "235.1", "22.2"),
        ("olmoe-1b-7b", "6.9", "1.3"),
        ("deepseek-v3-671b", "671.0", "37.6"),
    ],
)
def test_total_and_active_parameters(preset: str, total: str, active: str) -> None:
    """Of the papers: 46.7 B / 12.9 B, 30.5 B / 3.3 B, 235 B / 22 B, 6.9 B / 1.3 B, 671 B / 37 B.

    Qwen3-30B-A3B has 3.35 B, which the paper truncates. DeepSeek counts without the embedding, of
    which a token reads one row: 36.6 B by its README_WEIGHTS.
    """
    count = num_parameters(shape_of(preset))
    assert (f"{count.total / 1e9:.1f}", f"{count.active / 1e9:.1f}") == (total, active)
    if preset.startswith("deepseek"):
        assert f"{(count.active - count.embedding) / 1e9:.1f}" == "36.6"


def test_flops_follow_the_active_parameters() -> None:
    """Of grouped products, which torch has no formula for: 6 N of each token, N active weights."""
    for preset in ("olmoe-1b-7b", "deepseek-v3-671b"):
        shape = replace(shape_of(preset), num_layers=4)
        flops = step_flops(shape, 1024, 2)
        assert flops.linear_forward == 2 * num_parameters(shape).matmul * 2048
        assert flops.is_of_active and not step_flops(BASE, 24, 1).is_of_active
    assert step_flops(shape, 1024, 2, recompute=POLICIES["selective"]).recompute == 0


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


@given(seq_len=st.integers(1, 200), window=st.integers(1, 200))
def test_pairs_of_a_window_are_those_that_a_mask_leaves(seq_len: int, window: int) -> None:
    places = torch.arange(seq_len)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < window)
    assert attention_pairs(seq_len, "causal", window) == seen.sum()


def test_attention_of_a_window_counts_in_the_blocks_that_have_one() -> None:
    flops, without = step_flops(WINDOWED, 24, 3), step_flops(BASE, 24, 3)
    a_pair = 4 * BASE.num_heads * BASE.head_dim * 3
    pairs = [attention_pairs(24, "causal", window) for window in (5, None, 5)]
    assert flops.attention_forward == a_pair * sum(pairs)
    assert without.attention_forward == a_pair * 2 * pairs[1]
    assert step_flops(replace(WINDOWED, window=24), 24, 3).attention_forward == a_pair * 900


@settings(max_examples=20)
@given(
    seq_len=st.integers(1, 4096),
    num_sequences=st.integers(1, 64),
    policy=st.sampled_from(["none", "full", "every/2", "sqrt", "selective"]),
)
def test_flops_are_linear_in_sequences(seq_len: int, num_sequences: int, policy: str) -> None:
    one = step_flops(BASE, seq_len, 1, recompute=POLICIES[policy])
    many = step_flops(BASE, seq_len, num_sequences, recompute=POLICIES[policy])
    assert many.hardware == num_sequences * one.hardware
    assert many.model == 3 * many.forward
    assert many.hardware == many.model + many.recompute


@pytest.mark.parametrize(("seq_len", "num_sequences"), [(0, 1), (8, -1)])
def test_impossible_sizes_are_refused(seq_len: int, num_sequences: int) -> None:
    with pytest.raises(ConfigError):
        step_flops(BASE, seq_len, num_sequences)


def test_a_segment_longer_than_the_model_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"the model has 2 blocks; the nearest is .*every/2$"):
        step_flops(BASE, 8, 1, recompute=POLICIES["every/3"])
