"""Closed forms for the number of parameters of a decoder, for checks before torch is imported.

A model with experts has two numbers. `total` is what a cluster stores and updates; `active` is what
one token meets: all but the experts that its router does not select. Papers name both, such as
"30B-A3B"; memory follows the first and FLOPs follow the second.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.models.block_weights import block_weights
from phalanx.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters of a decoder, by part, each summed over all layers."""

    embedding: int
    """Token embedding; also the output projection if the two are tied."""
    position: int
    """Learned position embedding; 0 with rotary embedding."""
    attention: int
    """Projections of queries, keys, values and output, with their biases."""
    mlp: int
    """Feed-forward matrices, with their biases; routers and shared experts too, not `experts`."""
    experts: int
    """All experts that a router selects from."""
    idle: int
    """Part of `experts`: those that a token does not visit."""
    norm: int
    """All norms: two or four per layer, the last norm, and the norms of queries and keys."""
    output: int
    """Output projection; 0 if tied."""
    adapters: int
    """Adapters of linear maps; with them, all other parameters are frozen."""
    matmul: int
    """Weights that multiply each token: projections, feed-forward and output (tied or not); of
    experts, those that it visits."""

    @property
    def total(self) -> int:
        """Number of distinct parameters; a tied matrix counts once."""
        parts = self.embedding, self.position, self.attention, self.mlp, self.norm, self.output
        return sum(parts) + self.experts + self.adapters

    @property
    def active(self) -> int:
        """Number of distinct parameters less the experts that a token does not visit."""
        return self.total - self.idle

    @property
    def trained(self) -> int:
        """Number of distinct parameters that are trained."""
        return self.adapters or self.total


class BlockKind(NamedTuple):
    """What a block's operations depend on: blocks of one kind are counted once.

    Attributes:
        window: number of positions that a query attends to; None for all.
        has_experts: whether a router and experts are in place of the MLP.
    """

    window: int | None
    has_experts: bool


def block_kinds(shape: ModelShape) -> list[BlockKind]:
    """Return the kind of each block."""
    blocks = range(shape.num_layers)
    return [BlockKind(shape.window_of(at), shape.experts_of(at) is not None) for at in blocks]


class BlockParameters(NamedTuple):
    """Parameters of one block, by part as in `Parameters`; `active` multiply each token."""

    attention: int
    mlp: int
    experts: int
    idle: int
    norm: int
    adapters: int
    active: int

    @property
    def total(self) -> int:
        """Number of parameters of the block."""
        return self.attention + self.mlp + self.experts + self.norm + self.adapters


@functools.lru_cache(maxsize=256)
def block_parameters(shape: ModelShape, *, has_experts: bool) -> BlockParameters:
    """Count the parameters of a block with experts, or of one with an MLP."""
    hidden = shape.hidden
    query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = block_weights(shape, has_experts=has_experts)
    attention_biases = query_width + 2 * kv_width if shape.has_bias("qkv") else 0
    attention_biases += hidden if shape.has_bias("other") else 0
    num_mlp_inputs = 1 if shape.mlp == "gelu" else 2  # up alone, or gate and up
    has_biases = shape.has_bias("other") and not has_experts
    mlp_biases = num_mlp_inputs * shape.ffn + hidden if has_biases else 0
    num_norm_vectors = 2 if shape.norm == "layer" else 1  # weight and bias, or weight alone
    query_key_width = {False: 0, True: 2 * shape.head_dim, "projection": query_width + kv_width}
    norm_width = query_key_width[shape.qk_norm]
    if (latent := shape.latent) is not None:
        norm_width = latent.kv_rank + (latent.query_rank or 0)
    norm_width += (4 if shape.norm_at == "both" else 2) * hidden
    outputs = {"q": query_width, "k": kv_width, "v": kv_width, "gate": shape.ffn, "up": shape.ffn}
    inputs = {"output": query_width, "down": shape.ffn}
    adapters = 0
    if (lora := shape.lora) is not None:
        for linear in (target.rpartition(".")[2] for target in lora.targets):
            num_in, num_out = inputs.get(linear, hidden), outputs.get(linear, hidden)
            adapters += lora.rank * (num_in + num_out)
    return BlockParameters(
        attention=weights.attention + attention_biases,
        mlp=weights.mlp + mlp_biases,
        experts=weights.experts,
        idle=weights.idle,
        norm=num_norm_vectors * norm_width,
        adapters=adapters,
        active=weights.active,
    )


def num_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a decoder of this shape."""
    times = Counter(kind.has_experts for kind in block_kinds(shape))
    blocks = [block_parameters(shape, has_experts=each) for each in times]
    attention, mlp, experts, idle, norm, adapters, active = (
        sum(num * part for num, part in zip(times.values(), parts, strict=True))
        for parts in zip(*blocks, strict=True)
    )
    vocabulary = shape.vocab_size * shape.hidden
    return Parameters(
        embedding=vocabulary,
        position=shape.max_seq_len * shape.hidden if shape.position == "learned" else 0,
        attention=attention,
        mlp=mlp,
        experts=experts,
        idle=idle,
        norm=norm + _last_norm(shape),
        output=0 if shape.tied else vocabulary,
        adapters=adapters,
        matmul=active + vocabulary,
    )


def _last_norm(shape: ModelShape) -> int:
    return shape.hidden * (2 if shape.norm == "layer" else 1)


class StageParameters(NamedTuple):
    """Parameters of pipeline stages: all, those trained, and the routed experts among both."""

    total: int
    trained: int
    experts: int


def parameters_of(
    shape: ModelShape, cut: Sequence[range] | None, stages: Sequence[int]
) -> StageParameters:
    """Return the number of parameters of `stages` of a cut.

    tp, ep and fsdp then shard them. Without a cut they are the parameters of the model.
    """
    count, num_layers = num_parameters(shape), shape.num_layers
    if cut is None:
        return StageParameters(count.total, count.trained, count.experts)
    with_experts = [kind.has_experts for kind in block_kinds(shape)]
    of = {each: block_parameters(shape, has_experts=each) for each in dict.fromkeys(with_experts)}
    blocks = [of[each] for each in with_experts]
    first = count.embedding + count.position
    last = _last_norm(shape) + (count.embedding if shape.tied else count.output)
    links = [link for stage in stages for link in cut[stage]]
    own = [blocks[link - 1] for link in links if 0 < link <= num_layers]
    total = sum(block.total for block in own)
    total += first * (0 in links) + last * (num_layers + 1 in links)
    total -= count.embedding if shape.tied and {0, num_layers + 1} <= {*links} else 0
    trained = total if shape.lora is None else sum(block.adapters for block in own)
    return StageParameters(total, trained, sum(block.experts for block in own))
