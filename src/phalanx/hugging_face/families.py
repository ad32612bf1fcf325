"""The supported Hugging Face model types, and their options as fields of `ModelShape`.

A `Family` maps entries of config.json to fields of `ModelShape`, for both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from phalanx.errors import ConfigError
from phalanx.models.shape import IN_EVALUATION, ExpertShape, ModelShape, Yarn


@dataclass(frozen=True)
class Family:
    """A Hugging Face model type.

    Attributes:
        architecture: name of the class in transformers.
        parts: `ModelShape` field -> value that all models of this type have.
        sizes: config.json entry -> `ModelShape` field.
        optional: entries of `sizes` that may be null or absent; they follow from other sizes.
        norm_eps: config.json entry of the epsilon of the norms.
        constants: config.json entry -> value that is written, and the only one that is accepted.
        required: config.json entry -> the only value that is accepted; it is not written.
        windows: which blocks may have a sliding window: none, all with the same size, or each
            block as `layer_types` lists it.
        rope_types: supported RoPE scaling types.
        rope_theta: value where config.json has no rope_theta.
        is_tied: default of tie_word_embeddings: whether the output projection is the embedding.
        expert_entries: config.json entry -> `ExpertShape` field; empty for a type without experts.
        expert_parts: `ExpertShape` field -> value that all models of this type have; other fields
            that change the output have their defaults.
        latent_entries: config.json entry -> `LatentShape` field; empty without latent attention.
    """

    architecture: str
    parts: Mapping[str, Any]
    sizes: Mapping[str, str]
    norm_eps: str
    constants: Mapping[str, Any]
    optional: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    required: Mapping[str, Any] = field(default_factory=dict[str, Any])
    windows: Literal["none", "all", "layers"] = "none"
    rope_types: tuple[str, ...] = ("default", "llama3", "yarn")
    rope_theta: float = 10_000.0
    is_tied: bool = False
    expert_entries: Mapping[str, str] = field(default_factory=dict[str, str])
    expert_parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    latent_entries: Mapping[str, str] = field(default_factory=dict[str, str])


_LLAMA_PARTS: Final[Mapping[str, Any]] = {
    "norm": "rms",
    "norm_at": "input",
    "position": "rope",
    "mlp": "swiglu",
    "bias": False,
    "qk_norm": False,
    "scaled_embedding": False,
}

_LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    parts=_LLAMA_PARTS,
    sizes={
        "hidden_size": "hidden",
        "vocab_size": "vocab_size",
        "intermediate_size": "ffn",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "max_position_embeddings": "max_seq_len",
    },
    norm_eps="rms_norm_eps",
    constants={"hidden_act": "silu", "attention_bias": False},
)

_GPT2: Final = Family(
    architecture="GPT2LMHeadModel",
    parts={**_LLAMA_PARTS, "norm": "layer", "position": "learned", "mlp": "gelu", "bias": True},
    sizes={
        "n_embd": "hidden",
        "vocab_size": "vocab_size",
        "n_inner": "ffn",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "max_seq_len",
    },
    norm_eps="layer_norm_epsilon",
    constants={"activation_function": "gelu_new"},
    optional=("n_inner",),
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    rope_types=("default",),
    is_tied=True,
)

_QWEN3_MOE: Final = replace(
    _LLAMA,
    architecture="Qwen3MoeForCausalLM",
    parts={**_LLAMA_PARTS, "qk_norm": True},
    constants={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1},
    optional=("head_dim",),
    expert_entries={
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "ffn",
        "norm_topk_prob": "renormalizes",
        "mlp_only_layers": "first_dense",
    },
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": replace(
            _LLAMA,
            architecture="MistralForCausalLM",
            optional=("head_dim",),
            windows="all",
        ),
        "qwen2": replace(
            _LLAMA,
            architecture="Qwen2ForCausalLM",
            parts={**_LLAMA_PARTS, "bias": "qkv"},
            constants={"hidden_act": "silu"},
            optional=("head_dim",),
            windows="layers",
        ),
        "qwen3": replace(
            _LLAMA,
            architecture="Qwen3ForCausalLM",
            parts={**_LLAMA_PARTS, "qk_norm": True},
            optional=(),
            windows="layers",
        ),
        "phi3": replace(
            _LLAMA, architecture="Phi3ForCausalLM", windows="all", rope_types=("default",)
        ),
        "olmo2": replace(
            _LLAMA,
            architecture="Olmo2ForCausalLM",
            parts={**_LLAMA_PARTS, "norm_at": "output", "qk_norm": "projection"},
        ),
        "gemma3_text": replace(
            _LLAMA,
            architecture="Gemma3ForCausalLM",
            parts={
                **_LLAMA_PARTS,
                "norm": "rms+1",
                "norm_at": "both",
                "mlp": "geglu",
                "qk_norm": True,
                "scaled_embedding": True,
            },
            constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
            optional=(),
            windows="layers",
            rope_types=("default",),
            is_tied=True,
        ),
        "gpt2": _GPT2,
        "mixtral": replace(
            _LLAMA,
            architecture="MixtralForCausalLM",
            constants={"hidden_act": "silu"},
            optional=("head_dim",),
            required={"router_jitter_noise": 0.0},
            windows="all",
            rope_theta=1_000_000.0,
            expert_entries={
                "num_local_experts": "num_experts",
                "num_experts_per_tok": "top_k",
                "intermediate_size": "ffn",
            },
            expert_parts={"renormalizes": True},
        ),
        "qwen3_moe": _QWEN3_MOE,
        "qwen2_moe": replace(
            _QWEN3_MOE,
            architecture="Qwen2MoeForCausalLM",
            parts={**_LLAMA_PARTS, "bias": "qkv"},
            constants={"hidden_act": "silu", "qkv_bias": True, "decoder_sparse_step": 1},
            expert_entries={
                **_QWEN3_MOE.expert_entries,
                "shared_expert_intermediate_size": "shared_ffn",
            },
            expert_parts={"has_shared_gate": True},
        ),
        "olmoe": replace(
            _LLAMA,
            architecture="OlmoeForCausalLM",
            parts={**_LLAMA_PARTS, "qk_norm": "projection"},
            expert_entries={
                "num_experts": "num_experts",
                "num_experts_per_tok": "top_k",
                "intermediate_size": "ffn",
                "norm_topk_prob": "renormalizes",
            },
        ),
        "deepseek_v3": replace(
            _LLAMA,
            architecture="DeepseekV3ForCausalLM",
            # The latent vectors' norms have the epsilon 1e-6, whatever config.json says.
            parts={**_LLAMA_PARTS, "norm_eps": 1e-6},
            sizes={n: ours for n, ours in _LLAMA.sizes.items() if n != "head_dim"},
            optional=("num_key_value_heads",),
            rope_types=("default", "yarn"),
            expert_entries={
                "n_routed_experts": "num_experts",
                "num_experts_per_tok": "top_k",
                "moe_intermediate_size": "ffn",
                "first_k_dense_replace": "first_dense",
                "n_shared_experts": "shared_ffn",
                "n_group": "num_groups",
                "topk_group": "top_groups",
                "norm_topk_prob": "renormalizes",
                "routed_scaling_factor": "scaling",
            },
            expert_parts={"score": "sigmoid", "group_score": "top2", "has_bias": True},
            latent_entries={
                "q_lora_rank": "query_rank",
                "kv_lora_rank": "kv_rank",
                "qk_nope_head_dim": "plain_dim",
                "qk_rope_head_dim": "rope_dim",
                "v_head_dim": "value_dim",
            },
        ),
    }
)
"""Supported model types; if several compute a shape, the first is written by default."""


def families_of(shape: ModelShape) -> list[str]:
    """Return the Hugging Face model types that compute `shape`; the first is the default to write.

    Raises:
        ConfigError: no type computes it; the message lists the differences of the nearest type.
    """
    differing: dict[str, list[str]] = {}  # name -> the fields of `shape` that it does not support
    for name, family in FAMILIES.items():
        if bool(family.expert_entries) != (shape.experts is not None):
            continue
        values: dict[str, Any] = {**family.parts, "latent": None}
        if family.latent_entries and shape.latent is not None:
            del values["latent"]
        if family.windows == "none":
            values["window"] = None
        if family.windows != "layers":
            values["full_every"] = None
        if name != "gemma3_text":
            values["window_theta"] = None
        kind = "yarn" if isinstance(shape.rope_scaling, Yarn) else "llama3"
        if kind not in family.rope_types:
            values["rope_scaling"] = None
        if name == "gpt2":
            values["num_kv_heads"] = shape.num_heads
            values["head_dim"] = shape.hidden / shape.num_heads
        differing[name] = [
            f"its {part} is {value!r}, not {getattr(shape, part)!r}"
            for part, value in values.items()
            if getattr(shape, part) != value
        ]
        if shape.experts is not None:
            free = {*family.expert_entries.values(), *IN_EVALUATION}
            fixed = {f.name: f.default for f in fields(ExpertShape) if f.name not in free}
            differing[name] += [
                f"its experts.{part} is {value!r}, not {getattr(shape.experts, part)!r}"
                for part, value in {**fixed, **family.expert_parts}.items()
                if getattr(shape.experts, part) != value
            ]
    if legal := [name for name, parts in differing.items() if not parts]:
        return legal
    closest = min(differing, key=lambda name: len(differing[name]))
    kind = "" if shape.experts is None else "those with experts, "
    raise ConfigError(
        f"no Hugging Face model type of {kind}{', '.join(differing)} supports this shape; the "
        f"nearest is {closest}, but {', '.join(differing[closest])}"
    )


def family_of(shape: ModelShape, wanted: str | None = None) -> str:
    """Return the model type as which to write `shape`: `wanted` if given, else the first."""
    legal = families_of(shape)
    if wanted is None:
        return legal[0]
    if wanted not in legal:
        raise ConfigError(
            f"the requested model type '{wanted}' does not support this shape; legal are "
            f"{', '.join(legal)}"
        )
    return wanted
