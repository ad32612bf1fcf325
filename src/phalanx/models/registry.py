"""Presets of model shapes by name, from published configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from phalanx.config import ShapeConfig
from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.models.shape import ExpertShape, LatentShape, ModelShape

SIZES = (
    *("vocab_size", "num_layers", "hidden", "num_heads"),
    *("num_kv_heads", "head_dim", "ffn", "max_seq_len"),
)
"""Fields of ModelShape in the columns of the table below."""


# GPT-2's dropout is not preset here; users set `shape.dropout`.
_GPT2 = {"norm": "layer", "position": "learned", "mlp": "gelu", "bias": True, "tied": True}
_LLAMA3 = {"rope_theta": 500_000.0, "rope_scaling": (8.0, 1.0, 4.0, 8192)}
_LLAMA3_SMALL = {**_LLAMA3, "rope_scaling": (32.0, 1.0, 4.0, 8192), "tied": True}
_QWEN2 = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "bias": "qkv"}
_QWEN3 = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "qk_norm": True}
_QWEN3_SMALL = {**_QWEN3, "tied": True}
_OLMO2 = {
    "norm_eps": 1e-6, "norm_at": "output", "rope_theta": 500_000.0, "qk_norm": "projection",
}  # fmt: skip
_GEMMA3 = {
    "norm": "rms+1", "norm_eps": 1e-6, "norm_at": "both", "rope_theta": 1_000_000.0, "window": 512,
    "full_every": 6, "window_theta": 10_000.0, "mlp": "geglu", "qk_norm": True, "tied": True,
    "scaled_embedding": True,
}  # fmt: skip

# vocabulary, layers, hidden, heads, key-value heads, width of a head, ffn, longest row
_TABLE: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    # Our own: learns from text on two CPU cores within minutes. Over the first million tokens a few
    # wide blocks reach a lower loss, sooner, than more narrow blocks with as many parameters: see
    # docs/decisions.md.
    "demo": ((4096, 3, 256, 4, 4, 64, 1408, 1024), {"tied": True}),
    # Radford et al. 2019, table 2; config.json of openai-community/gpt2, -medium, -large, -xl
    "gpt2-124m": ((50257, 12, 768, 12, 12, 64, 3072, 1024), _GPT2),
    "gpt2-355m": ((50257, 24, 1024, 16, 16, 64, 4096, 1024), _GPT2),
    "gpt2-774m": ((50257, 36, 1280, 20, 20, 64, 5120, 1024), _GPT2),
    "gpt2-1.5b": ((50257, 48, 1600, 25, 25, 64, 6400, 1024), _GPT2),
    # Brown et al. 2020, table 2.1
    "gpt3-175b": ((50257, 96, 12288, 96, 96, 128, 49152, 2048), _GPT2),
    # Touvron et al. 2023b; config.json of meta-llama/Llama-2-7b-hf
    "llama2-7b": ((32000, 32, 4096, 32, 32, 128, 11008, 4096), {}),
    # Dubey et al. 2024, table 3; config.json of meta-llama/Llama-3.2-1B, -3B, Llama-3.1-8B, -70B,
    # -405B
    "llama3-1b": ((128256, 16, 2048, 32, 8, 64, 8192, 131072), _LLAMA3_SMALL),
    "llama3-3b": ((128256, 28, 3072, 24, 8, 128, 8192, 131072), _LLAMA3_SMALL),
    "llama3-8b": ((128256, 32, 4096, 32, 8, 128, 14336, 131072), _LLAMA3),
    "llama3-70b": ((128256, 80, 8192, 64, 8, 128, 28672, 131072), _LLAMA3),
    "llama3-405b": ((128256, 126, 16384, 128, 8, 128, 53248, 131072), _LLAMA3),
    # Jiang et al. 2023, table 1; config.json of mistralai/Mistral-7B-v0.1
    "mistral-7b": ((32000, 32, 4096, 32, 8, 128, 14336, 32768), {"window": 4096}),
    # Abdin et al. 2024, section 2; config.json of microsoft/Phi-3-mini-4k-instruct
    "phi3-mini": ((32064, 32, 3072, 32, 32, 96, 8192, 4096), {"window": 2047}),
    # Yang et al. 2024, table 1; config.json of Qwen/Qwen2.5-0.5B, Qwen2.5-7B
    "qwen2.5-0.5b": ((151936, 24, 896, 14, 2, 64, 4864, 32768), {**_QWEN2, "tied": True}),
    "qwen2.5-7b": ((152064, 28, 3584, 28, 4, 128, 18944, 131072), _QWEN2),
    # Walsh et al. 2024, table 3; config.json of allenai/OLMo-2-0425-1B, OLMo-2-1124-7B
    "olmo2-1b": ((100352, 16, 2048, 16, 16, 128, 8192, 4096), _OLMO2),
    "olmo2-7b": ((100352, 32, 4096, 32, 32, 128, 11008, 4096), _OLMO2),
    # Kamath et al. 2025, section 2; config.json of google/gemma-3-270m, gemma-3-1b-pt
    "gemma3-270m": ((262144, 18, 640, 4, 1, 256, 2048, 32768), _GEMMA3),
    "gemma3-1b": ((262144, 26, 1152, 4, 1, 256, 6912, 32768), _GEMMA3),
    # Yang et al. 2025, table 1; config.json of Qwen/Qwen3-0.6B ... Qwen3-32B
    "qwen3-0.6b": ((151936, 28, 1024, 16, 8, 128, 3072, 40960), _QWEN3_SMALL),
    "qwen3-1.7b": ((151936, 28, 2048, 16, 8, 128, 6144, 40960), _QWEN3_SMALL),
    "qwen3-4b": ((151936, 36, 2560, 32, 8, 128, 9728, 40960), _QWEN3_SMALL),
    "qwen3-8b": ((151936, 36, 4096, 32, 8, 128, 12288, 40960), _QWEN3),
    "qwen3-14b": ((151936, 40, 5120, 40, 8, 128, 17408, 40960), _QWEN3),
    "qwen3-32b": ((151936, 64, 5120, 64, 8, 128, 25600, 40960), _QWEN3),
}

_MIXTRAL = ExpertShape(
    num_experts=8, top_k=2, ffn=14336, renormalizes=True, aux_loss=0.02, pools_layers=True
)
_QWEN3_MOE = ExpertShape(
    num_experts=128, top_k=8, ffn=768, renormalizes=True, aux_loss=0.001, pools_layers=True
)
_OLMOE = ExpertShape(
    num_experts=64, top_k=8, ffn=1024, aux_loss=0.01, pools_layers=True, z_loss=0.001
)
_DEEPSEEK3 = ExpertShape(
    num_experts=256, top_k=8, ffn=2048, first_dense=3, score="sigmoid", renormalizes=True,
    scaling=2.5, num_groups=8, top_groups=4, group_score="top2", has_bias=True, bias_rate=0.001,
    shared_ffn=2048,
)  # fmt: skip
_LATENT = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)

# With experts, the column ffn is the inner size of the MLP of the first blocks, as in config.json;
# it counts only in blocks without experts.
_WITH_EXPERTS: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    # Jiang et al. 2024, table 1 and section 2; config.json of mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": (
        (32000, 32, 4096, 32, 8, 128, 14336, 32768),
        {"rope_theta": 1_000_000.0, "experts": _MIXTRAL},
    ),
    # Muennighoff et al. 2024, table 10; config.json of allenai/OLMoE-1B-7B-0924
    "olmoe-1b-7b": (
        (50304, 16, 2048, 16, 16, 128, 1024, 4096),
        {"qk_norm": "projection", "experts": _OLMOE},
    ),
    # Yang et al. 2025, table 2; config.json of Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B
    "qwen3-30b-a3b": (
        (151936, 48, 2048, 32, 4, 128, 6144, 40960),
        {**_QWEN3, "experts": _QWEN3_MOE},
    ),
    "qwen3-235b-a22b": (
        (151936, 94, 4096, 64, 4, 128, 12288, 40960),
        {**_QWEN3, "experts": replace(_QWEN3_MOE, ffn=1536)},
    ),
    # DeepSeek-AI 2024, section 4.2, and config.json of deepseek-ai/DeepSeek-V3: as in its
    # pre-training, with rows of 4,096; without the module that predicts a second token
    "deepseek-v3-671b": (
        (129280, 61, 7168, 128, 128, 192, 18432, 4096),
        {"norm_eps": 1e-6, "experts": _DEEPSEEK3, "latent": _LATENT},
    ),
}

PRESETS: Final = {
    name: ModelShape(**dict(zip(SIZES, sizes, strict=True)), **choices)
    for name, (sizes, choices) in (_TABLE | _WITH_EXPERTS).items()
}


def shape_of(name: str) -> ModelShape:
    """Return the shape of the preset `name`.

    Raises:
        ConfigError: there is no preset with that name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"model: there is no preset {name!r}{nearest(name, PRESETS)}; "
            f"the presets are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def with_sizes(shape: ModelShape, sizes: ShapeConfig) -> ModelShape:
    """Return `shape` with the sizes that are set in `sizes`; other sizes are unchanged.

    Two sizes are derived if they are not set: `head_dim` becomes hidden / num_heads if either is
    set. If num_heads is set, `num_kv_heads` stays equal to num_heads if it was; otherwise it
    becomes the largest divisor of num_heads up to its old value.

    Entries of `experts` replace entries of the shape's experts.

    Raises:
        NotDivisible: hidden / num_heads is not an integer.
        ConfigError: the sizes are not a valid model shape.
    """
    values: dict[str, Any] = {n: value for n, value in asdict(sizes).items() if value is not None}
    if sizes.experts is not None:
        values["experts"] = ExpertShape.parse(sizes.experts, shape.experts)
    hidden = int(values.get("hidden", shape.hidden))
    num_heads = int(values.get("num_heads", shape.num_heads))
    is_legal = hidden > 0 and num_heads > 0  # else ModelShape raises an error that names the size
    if "head_dim" not in values and ("hidden" in values or "num_heads" in values):
        if is_legal and hidden % num_heads:
            raise NotDivisible("model shape: hidden", hidden, num_heads)
        values["head_dim"] = hidden // num_heads if is_legal else 1
    if "num_heads" in values and "num_kv_heads" not in values:
        most = num_heads if shape.num_kv_heads == shape.num_heads else shape.num_kv_heads
        numbers = range(min(most, num_heads), 0, -1)
        values["num_kv_heads"] = next((n for n in numbers if num_heads % n == 0), num_heads)
    return replace(shape, **values)
