"""Model shapes by name, each by its published configuration."""

from __future__ import annotations

import dataclasses

from phalanx.config import ShapeConfig
from phalanx.errors import ConfigError, NotDivisible, nearest
from phalanx.models.shape import ModelShape


def _gpt2(num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    """Make a GPT-2 (Radford et al. 2019, table 2); dropout is left to `shape.dropout`."""
    return ModelShape(
        vocab_size=50257,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=64,
        ffn=4 * hidden,
        max_seq_len=1024,
        norm="layer",
        position="learned",
        mlp="gelu",
        bias=True,
        tied=True,
    )


def _llama3(
    num_layers: int,
    hidden: int,
    num_heads: int,
    ffn: int,
    *,
    head_dim: int = 128,
    rope_factor: float = 8.0,
    tied: bool = False,
) -> ModelShape:
    """Make a Llama 3.1 or 3.2 (Dubey et al. 2024, table 3; config.json of meta-llama/Llama-3.x)."""
    return ModelShape(
        vocab_size=128256,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn=ffn,
        max_seq_len=131072,
        rope_theta=500_000.0,
        rope_scaling=(rope_factor, 1.0, 4.0, 8192),
        tied=tied,
    )


def _qwen3(num_layers: int, hidden: int, num_heads: int, ffn: int, *, tied: bool) -> ModelShape:
    """Make a Qwen3 (Yang et al. 2025, table 1; config.json of Qwen/Qwen3-*)."""
    return ModelShape(
        vocab_size=151936,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        ffn=ffn,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
        tied=tied,
    )


PRESETS: dict[str, ModelShape] = {
    # Ours: learns from text on two CPU cores within minutes. Over the first million tokens few wide
    # blocks end lower, and sooner, than more narrow ones of as many parameters: see docs/log.md.
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
    # config.json of openai-community/gpt2, -medium, -large, -xl
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
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
    "llama3-1b": _llama3(16, 2048, 32, 8192, head_dim=64, rope_factor=32.0, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, rope_factor=32.0, tied=True),
    # meta-llama/Llama-3.1-8B, Llama-3.1-70B, Llama-3.1-405B
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    # Qwen/Qwen3-0.6B ... Qwen3-32B
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
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
        name: value for name, value in dataclasses.asdict(sizes).items() if value is not None
    }
    hidden = given.get("hidden", shape.hidden)
    num_heads = given.get("num_heads", shape.num_heads)
    if "head_dim" not in given and ("hidden" in given or "num_heads" in given):
        given["head_dim"] = _head_dim(int(hidden), int(num_heads))
    if "num_heads" in given and "num_kv_heads" not in given:
        given["num_kv_heads"] = _num_kv_heads(shape, int(num_heads))
    return dataclasses.replace(shape, **given)


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
