"""Model shapes by name, each by its published configuration."""

from __future__ import annotations

from dataclasses import asdict, replace

from phalanx.config import ShapeConfig
from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.models.shape import ModelShape

# Radford et al. 2019, table 2; config.json of openai-community/gpt2. Its dropout is left to
# `shape.dropout`.
_GPT2 = ModelShape(
    vocab_size=50257,
    num_layers=12,
    hidden=768,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    ffn=3072,
    max_seq_len=1024,
    norm="layer",
    position="learned",
    mlp="gelu",
    bias=True,
    tied=True,
)

# Dubey et al. 2024, table 3; config.json of meta-llama/Llama-3.1-8B.
_LLAMA3 = ModelShape(
    vocab_size=128256,
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=14336,
    max_seq_len=131072,
    rope_theta=500_000.0,
    rope_scaling=(8.0, 1.0, 4.0, 8192),
)
_LLAMA3_SMALL = replace(_LLAMA3, rope_scaling=(32.0, 1.0, 4.0, 8192), tied=True)

# Yang et al. 2025, table 1; config.json of Qwen/Qwen3-8B.
_QWEN3 = ModelShape(
    vocab_size=151936,
    num_layers=36,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=12288,
    max_seq_len=40960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)
_QWEN3_SMALL = replace(_QWEN3, tied=True)

# Qwen2.5: Yang et al. 2024, table 1; config.json of Qwen/Qwen2.5-7B.
_QWEN2 = ModelShape(
    vocab_size=152064,
    num_layers=28,
    hidden=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    ffn=18944,
    max_seq_len=131072,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    bias="qkv",
)

# OLMo 2: Walsh et al. 2024, table 3; config.json of allenai/OLMo-2-1124-7B.
_OLMO2 = ModelShape(
    vocab_size=100352,
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    ffn=11008,
    max_seq_len=4096,
    norm_eps=1e-6,
    norm_at="output",
    rope_theta=500_000.0,
    qk_norm="projection",
)

# Gemma 3: Kamath et al. 2025, section 2; config.json of google/gemma-3-1b-pt.
_GEMMA3 = ModelShape(
    vocab_size=262144,
    num_layers=26,
    hidden=1152,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    ffn=6912,
    max_seq_len=32768,
    norm="rms+1",
    norm_eps=1e-6,
    norm_at="both",
    rope_theta=1_000_000.0,
    window=512,
    full_every=6,
    window_theta=10_000.0,
    mlp="geglu",
    qk_norm=True,
    tied=True,
    scaled_embedding=True,
)

