"""What a run with experts records of its routing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from marks import by_hand
from phalanx.comm.comm import Ranks
from phalanx.comm.ledger import Entry, Ledger
from phalanx.config import OptimizerConfig
from phalanx.launch.local import run_ranks
from phalanx.measure.expert_load import Routing
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import Plan
from phalanx.review.run_records import read_run
from phalanx.review.sections import sections_of_run
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer
from phalanx.train.report.records import ROUTING_RECORDS, records_routing
from phalanx.train.run import train
from phalanx.train.step import Step
from phalanx.verify.batches import decoder_batches, split
from small_run import SHAPE, records, small_run

PLAIN = ExpertShape(num_experts=4, top_k=2, ffn=16, first_dense=1, capacity=0.75)
LOSSES = dataclasses.replace(PLAIN, aux_loss=0.5, z_loss=0.1)


def steps_of(
    text: str, experts: ExpertShape, accumulation: int
) -> tuple[Routing | None, Routing | None, int, list[list[Entry]]]:
    """Take a step that is not recorded and one that is; return both routings, tokens and calls."""
    shape = ModelShape(
        vocab_size=51, num_layers=4, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=24,
        max_seq_len=12, experts=experts,
    )  # fmt: skip
    strategy = Strategy.parse(text)
    comm, model, config = Ranks(strategy), Decoder(shape).double(), OptimizerConfig()
    model.initialize(3)
    runner = Plan(strategy, model, pp_rank=comm.coord("pp")).build(comm)
    optimizer = build_optimizer(model, config)
    step = Step(model, optimizer, NextToken(), config, comm=comm, num_steps=2, run=runner)
    (batch,) = decoder_batches(shape, 1, 8, 12, 1)
    microbatches = split(batch, comm.coord("data"), comm.size("data"), accumulation)
    results, calls = [], list[list[Entry]]()
    for is_recorded in (False, True):
        step.balance.is_recorded = is_recorded
        with step.watched((ledger := Ledger(comm)).phase), ledger:
            loss, num_valid = step.compute_gradients(microbatches)
        step.config = dataclasses.replace(config, lr=0.0)
        results.append(step.apply_gradients(loss, num_valid))
        calls.append([each for each in ledger.entries() if each.phase in ("metrics", "balance")])
    return results[0].routing, results[1].routing, results[1].num_valid_tokens, calls


@pytest.mark.parametrize(
    "text, experts, accumulation",
    [
        ("ep2", PLAIN, 2),
        by_hand("ep2", LOSSES, 1),
        *(by_hand(text, LOSSES, 2) for text in ("dp2,ep2", "pp2,ep2", "cp2", "fsdp2,ep2,tp2")),
    ],
)
def test_the_routing_is_of_the_global_batch_and_equal_on_all_ranks(
    text: str, experts: ExpertShape, accumulation: int
) -> None:
    ((_, alone, num_tokens, _),) = run_ranks(steps_of, 1, "dp1", experts, 1, threads=1)
    assert alone is not None and list(alone.layers) == [1, 2, 3]
    assert [sum(of) for of in alone.counts] == [2 * num_tokens] * 3 and any(alone.dropped)
    strategy = Strategy.parse(text)
    for before, found, _, calls in run_ranks(
        steps_of, strategy.num_ranks, text, experts, accumulation, threads=1
    ):
        assert before is None, "a step that is not recorded has none"
        assert found.counts == alone.counts and found.dropped == alone.dropped
        assert math.isclose(found.aux_loss, alone.aux_loss, rel_tol=1e-9)
        assert math.isclose(found.z_loss, alone.z_loss, rel_tol=1e-9)
        assert (max(found.rank_load) > 1) is ("ep" in text)
        if experts is PLAIN:  # a record costs one all-reduce of [4, 10] numbers
            old, new = ({(each.phase, each.op): each for each in of} for of in calls)
            (key,) = [*old]
            assert key == ("metrics", "all_reduce") and [*new] == [key]
            assert new[key].calls == old[key].calls + 1
            assert new[key].payload_bytes == old[key].payload_bytes + 8 * 4 * 10
        else:  # the losses need the loads in any step
            assert [each.calls for each in calls[0]] == [each.calls for each in calls[1]]


def test_a_run_records_and_reports_its_routing(tmp_path: Path) -> None:
    of = "num_experts=4,top_k=2,ffn=24,aux_loss=0.1,z_loss=0.01,capacity=1.0"
    torch.set_num_threads(1)
    shape = dataclasses.replace(SHAPE, num_layers=2, experts=of)
    summary = train(small_run(tmp_path, strategy="dp1", steps=3, shape=shape))
    found = records(tmp_path / "run", "routing")
    steps = records(tmp_path / "run", "step")
    assert [each["step"] for each in found] == [1, 2, 3]
    for each, step in zip(found, steps, strict=True):
        total = each["token_loss"] + each["aux_loss"] + each["z_loss"]
        assert math.isclose(total, step["loss"], rel_tol=1e-12)
        assert each["aux_loss"] > 0 and each["z_loss"] > 0 and "experts" not in step
        assert [sum(of) for of in each["counts"]] == [2 * 8 * 24] * 2
    assert summary.routing is not None and summary.routing.counts == found[-1]["counts"]
    assert "balancing loss" in summary.render()
    run = read_run(tmp_path / "run")
    (section,) = [s for s in sections_of_run(run) if s.title == "Routing to experts"]
    assert section.values()[0]["rows"][4][2] == found[-1]["token_loss"]


@pytest.mark.slow
def test_a_worker_of_servers_records_no_routing(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, experts="num_experts=4,top_k=2,ffn=24")
    train(small_run(tmp_path, strategy="dp2:ps", steps=2, shape=shape))
    assert len(records(tmp_path / "run", "step")) == 2
    assert not records(tmp_path / "run", "routing")


def test_a_long_run_records_about_200_steps() -> None:
    for num_steps in (1, 7, 200, 201, 9_999, 1_000_000):
        steps = [n for n in range(1, num_steps + 1) if records_routing(n, num_steps)]
        assert steps[0] == 1 and steps[-1] == num_steps
        least = min(num_steps, ROUTING_RECORDS // 2)
        assert least <= len(steps) <= ROUTING_RECORDS + 2
