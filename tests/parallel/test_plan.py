"""A plan answers for all axes of a strategy, before and after it has split the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.comm.join import build_mesh
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import SPLITS, plan_decoder
from phalanx.parallel.split import StateBytes
from phalanx.strategy import BUILT, KINDS, Strategy

SHAPE = ModelShape(
    vocab_size=68, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
    max_seq_len=32, tied=True,
)  # fmt: skip

MICROBATCHES = [(2, 6)] * 2


def answers(text: str) -> list[tuple[StateBytes, list[Entry], list[Any]]]:
    """Return what a plan says before it builds, and after."""
    strategy = Strategy.parse(text)
    plan = plan_decoder(strategy, SHAPE)
    found = [(plan.holds(2), plan.traffic(MICROBATCHES), plan.table())]
    plan.build(build_mesh(strategy), lambda shard, *_: shard.zero_())
    return [*found, (plan.holds(2), plan.traffic(MICROBATCHES), plan.table())]


def test_building_changes_no_answer() -> None:
    for before, after in run_ranks(answers, 4, "fsdp2,tp2,recompute:full", threads=1):
        assert before == after
        assert before == answers_of_parent("fsdp2,tp2,recompute:full")


def answers_of_parent(text: str) -> tuple[StateBytes, list[Entry], list[Any]]:
    """Return what a plan says in a process that is no rank."""
    plan = plan_decoder(Strategy.parse(text), SHAPE)
    return plan.holds(2), plan.traffic(MICROBATCHES), plan.table()


@pytest.mark.parametrize("axis, kind", sorted(BUILT))
def test_one_split_answers_for_each_kind_that_is_built(axis: str, kind: str) -> None:
    rule = KINDS[axis][kind]
    option = "" if rule is None else f"/{rule.least}"
    degree = {"recompute": "", "tp": "8" if kind in ("2.5d", "3d") else "4"}.get(axis, "2")
    if kind == "2.5d":
        option = "/2"
    strategy = Strategy.parse(f"{axis}{degree}:{kind}{option}")
    assert sum(split.is_asked(strategy) for split in SPLITS) == 1
    assert not any(split.is_asked(Strategy()) for split in SPLITS)
    assert plan_decoder(strategy, SHAPE).row_shards == {"2d": 2, "2.5d": 4, "3d": 4}.get(kind, 1)


def test_what_is_not_built_is_refused() -> None:
    with pytest.raises(StrategyError, match="not built"):
        plan_decoder(Strategy.parse("cp2"), SHAPE)


def test_what_the_first_rank_holds_of_several_axes() -> None:
    whole, shard = (
        plan_decoder(Strategy.parse(text), SHAPE, compute=torch.bfloat16).holds()
        for text in ("dp2", "fsdp2,tp2")
    )
    assert whole.gathered_bytes == 0 < shard.gathered_bytes < whole.parameter_bytes / 2
    norms = 4 * 32 * (2 * SHAPE.num_layers + 1)  # which tp does not split
    assert shard.parameter_bytes == (whole.parameter_bytes - norms) // 4 + norms // 2