PRESETS: dict[str, ModelShape] = {
    # Ours: learns from text on two CPU cores within minutes. Over the first million tokens few wide
    # blocks end lower, and sooner, than more narrow ones of as many parameters:
    # see docs/decisions.md.
    "demo": ModelShape(
        vocab_size=4096,
        num_layers=3,
        hidden=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        ffn=1408,
        max_seq_len=1024,
        tied=True,
    ),
    # openai-community/gpt2, -medium, -large, -xl
    "gpt2-124m": _GPT2,
    "gpt2-355m": replace(
        _GPT2, num_layers=24, hidden=1024, num_heads=16, num_kv_heads=16, ffn=4096
    ),
    "gpt2-774m": replace(
        _GPT2, num_layers=36, hidden=1280, num_heads=20, num_kv_heads=20, ffn=5120
    ),
    "gpt2-1.5b": replace(
        _GPT2, num_layers=48, hidden=1600, num_heads=25, num_kv_heads=25, ffn=6400
    ),
    # Touvron et al. 2023b; config.json of meta-llama/Llama-2-7b-hf
    "llama2-7b": ModelShape(
        vocab_size=32000,
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn=11008,
        max_seq_len=4096,
    ),
    # meta-llama/Llama-3.2-1B, Llama-3.2-3B
    "llama3-1b": replace(
        _LLAMA3_SMALL, num_layers=16, hidden=2048, num_heads=32, head_dim=64, ffn=8192
    ),
    "llama3-3b": replace(_LLAMA3_SMALL, num_layers=28, hidden=3072, num_heads=24, ffn=8192),
    # meta-llama/Llama-3.1-8B, Llama-3.1-70B, Llama-3.1-405B
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, num_layers=80, hidden=8192, num_heads=64, ffn=28672),
    "llama3-405b": replace(_LLAMA3, num_layers=126, hidden=16384, num_heads=128, ffn=53248),
    # Jiang et al. 2023, table 1; config.json of mistralai/Mistral-7B-v0.1
    "mistral-7b": ModelShape(
        vocab_size=32000,
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn=14336,
        max_seq_len=32768,
        window=4096,
    ),
    # Abdin et al. 2024, section 2; config.json of microsoft/Phi-3-mini-4k-instruct
    "phi3-mini": ModelShape(
        vocab_size=32064,
        num_layers=32,
        hidden=3072,
        num_heads=32,
        num_kv_heads=32,
        head_dim=96,
        ffn=8192,
        max_seq_len=4096,
        window=2047,
    ),
    # Qwen/Qwen2.5-0.5B, Qwen2.5-7B
    "qwen2.5-0.5b": replace(
        _QWEN2,
        vocab_size=151936,
        num_layers=24,
        hidden=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        ffn=4864,
        max_seq_len=32768,
        tied=True,
    ),
    "qwen2.5-7b": _QWEN2,
    # allenai/OLMo-2-0425-1B, OLMo-2-1124-7B
    "olmo2-1b": replace(
        _OLMO2, num_layers=16, hidden=2048, num_heads=16, num_kv_heads=16, ffn=8192
    ),
    "olmo2-7b": _OLMO2,
    # google/gemma-3-270m, gemma-3-1b-pt
    "gemma3-270m": replace(_GEMMA3, num_layers=18, hidden=640, ffn=2048),
    "gemma3-1b": _GEMMA3,
    # Qwen/Qwen3-0.6B ... Qwen3-32B
    "qwen3-0.6b": replace(_QWEN3_SMALL, num_layers=28, hidden=1024, num_heads=16, ffn=3072),
    "qwen3-1.7b": replace(_QWEN3_SMALL, num_layers=28, hidden=2048, num_heads=16, ffn=6144),
    "qwen3-4b": replace(_QWEN3_SMALL, num_layers=36, hidden=2560, num_heads=32, ffn=9728),
    "qwen3-8b": _QWEN3,
    "qwen3-14b": replace(_QWEN3, num_layers=40, hidden=5120, num_heads=40, ffn=17408),
    "qwen3-32b": replace(_QWEN3, num_layers=64, hidden=5120, num_heads=64, ffn=25600),
}


def shape_of(name: str) -> ModelShape:
    """Return the shape of a preset.

    Raises:
        ConfigError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"model: there is no preset '{name}'{nearest(name, PRESETS)}; "
            f"known are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def with_sizes(shape: ModelShape, sizes: ShapeConfig) -> ModelShape:
    """Return `shape` with the sizes that are set in `sizes`; the others stay.

    Two sizes follow others where they are not given themselves:
    `head_dim` becomes hidden / num_heads once one of those two is given, and `num_kv_heads` follows
    `num_heads`: still one for each query head, or else the same number or the nearest below it that
    divides num_heads.

    Raises:
        NotDivisible: hidden / num_heads is not whole.
        ConfigError: the sizes do not make a model.
    """
    given: dict[str, int | float | bool] = {
        name: value for name, value in asdict(sizes).items() if value is not None
    }
    hidden = given.get("hidden", shape.hidden)
    num_heads = given.get("num_heads", shape.num_heads)
    if "head_dim" not in given and ("hidden" in given or "num_heads" in given):
        given["head_dim"] = _head_dim(int(hidden), int(num_heads))
    if "num_heads" in given and "num_kv_heads" not in given:
        given["num_kv_heads"] = _num_kv_heads(shape, int(num_heads))
    return replace(shape, **given)


def _head_dim(hidden: int, num_heads: int) -> int:
    if hidden < 1 or num_heads < 1:  # ModelShape says which, and what is legal
        return 1
    if hidden % num_heads:
        raise NotDivisible("model shape: hidden", hidden, num_heads)
    return hidden // num_heads


def _num_kv_heads(shape: ModelShape, num_heads: int) -> int:
    if shape.num_kv_heads == shape.num_heads or num_heads < 1:
        return num_heads
    highest = min(shape.num_kv_heads, num_heads)
    return next(number for number in range(highest, 0, -1) if num_heads % number == 0)
