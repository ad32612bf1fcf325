"""What a block under each layout sends, by arithmetic alone, is what the plan's account says.

    B rows, T positions, D hidden, F inner of the MLP   e bytes of a number of the arithmetic
    W = 4 D^2 + 3 D F weights of the block              m of the masters and their gradients
    N ranks, q side of the square or cube, d depth      s of a norm's statistic, max(4, e)

In 1, 2 and 2.5 dimensions a branch moves D features five times: twice forward, three times backward
(panels of the residual before its column products, of the result of its row product). Megatron's
form reduces D once forward and once backward, twice the bytes each. In 3 what a product reads moves
three times and what it makes twice, so F moves too: attention 14 D, MLP 5 D + 7 F. Weights move
three times: twice as they are, once as gradients, which are the masters'.
"""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from phalanx.models.registry import shape_of
from phalanx.models.shape import ModelShape
from phalanx.parallel.batch_shape import BatchShape
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/tensor"))
from account import collectives, crossing_tokens, sent_line
from block import Precision

SHAPE = shape_of("llama2-7b")
BATCH = BatchShape(64, 128)
ITEM_BYTES = {"float32": (4, 4, 4), "bfloat16": (2, 4, 4), "float64": (8, 8, 8)}
"""e, m and s."""
TEXTS = (
    "tp4", "tp64", "tp8:megatron", "tp4:2d", "tp16:2d", "tp64:2d", "tp8:2.5d/2", "tp64:2.5d/4",
    "tp8:3d", "tp64:3d",
)  # fmt: skip


def share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def closed_form(strategy: Strategy, num_tokens: int, precision: Precision) -> tuple[float, int]:
    """Return the bytes that a rank sends in a step, and its collectives but those of gradients."""
    e, m, s = ITEM_BYTES[precision]
    n, grid = strategy.tp.degree, strategy.grid()
    q, d = grid.get("tp_row", grid.get("tp_x", 1)), grid.get("tp_depth", 1)
    width, ffn = SHAPE.hidden, SHAPE.ffn
    weights = 4 * width**2 + 3 * width * ffn
    panels = (2 * e + m) * weights
    residual, statistics, vectors = 10 * num_tokens * width * e, 8 * num_tokens * s, 4 * width * m
    if strategy.tp.kind == "1d":
        return share(n) * (residual + vectors), 2 * 5
    if strategy.tp.kind == "megatron":
        return share(n) * (residual * 8 / 10 + vectors), 2 * 2
    if strategy.tp.kind == "3d":
        moved = num_tokens * (19 * width + 7 * ffn) * e
        sent = share(q) / q**2 * (moved + panels + statistics) + share(q) * 2 * vectors / q
        return sent, (3 + 5 * 3 + 8) + (3 + 5 * 2 + 8) + 4
    sent = share(q) / q * ((residual + statistics) / d + panels)
    over_depth = share(d) * 2 * weights * m / q**2
    calls = q * (3 * (1 + 3) + 5) + q * (3 * (1 + 2) + 5) + 4
    return sent + over_depth + (share(d) + share(q)) * vectors / q, calls


@pytest.mark.parametrize("precision", ITEM_BYTES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_account_is_the_closed_form(text: str, precision: Precision) -> None:
    strategy = Strategy.parse(text)
    entries = collectives(strategy, SHAPE, BATCH, precision)
    num_tokens = BATCH.num_rows * BATCH.length
    sent, num_calls = closed_form(strategy, num_tokens, precision)
    assert sum(entry.sent_bytes for entry in entries) == pytest.approx(sent, rel=1e-12)
    assert sum(entry.calls for entry in entries if entry.phase != "reduce") == num_calls
    fixed, per_token = sent_line(strategy, SHAPE, precision)
    assert fixed + per_token * num_tokens == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize("text", ["tp4:2d", "tp8:2.5d/2", "tp8:3d", "tp64:3d"])
def test_at_the_crossing_both_send_the_same(text: str) -> None:
    strategy = Strategy.parse(text)
    tokens = crossing_tokens(strategy, SHAPE, "bfloat16")
    plain = Strategy.parse(f"tp{strategy.tp.degree}")
    at = [closed_form(one, tokens, "bfloat16")[0] for one in (strategy, plain)]
    assert at[0] == pytest.approx(at[1])


def test_a_layout_may_never_cross() -> None:
    """What is F wide moves in three dimensions, and outweighs the residual."""
    wide: ModelShape = dataclasses.replace(SHAPE, ffn=8 * SHAPE.hidden)
    assert crossing_tokens(Strategy.parse("tp8:3d"), wide, "float32") == math.inf
