"""A small model of transformers of each kind that a decoder computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **IDS,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **IDS,
}  # fmt: skip
FULL, WINDOWED = "full_attention", "sliding_attention"


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))


def mistral(**options: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**SIZES, **options}))


def qwen2(**options: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **options}))


def qwen3(**options: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **options}))


def phi3(**options: Any) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, **options}))


def olmo2(**options: Any) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**{**SIZES, **options}))


def gemma3(**options: Any) -> PreTrainedModel:
    own: dict[str, Any] = {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7,
        "num_hidden_layers": 3, "layer_types": [WINDOWED, WINDOWED, FULL],
        "rope_parameters": {FULL: ROPE, WINDOWED: {"rope_type": "default", "rope_theta": 300.0}},
    }  # fmt: skip
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **own, **options}))


def gpt2(**options: Any) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**{**GPT2_SIZES, **options}))


def mixtral(**options: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4, **options}))


def qwen3_moe(**options: Any) -> PreTrainedModel:
    own = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **own, **options}))


def qwen2_moe(**options: Any) -> PreTrainedModel:
    own = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }  # fmt: skip
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**SIZES, **own, **options}))


def olmoe(**options: Any) -> PreTrainedModel:
    own = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    return OlmoeForCausalLM(OlmoeConfig(**{**SIZES, **own, **options}))


def deepseek_v3(**options: Any) -> PreTrainedModel:
    own = {
        "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **own, **options}))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied-llama3-rope": lambda: llama(
        tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE, head_dim=16
    ),
    "mistral": lambda: mistral(sliding_window=7),
    "mistral-no-window-llama3-rope": lambda: mistral(
        sliding_window=None, head_dim=16, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2": qwen2,
    "qwen2-tied-windows": lambda: qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "qwen3": qwen3,
    "qwen3-tied-every-other-window": lambda: qwen3(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, num_hidden_layers=4,
        layer_types=[WINDOWED, FULL] * 2,
    ),
    "phi3": lambda: phi3(sliding_window=7),
    "phi3-tied-no-window": lambda: phi3(tie_word_embeddings=True, num_key_value_heads=4),
    "olmo2": olmo2,
    "olmo2-tied-llama3-rope": lambda: olmo2(
        tie_word_embeddings=True, num_key_value_heads=4, rope_parameters=LLAMA3_ROPE
    ),
    "gemma3": gemma3,
    "gemma3-untied-all-windows": lambda: gemma3(
        tie_word_embeddings=False, num_hidden_layers=2, layer_types=[WINDOWED] * 2
    ),
    "gpt2": lambda: gpt2(n_inner=80),
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
    "mixtral": lambda: mixtral(sliding_window=7),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-tied-first-dense": lambda: qwen3_moe(
        tie_word_embeddings=True, mlp_only_layers=[0], rope_parameters=LLAMA3_ROPE
    ),
    "qwen2-moe": qwen2_moe,
    "olmoe": olmoe,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-direct-queries": lambda: deepseek_v3(
        q_lora_rank=None, first_k_dense_replace=0, norm_topk_prob=False
    ),
    "deepseek-v3-yarn": lambda: deepseek_v3(
        rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 3.0}
    ),
    "qwen3-yarn": lambda: qwen3(rope_parameters={**YARN, "beta_slow": 0.1, "truncate": False}),
}  # fmt: skip


@contextmanager
def in_float64() -> Iterator[None]:
    """Let transformers compute in float64 where it asks for float32: norms, angles, routers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def model_of(name: str) -> PreTrainedModel:
    """Make a model in which no norm weight and no bias is 1 or 0."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()
