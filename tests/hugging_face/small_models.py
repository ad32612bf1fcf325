"""A small model of transformers of each kind that a decoder computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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
}  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    """Make a model in which no norm weight and no bias is 1 or 0."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()
