from __future__ import annotations

import dataclasses
import json

import pytest

from phalanx.account.planned import DecoderModel, PlannedStep
from phalanx.cli.main import main
from phalanx.errors import StrategyError
from phalanx.models.registry import shape_of
from phalanx.planner.explain import exchanged, sizes
from phalanx.planner.hardware import cluster
from phalanx.planner.price import price
from phalanx.planner.search import Question
from phalanx.planner.software import SOFTWARE
from phalanx.strategy import Strategy


def test_the_bubble_of_a_given_batch_is_not_said_to_need_more_microbatches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The search has tried more microbatches of the same batch: only a larger batch is left."""
    words = "plan --model llama3-1b --cluster h100:8 --strategy pp4,dp2 --sequence 512".split()
    assert main([*words, "--global-batch", "16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a larger batch with more microbatches lowers this part" in said


def test_a_plan_of_experts_says_total_and_active_and_what_ep_sends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan --model olmoe-1b-7b --cluster h100:8 --strategy fsdp2,ep4 --sequence 4096"
    assert main([*words.split(), "--global-batch", "16", "--microbatch", "1", "--json"]) == 0
    out = capsys.readouterr().out
    shown, document = " ".join(out.split()), json.loads(out.splitlines()[-1])
    assert "6.92 B parameters (1.28 B active)" in shown and "active MFU" in shown
    assert document["question"]["active_parameters"] == 1_282_017_280
    (of,) = document["candidates"]
    # Two microbatches, 16 blocks: 4,096 x 8 rows of 2,048 x 2 bytes go there and back, forward and
    # backward, and 3 of 4 leave the rank. A token may have all its experts on one rank, or none.
    rows = 2 * 16 * 4 * 4096 * 8 * 4096
    assert of["exchanged"]["expected"] == pytest.approx(rows * 3 / 4)
    assert of["exchanged"]["least"] == 0
    assert of["exchanged"]["most"] == pytest.approx(rows * (1 + 3) / 2)
    assert of["causes_s"]["ep"] > 0 and of["causes_s"]["counting"] > 0
    # The busiest rank has 15 % more rows; with twice as many as the mean it takes longer.
    slow = [*words.split(), "--global-batch", "16", "--microbatch", "1", "--imbalance", "2"]
    assert main([*slow, "--json"]) == 0
    (slower,) = json.loads(capsys.readouterr().out.splitlines()[-1])["candidates"]
    assert slower["causes_s"]["ep"] == pytest.approx(2 / 1.15 * of["causes_s"]["ep"])
    assert slower["causes_s"]["compute"] > of["causes_s"]["compute"]


def test_experts_are_priced_if_the_first_stage_has_none() -> None:
    """DeepSeek-V3 begins with MLPs: with many stages, the first pipeline rank has no expert."""
    shape = shape_of("olmoe-1b-7b")
    assert shape.experts is not None
    costs: list[tuple[float, float]] = []
    for first_dense in (0, 4):
        experts = dataclasses.replace(shape.experts, first_dense=first_dense)
        of = DecoderModel(dataclasses.replace(shape, num_layers=8, experts=experts), 4096)
        step = PlannedStep(of, Strategy.parse("pp4,fsdp2,ep2,cut:3+2+2+3"), 1, 8)
        cost = price(step, cluster("h100:16"), SOFTWARE["phalanx"])
        # Two blocks of each stage; the first one's have experts or not.
        rows = 8 * 2 * 4 * 4096 * 8 * 2048 * 2
        assert exchanged(step)["expected"] == pytest.approx(rows / 2)
        assert cost.experts_s > 0
        costs.append((cost.experts_s, cost.sent_s))
    (all_experts_s, all_sent_s), (late_experts_s, late_sent_s) = costs
    assert late_experts_s == pytest.approx(all_experts_s)
    assert 0.7 * all_sent_s < late_sent_s <= all_sent_s  # all but those of the embedding


def test_a_run_does_not_resume_on_devices_that_cannot_split_the_model() -> None:
    """A vocabulary of 50,257 rows over tp4 leaves uneven parts, which few degrees of fsdp split."""
    shape = shape_of("gpt2-124m")
    asked = Question(DecoderModel(shape, 1024), cluster("h100:32"), SOFTWARE["phalanx"], 48)
    legal: list[int] = []
    for degree in (1, 2, 3, 4, 6, 8):
        strategy = Strategy.parse("tp4").with_degree("fsdp", degree)
        try:
            _ = asked.step(strategy, 1, 48 // degree).plan
        except StrategyError:
            continue
        legal.append(4 * degree)
    assert 24 not in legal and legal[-1] == 32  # legality is not monotonic
    assert sizes(asked, asked.step(Strategy.parse("fsdp8,tp4"), 1, 6)) == legal


def test_an_interleaved_run_resumes_with_any_number_of_microbatches() -> None:
    """The schedule of five microbatches over two ranks is the one of six without the last."""
    model = DecoderModel(shape_of("gpt2-124m"), 1024)
    asked = Question(model, cluster("h100:10"), SOFTWARE["phalanx"], 10)
    strategy = Strategy.parse("pp2:interleaved/2,dp5")
    assert sizes(asked, asked.step(strategy, 1, 2)) == [2, 4, 10]
