"""FLOPs of one training step of a decoder: a count of matrix products, and attention by pairs.

[Note: How FLOPs are counted]
- One multiply-add is 2 FLOPs. Only matrix products count: norms, activations, biases, rotary
  embedding, softmax, the loss and the optimizer do not (PaLM, arXiv 2204.02311, appendix B).
- The embedding is a look-up: 0. The output projection is a product, tied or not.
- Of experts, those that a token visits count: the router's product, `top_k` experts and the shared
  expert. So FLOPs follow the active parameters, and MFU and HFU of such a model are by them
  (DeepSeek-AI, DeepSeek-V3, 2024, section 4.2, counts so). Every selection counts, one that a
  capacity drops too. Sorting rows by expert and summing them are no products.
- A linear layer costs 2 x (weights of its matrix) a token forward. Tokens are all positions of the
  batch, padding included, because the hardware multiplies padding too.
- Attention multiplies queries with keys and probabilities with values: 4 x head_dim for each head
  and pair of positions, forward. In latent attention queries are wider than values: it is
  2 x (plain_dim + rope_dim + value_dim), and projections down and up are linear layers. `full`
  counts all T x T pairs of a sequence, as PaLM does and as an unmasked product executes. `causal`
  counts the pairs that the causal mask allows, T (T + 1) / 2 or fewer in a block with a window, as
  a fused kernel that skips masked pairs executes. Document masks are not subtracted.
- Grouped-query attention shares keys and values, not products: query heads count.
- Backward is exactly twice forward: one product for the input gradient, one for the weight gradient
  (in attention, one for each operand). The first layer counts in full, because its input is a
  trained embedding. Of a frozen weight there is no gradient, and so one product less.
- Model FLOPs = forward + backward, without recomputation. Hardware FLOPs add the products that
  backward recomputes (Megatron, arXiv 2104.04473, section 5.1 and appendix). The scores that a
  fused attention kernel recomputes inside its own backward are in neither.
- A recomputed segment of blocks runs up to the last tensor that its backward needs: the input of
  the segment's last product, the MLP's down projection. That product is not run again and not
  counted. The exceptions are dropout after it, whose mask is needed, and a norm after it, which
  reads its result: then the product is run again and counted.
  Selective recomputation saves the results of all products and adds no FLOPs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

from phalanx.account.count import Case, Work, one_block_shape, product_flops, work_of
from phalanx.account.parameters import BlockKind, block_kinds, num_parameters
from phalanx.errors import ConfigError
from phalanx.models.block_weights import pair_width
from phalanx.models.shape import ModelShape, causal_pairs
from phalanx.strategy import Recompute, Strategy

Attention = Literal["causal", "full"]

KEEP_ALL: Final = Recompute()
"""The policy without recomputation."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one step, by [Note: How FLOPs are counted]."""

    linear_forward: int
    """Forward products with weights, output projection included."""
    attention_forward: int
    """Forward products of queries with keys, and of probabilities with values."""
    recompute: int = 0
    """Forward products executed again during backward."""
    frozen_forward: int = 0
    """Part of `linear_forward`: products with frozen weights, which get no gradient."""
    is_of_active: bool = False
    """Whether experts that a token does not visit are left out."""

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return self.linear_forward + self.attention_forward

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass, without recomputation."""
        return 2 * self.forward - self.frozen_forward

    @property
    def model(self) -> int:
        """FLOPs without recomputation: forward + backward. MFU divides these by time."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """FLOPs executed: model FLOPs + recompute. HFU divides these by time."""
        return self.model + self.recompute


def step_flops(
    shape: ModelShape,
    seq_len: int,
    num_sequences: int,
    attention: Attention = "causal",
    recompute: Recompute = KEEP_ALL,
) -> Flops:
    """Count the FLOPs of one training step over the global batch.

    The batch has `num_sequences` sequences of `seq_len` tokens over all devices. `attention`
    selects the pairs of positions that count, see [Note: How FLOPs are counted].

    Raises:
        ConfigError: `seq_len` is below 1, or `num_sequences` below 0.
        StrategyError: a segment has more blocks than the model.
    """
    if seq_len < 1 or num_sequences < 0:
        raise ConfigError(
            f"FLOPs of a step: seq_len is {seq_len} and num_sequences {num_sequences}; they must "
            "be at least 1 and 0"
        )
    kinds = Counter(block_kinds(shape))
    num_pairs = num_sequences * sum(
        num * attention_pairs(seq_len, attention, kind.window) for kind, num in kinds.items()
    )
    all_attention = 2 * num_pairs * shape.num_heads * pair_width(shape)
    # Blocks with windows have the same weights as others: one kind with experts, one without.
    blocks = [kind._replace(window=None) for kind in block_kinds(shape)]
    once = {kind: _of_sequence(shape, kind, seq_len, "none") for kind in dict.fromkeys(blocks)}
    forward = {kind: product_flops(work.block) for kind, work in once.items()}
    # The loss computes its gradients in forward: one of the head's three products is forward. A
    # frozen head has two.
    num_products = 3 if shape.lora is None else 2
    head = product_flops(once[blocks[0]].head) // num_products
    of_blocks = sum(forward[kind] for kind in blocks)
    segment_size = recompute.segment_size(shape.num_layers)
    recomputed = 0
    if segment_size is not None:
        # The last product of a segment is not run again: of each kind, what a segment of one block
        # leaves out.
        left = {
            kind: forward[kind]
            - product_flops(_of_sequence(shape, kind, seq_len, "full").recompute)
            for kind in once
        }
        ends = [
            min(at + segment_size, len(blocks)) - 1 for at in range(0, len(blocks), segment_size)
        ]
        again = of_blocks - sum(left[blocks[end]] for end in ends)
        recomputed = num_sequences * again + all_attention
    linear, frozen = num_sequences * (of_blocks + head), 0
    if shape.lora is not None:
        frozen = linear - 2 * num_parameters(shape).adapters * num_sequences * seq_len
    return Flops(
        linear_forward=linear,
        attention_forward=all_attention,
        recompute=recomputed,
        frozen_forward=frozen,
        is_of_active=shape.experts is not None,
    )


def _of_sequence(
    shape: ModelShape, kind: BlockKind, seq_len: int, recompute: Literal["none", "full"]
) -> Work:
    """Count one sequence through one block of a kind."""
    strategy = Strategy(recompute=Recompute(recompute))
    one = one_block_shape(shape, kind, seq_len)
    # Products with weights are equal on all devices; GPU kernels take fewer operators to trace.
    return work_of(Case(one, strategy, seq_len, 1, "float32", "cuda"))


def attention_pairs(seq_len: int, attention: Attention, window: int | None = None) -> int:
    """Count the (query, key) pairs of one sequence: T x T if full, else `causal_pairs`."""
    return seq_len * seq_len if attention == "full" else causal_pairs(seq_len, window)
