"""Closed forms for the number of parameters of a decoder, for checks before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Feed-forward matrices, with their biases."""
    norm: int
    """All norms: two or four per layer, the last norm, and the norms of queries and keys."""
    output: int
    """Output projection; 0 if tied."""
    adapters: int
    """Adapters of linear maps; with them, all other parameters are frozen."""
    matmul: int
    """Weights that multiply each token: projections, feed-forward and output (tied or not)."""

    @property
    def total(self) -> int:
        """Number of distinct parameters; a tied matrix counts once."""
        parts = self.embedding, self.position, self.attention, self.mlp, self.norm, self.output
        return sum(parts) + self.adapters

    @property
    def trained(self) -> int:
        """Number of distinct parameters that are trained."""
        return self.adapters or self.total


def num_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a decoder of this shape."""
    query_width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    num_mlp_inputs = 1 if shape.mlp == "gelu" else 2  # up alone, or gate and up

    attention_weights = shape.hidden * (2 * query_width + 2 * kv_width)
    attention_biases = query_width + 2 * kv_width if shape.has_bias("qkv") else 0
    attention_biases += shape.hidden if shape.has_bias("other") else 0
    mlp_weights = (num_mlp_inputs + 1) * shape.hidden * shape.ffn
    mlp_biases = num_mlp_inputs * shape.ffn + shape.hidden if shape.has_bias("other") else 0
    num_norm_vectors = 2 if shape.norm == "layer" else 1  # weight and bias, or weight alone
    norm_width = num_norm_vectors * shape.hidden
    query_key_width = {False: 0, True: 2 * shape.head_dim, "projection": query_width + kv_width}
    query_key_norms = num_norm_vectors * query_key_width[shape.qk_norm]
    num_norms = 4 if shape.norm_at == "both" else 2
    vocabulary = shape.vocab_size * shape.hidden
    outputs = {"q": query_width, "k": kv_width, "v": kv_width, "gate": shape.ffn, "up": shape.ffn}
    inputs = {"output": query_width, "down": shape.ffn}
    adapters = 0
    if (lora := shape.lora) is not None:
        for linear in (target.rpartition(".")[2] for target in lora.targets):
            num_in, num_out = inputs.get(linear, shape.hidden), outputs.get(linear, shape.hidden)
            adapters += lora.rank * (num_in + num_out)

    return Parameters(
        embedding=vocabulary,
        position=shape.max_seq_len * shape.hidden if shape.position == "learned" else 0,
        attention=shape.num_layers * (attention_weights + attention_biases),
        mlp=shape.num_layers * (mlp_weights + mlp_biases),
        norm=shape.num_layers * (num_norms * norm_width + query_key_norms) + norm_width,
        output=0 if shape.tied else vocabulary,
        adapters=shape.num_layers * adapters,
        matmul=shape.num_layers * (attention_weights + mlp_weights) + vocabulary,
    )


def parameters_of(
    shape: ModelShape, cut: Sequence[range] | None, stages: Sequence[int]
) -> tuple[int, int]:
    """Return the number of parameters of `stages` of a cut, and of those trained.

    tp and fsdp then shard them. Without a cut they are the parameters of the model.
    """
    count, num_layers = num_parameters(shape), shape.num_layers
    if cut is None:
        return count.total, count.trained
    last_norm = shape.hidden * (2 if shape.norm == "layer" else 1)
    blocks = count.attention + count.mlp + count.norm - last_norm + count.adapters
    block = blocks // num_layers
    first = count.embedding + count.position
    last = last_norm + (count.embedding if shape.tied else count.output)
    sizes = [first, *[block] * num_layers, last]
    links = [link for stage in stages for link in cut[stage]]
    has_both = 0 in links and num_layers + 1 in links
    total = sum(sizes[link] for link in links)
    total -= count.embedding if shape.tied and has_both else 0
    num_blocks = sum(0 < link <= num_layers for link in links)
    return total, total if shape.lora is None else count.adapters // num_layers * num_blocks
