"""Closed forms of the activations that one rank holds, by recompute policy.

[Note: What a block keeps]
Autograd keeps the tensors below of one block; `_block` lists them with their sizes. By where they
come from they are

    input      the residual stream that the block reads
    product    the result of a matrix product or of attention, that backward reads
    remade     all else that backward reads: what is cheap to make again
    unread     a product that no backward reads: the result of the projection after attention, and
               queries, keys and values where something turns or copies them first
    last       the result of `down`, which no backward reads either

(a norm after a branch reads that branch's last product, which is `product` then), and blocks with a
window keep where each query's sight begins.
The policies keep, of L blocks in segments of K,

    none        L (input + product + remade)
    segments    L / K input; and K (input + product + remade) - input when backward is at one
    selective   L (input + product + unread + last), since an operator's result is kept before it is
                known who will read it; and remade - unread when backward is at a block: what it
                has read again is let go, and so is `last` where dropout follows it.

Besides blocks: tokens and positions, angles of the rotation, where documents begin, the mask
of the embedding's dropout; and of the end of the model the last norm's input and what the chunked
loss has made ahead, the gradients of its input and of the output projection (fp32). Under tp each
rank keeps its share of all this, but tokens, angles and documents whole, and no casts; of the loss
it keeps the gradient of its logits. Megatron's form keeps what lies along the residual whole.

Under cp a rank keeps what belongs to its positions. A ring keeps the log-sum-exp besides, and where
backward is at attention, blocks of keys and values are here on their way with their gradients: own
keys and values once more, those that come, and gradients in 32 bits or more (own, being made, sent,
received). Ulysses keeps queries, keys and values by heads, and the result of attention both ways.

Not counted are buffers that pass: the gradients inside the block at work, which are up to 6 F
elements a token. Compiled blocks keep what the compiler chooses.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

from phalanx.account.parameters import num_parameters
from phalanx.models.shape import ModelShape
from phalanx.strategy import Axis, Strategy

ITEM_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by data type."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that one rank holds for the backward of one microbatch."""

    blocks: int
    """Kept by all blocks from forward on."""
    recomputed: int
    """Made again in backward for the segment at work; 0 where nothing is recomputed."""
    inputs: int
    """What all blocks share, and the embedding's; held until the end."""
    head: int
    """The last norm and the loss; gone before backward reaches the blocks."""
    gradient: int
    """The gradient that flows back along the residual stream."""
    passing: int = 0
    """What passes in a ring while backward is at attention, beyond what it has freed by then."""

    @property
    def kept(self) -> int:
        """Bytes held when forward is done."""
        return self.blocks + self.inputs + self.head

    @property
    def peak(self) -> int:
        """Most bytes held for backward, without buffers that pass."""
        in_backward = self.blocks + self.recomputed + self.inputs + self.gradient + self.passing
        return max(self.kept, in_backward)


def activations(
    shape: ModelShape,
    strategy: Strategy,
    seq_len: int,
    num_sequences: int,
    precision: str,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    has_documents: bool = False,
    has_casts: bool | None = None,
) -> Activations:
    """Count what one rank holds; see [Note: What a block keeps].

    Args:
        shape: the decoder.
        strategy: how the work is split, and what is run again.
        seq_len: tokens in one sequence.
        num_sequences: sequences in one microbatch of one rank.
        precision: data type of the arithmetic, such as "bfloat16".
        device: where; only a CPU has attention of its own.
        has_documents: several documents stand in a row.
        has_casts: whether blocks keep casts of their weights; if None, where precision is below 32
            bits, and neither fsdp gathers them in it nor tp has products of its own.

    Raises:
        StrategyError: segments of more blocks than there are.
    """
    tp, cp, recompute = strategy.tp, strategy.cp, strategy.recompute
    num_held = _held(cp, seq_len)
    if has_casts is None:
        has_casts = ITEM_BYTES[precision] < 4 and tp.degree == strategy.fsdp.degree == 1
    windows = [shape.window_of(block) for block in range(shape.num_layers)]
    are_cut = [window is not None and window < seq_len for window in windows]
    kinds: dict[bool, Counter[str]] = {}
    for is_cut in set(are_cut):
        is_masked = has_documents or is_cut
        of = _block(shape, num_held * num_sequences, precision, device, is_masked, tp, cp)
        of["remade"] += _casts(shape) * ITEM_BYTES[precision] if has_casts else 0
        of["remade"] += 8 * num_held * (num_sequences if has_documents else 1) if is_cut else 0
        kinds[is_cut] = of
    blocks = [kinds[is_cut] for is_cut in are_cut]
    read = [of["input"] + of["product"] + of["remade"] for of in blocks]
    kept, recomputed = sum(read), 0
    segment_size = recompute.segment_size(shape.num_layers)
    if segment_size is not None:
        starts = range(0, shape.num_layers, segment_size)
        kept = sum(blocks[start]["input"] for start in starts)
        recomputed = max(
            sum(read[start : start + segment_size]) - blocks[start]["input"] for start in starts
        )
    elif recompute.kind == "selective":
        kept = sum(of["input"] + of["product"] + of["unread"] + of["last"] for of in blocks)
        recomputed = max(
            of["remade"] - of["unread"] - (of["last"] if shape.dropout else 0) for of in blocks
        )
    return Activations(
        blocks=kept,
        recomputed=recomputed,
        inputs=_inputs(shape, num_held, num_sequences, precision, has_documents, tp, cp),
        head=_head(shape, num_held * num_sequences, precision, tp),
        gradient=blocks[0]["input"],
        passing=_passing(shape, num_held * num_sequences, precision, tp, cp),
    )


