"""The planner's choice for a run is the first of its own ranking, and its reasons are true."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.account.planned import DecoderModel
from phalanx.config import BatchConfig, TrainConfig
from phalanx.errors import ConfigError
from phalanx.models.registry import shape_of
from phalanx.planner.calibration import ASSUMED, as_cluster
from phalanx.planner.calibration_file import Calibration
from phalanx.planner.choice import choose
from phalanx.planner.machine import Cluster
from phalanx.planner.search import Candidate, Question, priced_strategy, search
from phalanx.planner.software import DEFAULT
from phalanx.strategy import Strategy
from phalanx.train.job import auto
from phalanx.train.job.request import settle

HERE = Calibration(kind="cpu", device_name="A CPU", num_here=2, compute=ASSUMED)


def machine(num_ranks: int | None = None, memory_bytes: float = 4e9) -> Cluster:
    compute = dataclasses.replace(ASSUMED, memory_bytes=memory_bytes)
    return as_cluster("this", dataclasses.replace(HERE, compute=compute), num_ranks)


def question(memory_bytes: float = 4e9) -> Question:
    shape = dataclasses.replace(shape_of("demo"), num_layers=2)
    return Question(
        DecoderModel(shape, 128, has_documents=True), machine(2, memory_bytes), DEFAULT, 8
    )


def test_the_choice_is_the_fastest_and_the_rejected_are_worse() -> None:
    asked = question()
    found, choice = search(asked), choose(asked)
    assert choice.best.planned == found.candidates[0].planned
    assert len(choice.rejected) == 2
    for each in choice.rejected:
        assert each.left > each.right == choice.best.price.step_s
        strategy, _, microbatch = each.strategy.partition(" with microbatch ")
        again = priced_strategy(asked, Strategy.parse(strategy), int(microbatch))
        assert isinstance(again, Candidate) and again.price.step_s == each.left
    first, *_, last = choice.lines()
    assert first.startswith(f"auto: {choice.best.planned.strategy} with microbatch")
    assert first.endswith(" a step before the run"), "the summary predicts again"
    assert last.startswith("  planned on 2 x A CPU: assumed for one core")


def test_a_named_strategy_leaves_its_microbatch_open() -> None:
    strategy = Strategy.parse("dp2")
    choice = choose(question(), strategy)
    assert choice.best.planned.strategy == strategy
    times = [
        each.price.step_s
        for size in (1, 2, 4)
        if isinstance(each := priced_strategy(question(), strategy, size), Candidate)
    ]
    assert choice.best.price.step_s == min(times) and len(times) == 3


def test_what_does_not_fit_is_said_with_its_inequality() -> None:
    with pytest.raises(ConfigError, match=r"auto: nothing fits 2 x A CPU; .* GiB > 0\.0 GiB"):
        choose(question(memory_bytes=2e6))


def test_a_run_takes_what_the_planner_ranks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "this_machine", lambda num, _: machine(num))
    batch = BatchConfig(global_size=8)
    asked = TrainConfig(strategy="auto", nproc=2, device="cpu", precision="float32", batch=batch)
    request = settle(asked)
    best = search(
        Question(
            DecoderModel(request.shape, asked.corpus.seq_len, "float32", has_documents=True),
            *(machine(2), DEFAULT, 8),
        )
    ).candidates[0]
    assert request.strategy == best.planned.strategy and request.strategy.num_ranks == 2
    assert request.batch.microbatch == best.planned.microbatch
    assert request.settings().strategy == str(best.planned.strategy), "a resumed run keeps it"
    assert "auto:" in request.choice[0] and len(request.choice) == 4


def test_auto_and_a_fixed_accumulation_contradict_each_other() -> None:
    batch = BatchConfig(microbatch="auto", accumulation=2)
    with pytest.raises(ConfigError, match=r"accumulation is 2, but auto chooses it"):
        settle(TrainConfig(batch=batch))
