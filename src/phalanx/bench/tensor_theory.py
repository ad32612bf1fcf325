"""What one block under tensor parallelism should move and hold, by arithmetic alone.

Written out from the products of each layout, and apart from the layouts' own accounts, so that a
measurement has a second opinion. The block is that of Llama with as many key-value heads as heads:

    B rows, T places, D hidden, F inner of the MLP      e bytes of a number of the arithmetic
    W = 4 D^2 + 3 D F weights of the block              m of the masters and their gradients
    N ranks, q side of the square or cube, d depth      s of a norm's statistic, max(4, e)

A collective over n ranks makes a rank send share(n) = (n-1)/n of what it moves, an all-reduce twice
that (comm/ledger.py). So a rank sends, forward and backward of a microbatch,

    1d      share(N) 10 B T D e
    megatron  share(N) 8 B T D e
    2d      share(q)/q   (10 B T D e     + (2 e + m) W + 8 B T s)
    2.5d    share(q)/q   (10 B T D e / d + (2 e + m) W + 8 B T s / d)
    3d      share(q)/q^2 (B T (19 D + 7 F) e + (2 e + m) W + 8 B T s)

and once a step, for gradients of what several ranks hold alike,

    1d, megatron  share(N) 4 D m
    2d      share(q) 4 D m / q
    2.5d    share(d) 2 W m / q^2 + (share(d) + share(q)) 4 D m / q
    3d      share(q) 8 D m / q

In 1, 2 and 2.5 dimensions a branch moves D features five times: twice forward, three times backward
(panels of the residual before its column products, of the result of its row product). Megatron's
form reduces D once forward and once backward, twice the bytes each. In 3 what a
product reads moves three times and what it makes twice, so F moves too: attention 14 D, MLP
5 D + 7 F. Weights move three times: twice as they are, once as gradients, which are the masters'.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.models.shape import ModelShape
from phalanx.parallel.reduce import BUCKET_BYTES
from phalanx.strategy import Axis, Strategy


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What one rank moves in a step of one microbatch, and holds.

    Attributes:
        sent_bytes: bytes that it must send.
        num_calls: collectives that it takes part in.
        weight_bytes: bytes of its parts of the masters.
        kept_bytes: activations kept from forward for backward.
    """

    sent_bytes: float
    num_calls: int
    weight_bytes: float
    kept_bytes: float


@dataclass(frozen=True)
class ItemBytes:
    """Bytes of a number: of the arithmetic, and of the masters with their gradients."""

    compute: int
    master: int

    @property
    def statistic(self) -> int:
        """Bytes of a number that a norm computes for a row."""
        return max(4, self.compute)


def theory(tp: Axis, shape: ModelShape, num_tokens: int, item: ItemBytes) -> Amounts:
    """Return what one rank should move and hold; sizes are such that nothing is padded.

    Args:
        tp: degree and kind.
        shape: of the block.
        num_tokens: of the microbatch, B T.
        item: bytes of numbers.
    """
    side, depth = _side(tp), tp.option or 1
    # Parts over which rows or places, and features, of the residual lie.
    num_parts, num_feature_parts = {
        "1d": (tp.degree, 1),
        "megatron": (1, 1),
        "2d": (side, side),
        "2.5d": (depth * side, side),
        "3d": (side**2, side),
    }[tp.kind]
    weights = num_weights(shape)
    # The residual before and after each norm.
    kept = num_tokens * 4 * shape.hidden * item.compute / (num_parts * num_feature_parts)
    # Queries, keys, values, attention's result; gate, up, the activation of gate, its product.
    inner = 4 * shape.hidden + 4 * shape.ffn
    kept += num_tokens * inner * item.compute / tp.degree
    kept += 2 * num_tokens * item.statistic / num_parts
    if item.compute > 2:  # models/cpu.py computes attention in bfloat16 without a log-sum-exp
        kept += num_tokens * shape.num_heads * item.statistic / tp.degree
    return Amounts(
        sent_bytes=sent_bytes(tp, shape, num_tokens, item),
        num_calls=_num_calls(tp, shape, item),
        weight_bytes=item.master
        * (weights * depth / tp.degree + 2 * shape.hidden / num_feature_parts),
        kept_bytes=kept,
    )