def _held(cp: Axis, seq_len: int) -> int:
    """Return how many positions of a row a rank keeps; a ring cuts two chunks for each rank."""
    num_chunks = cp.degree * (2 if cp.degree > 1 and cp.kind == "ring" else 1)
    return -(-seq_len // num_chunks) * num_chunks // cp.degree


def _block(
    shape: ModelShape,
    num_tokens: int,
    precision: str,
    device: str,
    is_masked: bool,
    tp: Axis,
    cp: Axis,
) -> Counter[str]:
    """Return the bytes of one block's tensors by where they come from, without casts of weights.

    Where `is_masked`, by documents or by a window, attention goes another way.
    """
    item_bytes = ITEM_BYTES[precision]
    # All but what lies along the residual is inside a branch, of which each rank has a share.
    along_residual = tp.degree // _residual_parts(tp)
    stream = shape.hidden * item_bytes * along_residual
    inner = shape.ffn * item_bytes
    queries = shape.num_heads * shape.head_dim * item_bytes
    groups = shape.num_kv_heads * shape.head_dim * item_bytes
    has_flash = device == "cuda" and item_bytes == 2
    # The attention of models/cpu.py; and, where no flash runs on a GPU, that of PyTorch besides,
    # want as many keys and values as queries, in copies.
    has_blockwise = not has_flash and (is_masked or (device, precision) == ("cpu", "bfloat16"))
    by_heads = cp.degree > 1 and cp.kind == "ulysses"
    if cp.degree > 1 and not by_heads:  # a ring has one way to attend, for all devices
        has_flash, has_blockwise, device = False, False, "any"
    # Ulysses repeats a key head for the ranks whose queries use it.
    num_groups = max(1, shape.num_kv_heads // next(reversed(Strategy(tp=tp).grid().values())))
    num_copies = math.lcm(num_groups, cp.degree) // num_groups if by_heads else 1
    groups_sent = groups * num_copies
    is_repeated = groups_sent < queries and (has_blockwise or (device == "cuda" and not has_flash))
    is_turned = shape.qk_norm or shape.position == "rope"
    keys = queries if is_repeated else groups
    statistics = _statistics(shape, item_bytes)
    of_norm = statistics * tp.degree // _token_shards(tp)
    num_normed = {False: 0, True: shape.num_heads + shape.num_kv_heads, "projection": 2}
    before = of_norm + stream if shape.norm_at != "output" else 0  # a norm, and what it makes
    after = of_norm if shape.norm_at != "input" else 0
    num_maps = 1 if shape.mlp == "gelu" else 2

    rows = [
        ("product" if shape.qk_norm or not is_turned else "unread", queries),  # as projected
        ("product" if shape.qk_norm or not (is_turned or is_repeated) else "unread", groups),
        ("unread" if is_repeated else "product", groups),  # values
        ("remade", (queries if is_turned else 0) + (keys if is_turned or is_repeated else 0)),
        ("remade", queries if is_repeated else 0),  # copies of values
        ("product", queries),  # the result of attention
    ]
    if by_heads:
        rows = [
            ("product" if shape.qk_norm else "unread", queries + groups),  # as projected
            ("unread", groups),  # values
            ("remade", queries + 2 * groups_sent),  # all three by heads, as they arrive
            ("remade", 2 * queries if is_repeated else 0),  # copies of keys and values
            ("unread" if has_blockwise else "product", queries),  # the result, by heads
            ("remade", queries),  # the result, by positions
        ]
    rows += [
        ("input", stream),
        ("remade", before),  # the first norm
        ("remade", statistics * num_normed[shape.qk_norm]),
        ("product", 0 if has_blockwise else shape.num_heads * max(4, item_bytes)),  # log-sum-exp
        ("product" if after else "unread", stream),  # its projection
        ("remade", after + stream + before),  # the stream amid the block, and norms beside it
        ("product", num_maps * inner),  # gate and up, or up
        ("remade", num_maps * inner),  # activation, and its product
        ("product" if after else "last", stream),  # the result of the MLP
        ("remade", after),
        # two masks, a byte an element
        ("remade", 2 * shape.hidden * along_residual if shape.dropout else 0),
    ]
    of: Counter[str] = Counter()
    for origin, token_bytes in rows:
        of[origin] += token_bytes * num_tokens // tp.degree
    return of


def _passing(shape: ModelShape, num_tokens: int, precision: str, tp: Axis, cp: Axis) -> int:
    """Return the bytes that pass in a ring in backward, beyond the MLP's that it has freed."""
    if cp.degree == 1 or cp.kind != "ring":
        return 0
    item_bytes = ITEM_BYTES[precision]
    pair = 2 * shape.num_kv_heads * shape.head_dim  # of keys and values
    num_gradients = 3 if cp.degree == 2 else 4  # of two ranks, none is made while another is sent
    passing = 2 * pair * item_bytes + num_gradients * pair * max(4, item_bytes)
    freed = (2 if shape.mlp == "gelu" else 4) * shape.ffn * item_bytes
    return max(0, passing - freed) * num_tokens // tp.degree


def _residual_parts(tp: Axis) -> int:
    """Return how many ranks share what lies along the residual stream."""
    return 1 if tp.kind == "megatron" else tp.degree


def _token_shards(tp: Axis) -> int:
    """Return in how many shards the tokens of the residual lie; ranks may share their features."""
    grid = Strategy(tp=tp).grid()
    return _residual_parts(tp) // grid.get("tp_col", grid.get("tp_z", 1))


def _statistics(shape: ModelShape, item_bytes: int) -> int:
    """Return the bytes that a norm keeps for each row: a scale, or mean and scale of LayerNorm."""
    return 2 * item_bytes if shape.norm == "layer" else max(4, item_bytes)


def _casts(shape: ModelShape) -> int:
    """Return the elements of one block's weights that backward reads; biases it does not."""
    matrices = num_parameters(shape).matmul - shape.vocab_size * shape.hidden
    return matrices // shape.num_layers + (4 * shape.hidden if shape.norm == "layer" else 0)


def _inputs(
    shape: ModelShape,
    seq_len: int,
    num_sequences: int,
    precision: str,
    has_documents: bool,
    tp: Axis,
    cp: Axis,
) -> int:
    """Return the bytes of what all blocks share, and of the embedding, held until the end."""
    item_bytes = ITEM_BYTES[precision]
    num_tokens = seq_len * num_sequences
    num_positions = num_tokens if has_documents else seq_len
    inputs = 8 * num_tokens + num_tokens * (
        shape.hidden if shape.dropout else 0
    ) // _residual_parts(tp)
    if shape.position == "rope":
        num_tables = 1 if shape.window_theta is None else 2
        inputs += num_tables * num_positions * shape.head_dim * max(4, item_bytes)
    else:
        inputs += 8 * num_positions
    if has_documents:  # Ulysses has all positions where it attends
        inputs += 8 * num_tokens * (cp.degree if cp.kind == "ulysses" else 1)
    return inputs


def _head(shape: ModelShape, num_tokens: int, precision: str, tp: Axis) -> int:
    """Return the bytes of the last norm, and of what the loss has made ahead.

    That is the gradients of its input and of the output projection; or, where ranks share the
    vocabulary, that of their logits.
    """
    item_bytes = ITEM_BYTES[precision]
    stream = shape.hidden * item_bytes
    head = num_tokens * 2 * stream // _residual_parts(tp)
    head += num_tokens * _statistics(shape, item_bytes) // _token_shards(tp)
    if tp.degree > 1:
        return head + num_tokens * shape.vocab_size * item_bytes // tp.degree
    return head + shape.vocab_size * shape.hidden * max(4, item_bytes)
