"""Latent attention beside transformers' own, and split over ranks beside one process."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.attention import LatentAttention, rotation
from phalanx.models.decoder import Decoder
from phalanx.models.shape import LatentShape, Lora, ModelShape, Yarn
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy
from phalanx.verify.batches import decoder_batches
from phalanx.verify.cases import decoder_case
from phalanx.verify.harness import verify_case

SHAPE = ModelShape(
    vocab_size=66,
    num_layers=2,
    hidden=24,
    num_heads=4,
    num_kv_heads=4,
    head_dim=10,
    ffn=44,
    max_seq_len=32,
    norm_eps=1e-6,
    latent=LatentShape(query_rank=14, kv_rank=12, plain_dim=6, rope_dim=4, value_dim=7),
)
assert SHAPE.latent is not None
DIRECT = dataclasses.replace(SHAPE, latent=dataclasses.replace(SHAPE.latent, query_rank=None))


@pytest.mark.parametrize("shape", [SHAPE, DIRECT])
def test_a_branch_computes_what_that_of_transformers_does(shape: ModelShape) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    of = shape.latent
    assert of is not None
    config = DeepseekV3Config(
        hidden_size=shape.hidden, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=of.query_rank, kv_lora_rank=of.kv_rank, qk_nope_head_dim=of.plain_dim,
        qk_rope_head_dim=of.rope_dim, v_head_dim=of.value_dim, rope_interleave=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    ours = Decoder(shape).double()
    ours.initialize(1)
    branch = ours.blocks[0].get_submodule("attention")
    assert isinstance(branch, LatentAttention)
    other = theirs.DeepseekV3Attention(config, 0).double()
    names = {
        "q_a_proj": "q_down", "q_a_layernorm": "q_latent_norm", "q_b_proj": "q", "q_proj": "q",
        "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_latent_norm", "kv_b_proj": "kv",
        "o_proj": "output",
    }  # fmt: skip
    weights = {n: branch.get_parameter(f"{names[n.split('.')[0]]}.weight")
               for n, _ in other.named_parameters()}  # fmt: skip
    other.load_state_dict(weights)
    x = torch.randn(2, 9, shape.hidden, dtype=torch.float64)
    positions = torch.arange(9)[None]
    angles = rotation(shape, positions, x.dtype)
    assert angles is not None
    cos, sin = (torch.cat([a[:, :, 0]] * 2, -1) for a in angles)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = other(x, (cos, sin), mask)
    assert (branch(x, angles) - expected).abs().max() < 1e-6 * expected.abs().max()


def verdicts(shapes: Sequence[ModelShape], texts: Sequence[str]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for shape in shapes:
        for strategy in map(Strategy.parse, texts):
            batches = decoder_batches(shape, 2, 9, 16, strategy.data_ranks, 3)
            case = decoder_case(shape, batches, 3, OptimizerConfig(warmup_steps=1))
            verdict = verify_case(case, strategy, Ranks(strategy))
            assert verdict.is_equal, f"{strategy}: {verdict}"
            found.append((str(strategy), max(d.error for d in verdict.differences)))
    return found


@pytest.mark.parametrize(
    "texts",
    [
        ("tp2", "cp2"),
        by_hand(("dp2", "fsdp2", "pp2", "tp2:megatron", "cp2:ulysses")),
        by_hand(("fsdp2,tp2", "pp2,tp2", "cp2,tp2", "tp4", "dp2,cp2:ulysses")),
    ],
)
def test_ranks_compute_what_one_process_computes(texts: Sequence[str]) -> None:
    number = Strategy.parse(texts[0]).num_ranks
    yarn = Yarn(factor=6.0, original_length=4, beta_fast=2.0, mscale=0.7, mscale_all_dim=1.1)
    shapes = SHAPE, dataclasses.replace(DIRECT, rope_scaling=yarn)
    for text, error in run_ranks(verdicts, number, shapes, texts)[0]:
        assert error <= 1e-10, text


def test_layouts_that_split_features_are_refused() -> None:
    with pytest.raises(StrategyError, match="is a low-rank map, which 2d cannot split; use tp4"):
        plan_decoder(Strategy.parse("tp4:2d"), SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "head_dim is 8; with this `latent` it must be 10"),
        ({"lora": Lora(rank=2, alpha=4, targets=("attention.q",))}, "lora is "),
        ({"latent": LatentShape(query_rank=None, kv_rank=4, plain_dim=6, rope_dim=4,
                                value_dim=11)}, "a value_dim of at most plain_dim"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SHAPE, **change)
