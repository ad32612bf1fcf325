"""What one block under a layout should move and hold, as a plan says it.

The bytes that move are those of the plan's own account, which runs the layout on nothing; the
closed forms of each layout stand in its file, in docs/strategies.md, and as arithmetic in tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from block import PATTERNS, OneBlock, Precision
from phalanx.account.activations import activations
from phalanx.comm.ledger import Entry
from phalanx.models.shape import ModelShape
from phalanx.parallel.batch_shape import BatchShape
from phalanx.parallel.skeleton import skeleton_of
from phalanx.parallel.split import Target
from phalanx.parallel.tensor import account
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.placed import sharded_parameters
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Axis, Strategy


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What one rank moves in a step of one microbatch, and holds.

    That is its shards of the masters, and the activations kept from forward for backward.
    """

    sent_bytes: float
    num_calls: int
    weight_bytes: int
    kept_bytes: int


def theory(
    strategy: Strategy, shape: ModelShape, batch: BatchShape, precision: Precision
) -> Amounts:
    """Return what one rank should move and hold; sizes are such that nothing is padded."""
    entries = collectives(strategy, shape, batch, precision)
    model = OneBlock(shape, precision)
    rows = sharded_parameters(skeleton_of(model), bind_roles(model, PATTERNS), layout_of(strategy))
    kept = activations(shape, strategy, batch.length, batch.num_rows, precision)
    return Amounts(
        sent_bytes=sum(entry.sent_bytes for entry in entries),
        num_calls=sum(entry.calls for entry in entries),
        weight_bytes=sum(math.prod(row.shard_shape) * row.weight.dtype.itemsize for row in rows),
        kept_bytes=kept.blocks,
    )


def collectives(
    strategy: Strategy, shape: ModelShape, batch: BatchShape, precision: Precision
) -> list[Entry]:
    """Return what one rank sends, of numbers of heads too that the layout does not divide."""
    model = OneBlock(shape, precision)
    layout, bindings = layout_of(strategy), bind_roles(model, PATTERNS)
    target = Target(strategy, skeleton_of(model), model.compute, PATTERNS)
    rows = sharded_parameters(target.skeleton, bindings, layout)
    return account.traffic(target, layout, bindings, rows, [batch])


def sent_line(strategy: Strategy, shape: ModelShape, precision: Precision) -> tuple[float, float]:
    """Return the bytes that one rank sends whatever the tokens are, and those for each token."""
    layout = layout_of(strategy)
    rows, positions = (layout.residual.num_shards(dim, layout.comm) for dim in (0, 1))
    # Two sizes of which nothing is padded.
    once, twice = (
        sum(e.sent_bytes for e in collectives(strategy, shape, batch, precision))
        for batch in (BatchShape(rows, positions), BatchShape(2 * rows, positions))
    )
    return 2 * once - twice, (twice - once) / (rows * positions)


def crossing_tokens(strategy: Strategy, shape: ModelShape, precision: Precision) -> float:
    """Return from how many tokens a microbatch on a layout sends less than one dimension does.

    Infinite if it never does. A step has one microbatch; with more, 2.5d crosses earlier.
    """
    plain = sent_line(Strategy(tp=Axis(strategy.tp.degree, "1d")), shape, precision)
    fixed, per_token = sent_line(strategy, shape, precision)
    gain = plain[1] - per_token
    return (fixed - plain[0]) / gain if gain > 0 else math.inf


def product_flops(strategy: Strategy, shape: ModelShape, num_tokens: int) -> float:
    """Return the FLOPs of one rank's products with weights, forward and backward."""
    num_weights = 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn
    return 6 * num_weights * num_tokens / strategy.tp.degree
