"""What a rank holds under each layout: its share of the weights, and of what backward needs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from marks import by_hand
from phalanx.account.activations import activations
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.measure.memory import MemoryLedger
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.parallel.split import StateBytes
from phalanx.strategy import Strategy
from phalanx.train.optimizer import build_optimizer

SHAPE = ModelShape(
    vocab_size=512, num_layers=2, hidden=128, num_heads=8, num_kv_heads=8, head_dim=16, ffn=384,
    max_seq_len=64,
)  # fmt: skip
ROWS, LENGTH = 16, 32  # which all degrees divide

LAYOUTS = [
    ("tp2", 2, 2),
    ("tp2:megatron", 2, 5 / 3),
    by_hand("tp4", 4, 4),
    ("tp4:2d", 4, 4),
    by_hand("tp8:2.5d/2", 4, 8),
    by_hand("tp8:3d", 8, 8),
]
"""Strategy; parts of each weight; parts of what a block keeps.

Of 8 D + 4 F, Megatron's form keeps 4 D whole: 5/3 where F is 3 D.
"""

STATE = ("parameters", "optimizer", "other")
"""Kinds of what is there between steps; all else is kept for backward, a gather's result too."""


def drawn(shard: torch.Tensor, *_: object) -> None:
    shard.normal_(std=0.02)


def held(text: str, tied: bool) -> tuple[int, int, list[int], StateBytes]:
    """Return the bytes of weights and optimizer, what one and two blocks keep, and the plan."""
    strategy = Strategy.parse(text)
    comm = Ranks(strategy)
    kept: list[int] = []
    weights = moments = 0
    for num_layers in (1, 2):
        changed: dict[str, Any] = {"num_layers": num_layers, "tied": tied}
        shape = ModelShape(**{**vars(SHAPE), **changed})
        with torch.device("meta"):
            model = Decoder(shape)
        plan = Plan(strategy, model)
        plan.build(comm, drawn)
        optimizer = build_optimizer(model, OptimizerConfig())
        tokens_BT = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % SHAPE.vocab_size
        model(tokens_BT, tokens_BT).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with MemoryLedger(model, optimizer, "cpu") as ledger, ledger.phase("forward"):
            loss = model(tokens_BT, tokens_BT)
        at_end = ledger.account().at_end
        assert loss.item() > 0  # alive, and with it what backward needs
        weights, moments = at_end["parameters"], at_end["optimizer"]
        kept.append(sum(at_end[kind] for kind in at_end if kind not in STATE))
    return weights, moments, kept, plan.holds()


@functools.cache
def alone(tied: bool) -> tuple[int, int, list[int], StateBytes]:
    return run_ranks(held, 1, "dp1", tied, threads=1)[0]


@pytest.mark.parametrize("text, weight_parts, activation_parts", LAYOUTS)
def test_a_rank_holds_its_share(
    text: str,
    weight_parts: int,
    activation_parts: float,
) -> None:
    tied = text == "tp2"  # one layout with a table that is used twice
    results = run_ranks(held, Strategy.parse(text).num_ranks, text, tied, threads=1)
    all_weights, all_moments, all_kept, _ = alone(tied)
    one_block = all_kept[1] - all_kept[0]
    for weights, moments, kept, holding in results:
        assert weights == pytest.approx(all_weights / weight_parts, rel=0.05)
        assert moments == pytest.approx(all_moments / weight_parts, rel=0.05)
        assert holding.parameter_bytes == weights
        assert kept[1] - kept[0] == pytest.approx(one_block / activation_parts, rel=0.05)
        predicted = activations(SHAPE, Strategy.parse(text), LENGTH, ROWS, "float32")
        assert kept[1] - kept[0] == pytest.approx(predicted.blocks / SHAPE.num_layers, rel=0.05)
