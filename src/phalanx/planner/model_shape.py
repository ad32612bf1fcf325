"""Parameters and FLOPs of a decoder, counted once for the whole project. No torch.

[Note: How FLOPs are counted]
- One multiply-add is 2 FLOPs. Only matrix products count: norms, activations, biases, rotary
  embedding, softmax, the loss and the optimizer do not (PaLM, arXiv 2204.02311, appendix B).
- The embedding is a look-up: 0. The output projection is a product, tied or not.
- A linear layer costs 2 x (weights of its matrix) a token forward. Tokens are all positions of the
  batch, padding included: the hardware multiplies those too.
- Attention multiplies queries with keys and probabilities with values: 4 x head_dim a head and pair
  of positions, forward. `full` counts all T x T pairs of a sequence, as PaLM does and as an
  unmasked product executes; `causal` counts the pairs that a token may look at, T (T + 1) / 2 or
  fewer in a block with a window, which is what a fused kernel that skips what is masked executes.
  Document masks are not subtracted.
- Grouped-query attention shares keys and values, not products: query heads count.
- Backward is exactly twice forward: one product for the inputs, one for the weights (or, in
  attention, for each operand). The first layer is no exception, its input is a trained embedding.
- Model FLOPs = forward + backward: what the mathematics asks for. Hardware FLOPs add what is
  recomputed in backward instead of kept (Megatron, arXiv 2104.04473, section 5.1 and appendix).
  The scores that a fused attention kernel recomputes inside its own backward are in neither.
- A segment of blocks that is recomputed is run again up to the last tensor that its backward
  needs. That is the input of its last product, the one that leaves the MLP: this product is not
  run again, and not counted. With dropout it is, since the mask drawn after it is needed, and with
  a norm after it, which reads it.
  Selective recomputation keeps the results of all products and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from phalanx.errors import ConfigError
from phalanx.models.shape import ModelShape, causal_pairs
from phalanx.strategy import Recompute

Attention = Literal["causal", "full"]

KEEP_ALL: Final = Recompute()
"""Nothing is recomputed."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters of a decoder, by part; each part is a sum over all layers."""

    embedding: int
    """Token embedding; it is the output projection too if that is tied."""
    position: int
    """Learned position embedding; 0 with rotary embedding."""
    attention: int
    """Projections of queries, keys, values and output, with their biases."""
    mlp: int
    """Feed-forward matrices, with their biases."""
    norm: int
    """Every norm: two or four a layer, the last one, and those of queries and keys."""
    output: int
    """Output projection of its own; 0 if tied."""
    matmul: int
    """Weights that multiply each token: projections, feed-forward and output (tied or not)."""

    @property
    def total(self) -> int:
        """Parameters that exist; a tied matrix counts once."""
        return self.embedding + self.position + self.attention + self.mlp + self.norm + self.output


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one step, by [Note: How FLOPs are counted]."""

    linear_forward: int
    """Products with weights, output projection included, forward."""
    attention_forward: int
    """Products of queries, keys, probabilities and values, forward."""
    recompute: int = 0
    """Forward products executed a second time during backward."""

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return self.linear_forward + self.attention_forward

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass, without what is recomputed."""
        return 2 * self.forward

    @property
    def model(self) -> int:
        """FLOPs that the mathematics asks for: forward + backward. MFU divides these by time."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """FLOPs executed: model FLOPs + recompute. HFU divides these by time."""
        return self.model + self.recompute


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

    return Parameters(
        embedding=vocabulary,
        position=shape.max_seq_len * shape.hidden if shape.position == "learned" else 0,
        attention=shape.num_layers * (attention_weights + attention_biases),
        mlp=shape.num_layers * (mlp_weights + mlp_biases),
        norm=shape.num_layers * (num_norms * norm_width + query_key_norms) + norm_width,
        output=0 if shape.tied else vocabulary,
        matmul=shape.num_layers * (attention_weights + mlp_weights) + vocabulary,
    )


def step_flops(
    shape: ModelShape,
    seq_len: int,
    num_sequences: int,
    attention: Attention = "causal",
    recompute: Recompute = KEEP_ALL,
) -> Flops:
    """Count the FLOPs of one training step over the whole batch.

    That is `num_sequences` of `seq_len` tokens over all devices. Which pairs of positions
    `attention` counts says [Note: How FLOPs are counted].

    Raises:
        ConfigError: a size below 1.
        StrategyError: segments of more blocks than there are.
    """
    if seq_len < 1 or num_sequences < 0:
        raise ConfigError(
            f"FLOPs of a step: seq_len is {seq_len} and num_sequences {num_sequences}; they must "
            "be at least 1 and 0"
        )
    num_tokens = seq_len * num_sequences
    num_pairs = num_sequences * sum(
        attention_pairs(seq_len, attention, shape.window_of(block))
        for block in range(shape.num_layers)
    )
    output_weights = shape.vocab_size * shape.hidden
    block_weights = (num_parameters(shape).matmul - output_weights) // shape.num_layers

    block_linear = 2 * block_weights * num_tokens
    all_attention = 4 * num_pairs * shape.num_heads * shape.head_dim
    segment_size = recompute.segment_size(shape.num_layers)
    recomputed = 0
    if segment_size is not None:
        recomputed = shape.num_layers * block_linear + all_attention
        if shape.dropout == 0.0 and shape.norm_at == "input":
            num_segments = -(-shape.num_layers // segment_size)
            recomputed -= num_segments * 2 * shape.ffn * shape.hidden * num_tokens
    return Flops(
        linear_forward=shape.num_layers * block_linear + 2 * output_weights * num_tokens,
        attention_forward=all_attention,
        recompute=recomputed,
    )


def attention_pairs(seq_len: int, attention: Attention, window: int | None = None) -> int:
    """Count the (query, key) pairs of one sequence: T x T, or those of `causal_pairs`."""
    return seq_len * seq_len if attention == "full" else causal_pairs(seq_len, window)
