"""The shape of a decoder: all sizes and choices of its parameters and arithmetic, without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Literal

from phalanx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and choices of one decoder-only transformer.

    The defaults are Llama's. GPT-2 has norm="layer", position="learned", mlp="gelu" and
    bias=True. Choices are independent; models/registry.py lists the choices of each model family.
    """

    vocab_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    max_seq_len: int
    norm: Literal["rms", "rms+1", "layer"] = "rms"
    """RMSNorm, RMSNorm that stores weight - 1, or LayerNorm."""
    norm_eps: float = 1e-5
    norm_at: Literal["input", "output", "both"] = "input"
    """Placement of the norms of a branch: at its input, at its output, or both."""
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, int] | None = None
    """Llama 3.1's frequency scaling: factor, low_freq_factor, high_freq_factor, original length."""
    window: int | None = None
    """Number of positions that a query attends to, its own the last; all up to its own if None."""
    full_every: int | None = None
    """Every `full_every`-th block has no window; if None, all blocks have `window`."""
    window_theta: float | None = None
    """rope_theta of blocks with a window, without rope_scaling; if None, as in other blocks."""
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    bias: Literal[False, True, "qkv"] = False
    """Which linear maps have biases: none, all, or the query, key and value projections."""
    qk_norm: Literal[False, True, "projection"] = False
    """Whether queries and keys are normalized: no, within each head, or over all heads together."""
    tied: bool = False
    """Whether the output projection uses the embedding's weight."""
    scaled_embedding: bool = False
    """Whether embedding vectors are multiplied by sqrt(hidden)."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.type in ("int", "int | None") and size is not None and size < 1:
                raise ConfigError(f"model shape: {field.name} is {size}; it must be at least 1")
        for name in ("norm_eps", "rope_theta", "window_theta"):
            number = getattr(self, name)
            if number is not None and not 0.0 < number <= sys.float_info.max:
                raise ConfigError(f"model shape: {name} is {number}; it must be above 0 and finite")
        for name in ("full_every", "window_theta"):
            if self.window is None and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"model shape: {name} is {value}, but window is None; {name} needs a window"
                )
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

    def window_of(self, block: int) -> int | None:
        """Return the window of block number `block`; None if it has no window."""
        is_full = self.full_every is not None and (block + 1) % self.full_every == 0
        return None if is_full else self.window

    def has_bias(self, linear: Literal["qkv", "other"]) -> bool:
        """Return whether linear maps of a kind have biases: the q, k and v maps, or the others."""
        return self.bias is True or self.bias == linear


def causal_pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs in a row; a query has at most `window` keys."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + near * (length - near)
