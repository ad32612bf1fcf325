"""A plan answers for all axes of a strategy, before and after it has split the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel import plan
from phalanx.parallel.plan import SPLITS, Plan, plan_decoder
from phalanx.parallel.skeleton import skeleton_of_shape
from phalanx.parallel.split import Split, StateBytes, Target
from phalanx.strategy import KINDS, Strategy

SHAPE = ModelShape(
    vocab_size=68, num_layers=2, hidden=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn=48,
    max_seq_len=32, tied=True,
)  # fmt: skip

MICROBATCHES = [(2, 6)] * 2


def answers(text: str) -> list[tuple[StateBytes, list[Entry], list[Any]]]:
    """Return what a plan says before it builds, and after."""
    parsed = Strategy.parse(text)
    made = plan_decoder(parsed, SHAPE)
    found = [(made.holds(2), made.traffic(MICROBATCHES), made.table())]
    made.build(Ranks(parsed), lambda shard, *_: shard.zero_())
    return [*found, (made.holds(2), made.traffic(MICROBATCHES), made.table())]


def test_building_changes_no_answer() -> None:
    for before, after in run_ranks(answers, 4, "fsdp2,tp2,recompute:full", threads=1):
        assert before == after
        assert before == answers_of_parent("fsdp2,tp2,recompute:full")


def answers_of_parent(text: str) -> tuple[StateBytes, list[Entry], list[Any]]:
    """Return what a plan says in a process that is no rank."""
    made = plan_decoder(Strategy.parse(text), SHAPE)
    return made.holds(2), made.traffic(MICROBATCHES), made.table()


@pytest.mark.parametrize(
    "axis, kind", [(axis, kind) for axis in KINDS for kind, it in KINDS[axis].items() if it.about]
)
def test_one_split_answers_for_each_kind_that_is_built(axis: str, kind: str) -> None:
    rule = KINDS[axis][kind]
    option = f"/{rule.least}" if rule.option else ""
    degree = {"recompute": "", "tp": "8" if kind in ("2.5d", "3d") else "4"}.get(axis, "2")
    if kind == "2.5d":
        option = "/2"
    parsed = Strategy.parse(f"{axis}{degree}:{kind}{option}")
    # Ranks of cp and ep hold copies of what these do not split: gradients are summed as over dp.
    experts = ExpertShape(num_experts=4, top_k=2, ffn=16) if axis == "ep" else None
    shape = dataclasses.replace(SHAPE, experts=experts)
    skeleton = skeleton_of_shape(shape, torch.float32)
    asked = [split.axis for split in SPLITS if split.applies_to(Target(parsed, skeleton))]
    assert asked == ([axis, "dp"] if axis in ("cp", "ep") else [axis])
    assert not any(split.applies_to(Target(Strategy(), skeleton)) for split in SPLITS)
    assert plan_decoder(parsed, shape).row_shards == {"2d": 2, "2.5d": 4, "3d": 4}.get(kind, 1)


def test_a_plan_starts_no_servers() -> None:
    planned = plan_decoder(Strategy.parse("dp2:ps"), SHAPE)
    with pytest.raises(StrategyError, match="starts no servers for dp:ps"):
        planned.build(cast(Any, None))


def test_what_the_first_rank_holds_of_several_axes() -> None:
    whole, shard = (
        plan_decoder(Strategy.parse(text), SHAPE, compute=torch.bfloat16).holds()
        for text in ("dp2", "fsdp2,tp2")
    )
    assert whole.gathered_bytes == 0 < shard.gathered_bytes < whole.parameter_bytes / 2
    norms = 4 * 32 * (2 * SHAPE.num_layers + 1)  # which tp does not split
    assert shard.parameter_bytes == (whole.parameter_bytes - norms) // 4 + norms // 2


class Context(Split):
    """Another way to split by cp: it sends one number, and doubles the gradients held."""

    axis = "cp"

    def next_target(self) -> Target:
        shapes = {w: (1, *self.target.shape(w)[1:]) for w in self.target.skeleton.weights}
        return dataclasses.replace(self.target, shapes=shapes)

    def holds(self, held: StateBytes, accumulation: int) -> StateBytes:
        return dataclasses.replace(held, gradient_bytes=2 * accumulation * held.gradient_bytes)

    def traffic(self, microbatches: Sequence[tuple[int, int]]) -> list[Entry]:
        return [Entry("forward", "cp", "all_reduce", len(microbatches), 4, 4)]


def test_a_new_axis_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [split for split in SPLITS if split.axis != Context.axis]
    monkeypatch.setattr(plan, "SPLITS", (*others, Context))
    alone, both = (plan_decoder(Strategy.parse(text), SHAPE) for text in ("fsdp4", "fsdp2,cp2"))
    assert both.holds(2).gradient_bytes == 4 * alone.holds(2).gradient_bytes
    of_context = Entry("forward", "cp", "all_reduce", 2, 4, 4)
    sent = both.traffic(MICROBATCHES)
    assert sent[-1] == of_context
    # Beside it fsdp splits over both.
    of_four = [e for e in alone.traffic(MICROBATCHES) if e.phase != "agree"]
    expected = [dataclasses.replace(entry, axis="fsdp_cp") for entry in of_four]
    assert [entry for entry in sent if entry.axis == "fsdp_cp"] == expected
    cut = plan_decoder(Strategy.parse("cp2"), SHAPE).holds()
    assert cut.parameter_bytes < plan_decoder(Strategy(), SHAPE).holds().parameter_bytes


def test_a_parameter_without_rows_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(StrategyError, match=r"the parameter '0.scale' of shape \(\) has no rows"):
        Plan(Strategy.parse("fsdp2,tp2"), model, roles={"0": "local"})
