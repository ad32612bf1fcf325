"""The shape of a decoder: every number that fixes its parameters and its arithmetic. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from phalanx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and choices of one decoder-only transformer.

    The Llama family is norm="rms", position="rope", mlp="swiglu", bias=False; the GPT-2 family is
    norm="layer", position="learned", mlp="gelu", bias=True.
    """

    vocab_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    max_seq_len: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, int] | None = None
    """Llama 3.1's frequency scaling: factor, low_freq_factor, high_freq_factor, original length."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys (Qwen3)."""
    tied: bool = False
    """The output projection is the embedding."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int" and (size := getattr(self, field.name)) < 1:
                raise ConfigError(f"model shape: {field.name} is {size}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model shape: num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(
                f"model shape: head_dim is {self.head_dim}; rotary embedding needs an even number, "
                f"{self.head_dim + 1} is the nearest"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model shape: dropout is {self.dropout}; it must be in [0, 1)")
