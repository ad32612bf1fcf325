"""Pipelines alone and beside other axes against plain PyTorch in float64; five steps by hand.

What the ranks call is held against the rules of NCCL, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from marks import by_hand
from nccl_trace import traced
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.models.shape import ModelShape
from phalanx.strategy import Strategy
from phalanx.verify.batches import decoder_batches
from phalanx.verify.cases import decoder_case
from phalanx.verify.harness import verify_case
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

SHAPE = ModelShape(
    vocab_size=68, num_layers=7, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24,
    max_seq_len=32, tied=True, dropout=0.1,
)  # fmt: skip

SCHEDULES = {
    2: (
        *("pp2", "pp2:interleaved/2", "pp2:zb/1", "pp2:zbv"),
        *("pp2:naive", "pp2:gpipe", "pp2:zb/2", "pp2:dualpipev"),
    ),
    4: ("pp4:naive", "pp4:gpipe", "pp4", "pp4:zb/1"),
}
"""Ranks -> what makes two and four stages of them."""

OF_EIGHT = (
    "pp2,dp2,tp2",
    "pp2,fsdp2,tp2",
    "pp2:zbv,fsdp2:zero3,tp2",
    "pp2,tp4:2d",
    "dp2,fsdp2,tp2",
    "pp4:interleaved/2,dp2",
    "pp2,dp2,fsdp2",
    "pp2:gpipe,dp2,fsdp2:zero1",
    "pp2:zb/1,dp2,fsdp2:zero2",
    "pp2:dualpipev,fsdp4",
    "pp2:interleaved/2,fsdp4:zero1",
    "pp4,fsdp2",
    "pp4:zb/1,dp2",
    "pp4,tp2",
    "pp8:naive",
    "pp2:naive,fsdp2,tp2:megatron",
    "pp2,dp2,tp2,recompute:full",
    "pp2:zbv,fsdp2,tp2,recompute:selective",
    "pp2:interleaved/2,dp2,tp2:megatron",
    "pp2,fsdp4,recompute:sqrt",
    "fsdp2,cp2,tp2",
    "pp2,cp2,tp2",
    "pp2,cp4",
    "pp2:zbv,fsdp2,cp2",
    "dp2,cp2:ulysses,tp2",
    "pp2,dp2,cp2:ulysses",
    "dp2,tp4:2d",
    "fsdp2,tp4:2d",
    "dp2,fsdp2:zero1,tp2",
    "dp2,fsdp2:zero2,tp2",
)  # fmt: skip


def case_of(strategy: Strategy, num_microbatches: int, steps: int, *, tied: bool) -> Case:
    num_rows = strategy.data_ranks * (2 * num_microbatches + 1)
    shape = dataclasses.replace(SHAPE, tied=tied)
    batches = decoder_batches(shape, steps, num_rows, 18, strategy.data_ranks, 3)
    case = decoder_case(shape, batches, 3, OptimizerConfig(warmup_steps=1))
    return dataclasses.replace(case, accumulation=num_microbatches)


def verdicts_on_ranks(
    texts: list[str], counts: tuple[int, ...], steps: int
) -> list[tuple[str, Verdict]]:
    found: list[tuple[str, Verdict]] = []
    for number, text in enumerate(texts):
        strategy = Strategy.parse(text)
        for count in counts:
            case = case_of(strategy, count, steps, tied=number % 2 == 0)
            try:
                verdict = traced(verify_case, case, strategy, Ranks(strategy))
            except Exception as error:
                error.add_note(f"verifying {strategy}")
                raise
            found.append((f"{strategy} {count}", verdict))
    return found


def check(
    texts: list[str], counts: tuple[int, ...], subtests: pytest.Subtests, steps: int = 5
) -> None:
    (num_ranks,) = {Strategy.parse(text).num_ranks for text in texts}
    found = run_ranks(verdicts_on_ranks, num_ranks, texts, counts, steps, threads=1)[0]
    assert len(found) == len(texts) * len(counts)
    for name, verdict in found:
        with subtests.test(name):
            assert verdict.is_equal, str(verdict)
            assert max(d.error for d in verdict.differences) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "counts", "steps"),
    [
        (SCHEDULES[2], (5,), 2),
        *((SCHEDULES[num_ranks], (4, 7), 5) for num_ranks in (2, 4)),
    ],
)
def test_every_schedule(
    texts: Sequence[str], counts: tuple[int, ...], steps: int, subtests: pytest.Subtests
) -> None:
    check(list(texts), counts, subtests, steps)


ALONE = "pp2:interleaved/2,fsdp2:zero1,cut:2+3+3+1"
"""The tied end is a stage of its own."""


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (("pp2:zbv,fsdp2",), 1),
        by_hand(("pp2:zbv,fsdp2", "pp2,tp2", "pp2,cp2", ALONE, "pp2,dp2"), 2),
    ],
)
def test_compositions_on_four_ranks(
    texts: Sequence[str], steps: int, subtests: pytest.Subtests
) -> None:
    check(list(texts), (3,), subtests, steps)


@pytest.mark.slow
@pytest.mark.parametrize("third", range(3))
def test_compositions_on_eight_ranks(third: int, subtests: pytest.Subtests) -> None:
    check(list(OF_EIGHT[third::3]), (3,), subtests)
