"""Sizes of the matrices of a decoder's blocks, from which parameters and FLOPs are counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.models.shape import ModelShape


class BlockWeights(NamedTuple):
    """Elements of the matrices of one block.

    Attributes:
        attention: projections of queries, keys, values and output.
        mlp: feed-forward matrices; in a block with experts, router and shared expert.
        experts: all experts that the router selects from.
        idle: part of `experts` that a token does not visit.
    """

    attention: int
    mlp: int
    experts: int = 0
    idle: int = 0

    @property
    def active(self) -> int:
        """Elements that multiply each token."""
        return self.attention + self.mlp + self.experts - self.idle


def block_weights(shape: ModelShape, *, has_experts: bool) -> BlockWeights:
    """Count the matrices of a block with experts, or of one with an MLP."""
    hidden, num_heads = shape.hidden, shape.num_heads
    if (latent := shape.latent) is None:
        attention = 2 * hidden * (num_heads + shape.num_kv_heads) * shape.head_dim
    else:
        # DeepSeek-V2, section 2.1. The part of the key with position comes from x directly:
        #
        #     x -> [query_rank] -> heads x (plain_dim + rope_dim)         queries
        #     x -> [kv_rank]    -> heads x (plain_dim + value_dim)        keys, values
        #     x -> [rope_dim]                                             all heads' keys
        #     heads x value_dim -> x                                      output
        rank = latent.query_rank
        attention = num_heads * (latent.plain_dim + latent.rope_dim) * (rank or hidden)
        attention += hidden * ((rank or 0) + latent.kv_rank + latent.rope_dim)
        attention += latent.kv_rank * num_heads * (latent.plain_dim + latent.value_dim)
        attention += num_heads * latent.value_dim * hidden
    num_maps = 2 if shape.mlp == "gelu" else 3  # up and down, or gate too
    if not has_experts:
        return BlockWeights(attention, num_maps * hidden * shape.ffn)
    assert shape.experts is not None
    of, expert = shape.experts, num_maps * hidden * shape.experts.ffn
    shared = num_maps * of.shared_ffn + of.has_shared_gate
    return BlockWeights(
        attention,
        hidden * (of.num_experts + shared),
        of.num_experts * expert,
        (of.num_experts - of.top_k) * expert,
    )


def pair_width(shape: ModelShape) -> int:
    """Return the features of a head that a pair of positions multiplies: a key's and a value's."""
    if (latent := shape.latent) is None:
        return 2 * shape.head_dim
    return latent.plain_dim + latent.rope_dim + latent.value_dim


def hidden_matrices(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the matrices of blocks of a decoder, which Muon updates, by `ndim`.

    The others are embedding, head, norms, biases, routers, and gates of one row.
    """
    return [
        name
        for name, parameter in parameters.items()
        if name.startswith("blocks.")
        and parameter.ndim >= 2
        and not name.endswith((".router.weight", ".shared_gate.weight"))
    ]


def newton_schulz_flops(shape: Sequence[int], num_steps: int = 5) -> float:
    """Return the FLOPs of Muon's iteration on a matrix, or on each of a stack, of `shape`."""
    narrow, wide = sorted(shape[-2:])
    # Per step x x^T, its square, and the product with x.
    per_step = 2 * narrow * narrow * wide + 2 * narrow**3 + 2 * narrow * narrow * wide
    return float(num_steps * per_step * math.prod(shape[:-2]))