def sent_bytes(tp: Axis, shape: ModelShape, num_tokens: float, item: ItemBytes) -> float:
    """Return the bytes that one rank should send; see the head of this file."""
    q, d = _side(tp), tp.option or 1
    weights, hidden = num_weights(shape), shape.hidden
    residual = 10 * num_tokens * hidden * item.compute
    panels = (2 * item.compute + item.master) * weights
    statistics = 8 * num_tokens * item.statistic
    vectors = 4 * hidden * item.master
    if tp.kind == "1d":
        return _share(tp.degree) * (residual + vectors)
    if tp.kind == "megatron":
        return _share(tp.degree) * (residual * 8 / 10 + vectors)
    if tp.kind == "3d":
        moved = num_tokens * (19 * hidden + 7 * shape.ffn) * item.compute
        per_microbatch = _share(q) / q**2 * (moved + panels + statistics)
        return per_microbatch + _share(q) * 2 * vectors / q
    per_microbatch = _share(q) / q * ((residual + statistics) / d + panels)
    over_depth = _share(d) * 2 * weights * item.master / q**2
    return per_microbatch + over_depth + (_share(d) + _share(q)) * vectors / q


def crossing_tokens(tp: Axis, shape: ModelShape, item: ItemBytes) -> float:
    """Return from how many tokens a microbatch on a layout sends less than one dimension does.

    Infinite if it never does. A step has one microbatch; with more, 2.5d crosses earlier.
    """
    plain = Axis(tp.degree, "1d")

    def per_token(axis: Axis) -> float:
        return sent_bytes(axis, shape, 1, item) - sent_bytes(axis, shape, 0, item)

    gain = per_token(plain) - per_token(tp)
    fixed = sent_bytes(tp, shape, 0, item) - sent_bytes(plain, shape, 0, item)
    return fixed / gain if gain > 0 else float("inf")


def num_weights(shape: ModelShape) -> int:
    """Return the elements of the block's matrices."""
    return 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn


def product_flops(tp: Axis, shape: ModelShape, num_tokens: int) -> float:
    """Return the FLOPs of one rank's products with weights, forward and backward."""
    return 6 * num_weights(shape) * num_tokens / tp.degree


def _num_calls(tp: Axis, shape: ModelShape, item: ItemBytes) -> int:
    """Return the collectives of one rank; each branch has n column products and a row product.

    In 2 dimensions a branch has 3 q (1 + n) + 5 q, and two norms 2 each; in 3, 3 + 5 n + 8.
    """
    if tp.kind == "1d":
        return 2 * 5 + 1
    if tp.kind == "megatron":
        return 2 * 2 + 1
    if tp.kind == "3d":
        return (3 + 5 * 3 + 8) + (3 + 5 * 2 + 8) + 4 + 2
    q = _side(tp)
    calls = q * (3 * (1 + 3) + 5) + q * (3 * (1 + 2) + 5) + 4
    if tp.kind == "2d":
        return calls + 1
    return calls + 2 + _num_buckets(shape, q, item.master)


def _num_buckets(shape: ModelShape, q: int, master_bytes: int) -> int:
    """Return the all-reduces over depth, of at least BUCKET_BYTES each but for the last."""
    square, ffn = shape.hidden**2, shape.hidden * shape.ffn
    count, filled = 0, BUCKET_BYTES
    for elements in (ffn, ffn, ffn, square, square, square, square):  # last parameters first
        if filled >= BUCKET_BYTES:
            count, filled = count + 1, 0
        filled += elements // q**2 * master_bytes
    return count


def _side(tp: Axis) -> int:
    grid = Strategy(tp=tp).grid()
    return grid.get("tp_row", grid.get("tp_x", tp.degree))


def _share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks
