"""What a rank of cp keeps for backward, and what passes in a ring, beside the account."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from live_bytes import LiveBytes
from marks import by_hand
from phalanx.account.activations import activations
from phalanx.comm.comm import Ranks
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.random import row_keys
from phalanx.models.shape import ModelShape
from phalanx.parallel.context.partial import AttentionMask, BackwardState
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

LLAMA = ModelShape(
    vocab_size=64, num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=176,
    max_seq_len=256, dropout=0.1,
)  # fmt: skip
GPT2 = dataclasses.replace(
    LLAMA, num_kv_heads=4, norm="layer", position="learned", mlp="gelu", bias=True, tied=True
)
SINGLE = dataclasses.replace(LLAMA, num_kv_heads=1, qk_norm=True)  # fewer key heads than ranks
NUM_ROWS, SEQ_LEN = 4, 256
MANY_ROWS, HELD = 8, 64
"""Rows, of which a ring works on one at a time, and positions of one rank."""

Case = tuple[str, ModelShape, str, bool]
"""Strategy, shape, precision, and whether rows have documents."""


def kept_on_rank(cases: Sequence[Case]) -> list[int]:
    """Return for each case the bytes that live after a forward."""
    found: list[int] = []
    for text, shape, precision, has_documents in cases:
        strategy = Strategy.parse(text)
        model = Decoder(shape)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if precision == "float64":
            model.double()
        model.compute_dtype = getattr(torch, precision)
        Plan(strategy, model, compute=model.compute_dtype).build(Ranks(strategy))
        tokens_BT = torch.arange(NUM_ROWS * SEQ_LEN).view(NUM_ROWS, -1) % shape.vocab_size
        positions_BT = torch.arange(SEQ_LEN).repeat(NUM_ROWS, 1)
        with LiveBytes() as live:
            loss = model(
                tokens_BT,
                tokens_BT.roll(-1, 1),
                positions_BT=positions_BT if has_documents else None,
                documents_BT=(positions_BT > 50).long() if has_documents else None,
                dropout_keys_B=row_keys(0, 0, torch.arange(NUM_ROWS)),
            )
            found.append(live.now)
        loss.backward()
    return found


@pytest.mark.parametrize("text", ["cp2", by_hand("cp2:ulysses")])
def test_kept_within_5_percent(text: str, subtests: pytest.Subtests) -> None:
    cases = [
        (text + more, shape, precision, has_documents)
        for shape, precision, has_documents, more in (
            (LLAMA, "float32", False, ""),
            (LLAMA, "bfloat16", True, ""),
            (LLAMA, "float32", True, ",recompute:selective"),
            (GPT2, "float32", False, ""),
            (GPT2, "bfloat16", False, ",recompute:full"),
            (SINGLE, "bfloat16", False, ""),
            (SINGLE, "float64", False, ",recompute:selective"),
        )
    ]
    found = run_ranks(kept_on_rank, 2, cases, threads=1)
    for case, *kept in zip(cases, *found, strict=True):
        text, shape, precision, has_documents = case
        strategy = Strategy.parse(text)
        predicted, whole = (
            activations(shape, of, SEQ_LEN, NUM_ROWS, precision, has_documents=has_documents)
            for of in (strategy, dataclasses.replace(strategy, cp=Strategy().cp))
        )
        with subtests.test(text, precision=precision, documents=has_documents):
            assert kept == pytest.approx([predicted.kept] * 2, rel=0.05)
            assert predicted.blocks < 0.8 * whole.blocks


def passing_on_rank(num_groups: int) -> tuple[int, int]:
    """Return the most bytes that live in a ring at a time, forward and backward."""
    attend = Ring(Ranks({"cp": torch.distributed.get_world_size()}))
    q, k, v, do = (
        torch.randn(MANY_ROWS, HELD, heads, 16) for heads in (32, num_groups, num_groups, 32)
    )
    with LiveBytes() as forward:
        o, lse = attend.ring_attention(q, k, v, None, None)
    with LiveBytes() as backward:
        attend.backward(BackwardState.of(q, o, lse, do), k, v, AttentionMask())
    return forward.peak, backward.peak


@pytest.mark.parametrize("num_ranks", [2, by_hand(4)])
def test_blocks_that_pass_in_a_ring(num_ranks: int) -> None:
    """The same queries with twice the keys and values: what is more of them is what passes."""
    few, many = (run_ranks(passing_on_rank, num_ranks, g, threads=1)[0] for g in (8, 16))
    added = 2 * MANY_ROWS * HELD * 8 * 16 * 4  # keys and values of one rank
    shape = ModelShape(
        vocab_size=8, num_layers=1, hidden=512, num_heads=32, num_kv_heads=16, head_dim=16, ffn=1,
        max_seq_len=1024,
    )  # fmt: skip
    predicted = [
        activations(
            dataclasses.replace(shape, num_kv_heads=groups),
            Strategy.parse(f"cp{num_ranks}"), HELD * num_ranks, MANY_ROWS, "float32",
        ).ring_buffers
        for groups in (8, 16)
    ]  # fmt: skip
    # Forward has a copy of this rank's own, and the block that comes.
    assert many[0] - few[0] == pytest.approx(2 * added, rel=0.05)
    assert many[1] - few[1] == pytest.approx(predicted[1] - predicted[0], rel=0.05)
