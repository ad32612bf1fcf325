"""The length of pipelines, beside closed forms of their bubbles and beside the simulation."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from marks import by_hand
from phalanx.account.planned import decoder_step
from phalanx.account.rank_memory import memory
from phalanx.models.registry import shape_of
from phalanx.parallel.pipeline import cut
from phalanx.parallel.pipeline.cut import schedule_of
from phalanx.parallel.pipeline.schedule import Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import simulate
from phalanx.parallel.plan import plan_decoder
from phalanx.planner import stages
from phalanx.planner.hardware import cluster
from phalanx.planner.price import price
from phalanx.planner.software import DEFAULT
from phalanx.planner.stages import StageTimes
from phalanx.strategy import Strategy

EQUAL = StageTimes(forward=1.0, backward=2.0, message=0.0)


def length(text: str, num_microbatches: int, times: tuple[StageTimes, ...]) -> float:
    return stages.step_s(Strategy.parse(text), num_microbatches, times)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("num", [1, 3, 8, 40, 1000])
def test_equal_stages_have_the_bubble_of_1f1b(pp: int, num: int) -> None:
    """Narayanan et al. 2021, section 2.2: p - 1 of m microbatches."""
    assert length(f"pp{pp}", num, (EQUAL,) * pp) == pytest.approx(3 * (num + pp - 1))


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaved_stages_have_a_part_of_it(chunks: int) -> None:
    """The same, (p - 1) / v."""
    times = (StageTimes(1 / chunks, 2 / chunks, 0.0),) * (4 * chunks)
    found = length(f"pp4:interleaved/{chunks}", 16, times)
    assert found == pytest.approx(3 * (16 + 3 / chunks))


KINDS = ("1f1b", "gpipe", "naive", "interleaved/2", "interleaved/4", "zb/1", "zb/2", "zb/3", "zbv",
         "dualpipev")  # fmt: skip
STAGES = {"interleaved/2": 2, "interleaved/4": 4, "zb/2": 2, "zb/3": 3, "zbv": 2, "dualpipev": 2}
"""Kind -> stages of a rank, where it has more than one."""


def uneven(num_stages: int, seed: int, spread: float) -> tuple[StageTimes, ...]:
    """Return stages at random, of which one takes up to 1 + spread times as long as another."""
    draw = random.Random(seed).uniform
    return tuple(
        StageTimes(1 + draw(0, spread), 2 * (1 + draw(0, spread)), draw(0, 0.1))
        for _ in range(num_stages)
    )


def check_simulated(text: str, num: int, times: tuple[StageTimes, ...]) -> None:
    strategy = Strategy.parse(text)
    found = stages.step_s(strategy, num, times)
    simulated = stages.timeline(strategy, num, times).length
    assert found == pytest.approx(simulated, rel=1e-9), (text, num)


@pytest.mark.parametrize(
    "kind", [kind if kind in ("1f1b", "interleaved/2", "zbv") else by_hand(kind) for kind in KINDS]
)
def test_long_steps_are_as_long_as_simulated(kind: str) -> None:
    """Rounds of microbatches that are added are those of the simulation, of uneven stages too."""
    for pp, nums in ((2, (8, 35, 64)), (4, (8, 40, 80))):
        for seed in range(4):
            times = uneven(pp * STAGES.get(kind, 1), seed, (0.01, 0.3)[seed % 2])
            for num in nums if not kind.startswith("interleaved") else (nums[0], nums[-1]):
                check_simulated(f"pp{pp}:{kind}", num, times)


@pytest.mark.slow
@given(
    some.sampled_from(KINDS), some.integers(2, 8), some.integers(1, 40), some.integers(0, 7),
    some.integers(0, 10**6), some.sampled_from([0.0, 0.01, 0.1, 0.3]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_many_steps_are_as_long_as_simulated(
    kind: str, pp: int, rounds: int, rest: int, seed: int, spread: float
) -> None:
    num = rounds * pp + (0 if kind.startswith("interleaved") else rest % pp)
    check_simulated(f"pp{pp}:{kind}", num, uneven(pp * STAGES.get(kind, 1), seed, spread))


def test_steps_of_stages_that_differ_by_three_times_are_nearly_as_long() -> None:
    """A path between ranks is the longest here, which no rank's own actions show."""
    strategy, times = Strategy.parse("pp5:zb/2"), uneven(10, 2130, 2.0)
    simulated = stages.timeline(strategy, 86, times).length
    assert 0.99 < stages.step_s(strategy, 86, times) / simulated < 1 - 1e-6


def test_steps_of_any_number_of_microbatches_are_priced() -> None:
    """Uneven stages: a billion microbatches are bound by the slowest rank, here the first."""
    num, times = 10**9, (StageTimes(1.1, 2.0, 0.0), *(EQUAL,) * 7)
    for text in ("pp8", "pp4:interleaved/2", "pp4:zbv", "pp4:zb/2", "pp4:dualpipev"):
        slowest = 3.1 if text == "pp8" else 6.1
        assert length(text, num, times) == pytest.approx(slowest * num, rel=1e-6), text


def test_a_message_between_two_stages_of_one_rank_is_none() -> None:
    """A V folds on the last rank: 2 of 3 messages each way; interleaved chunks send all 3."""
    times = (StageTimes(1.0, 2.0, 0.5),) * 4
    for text, messages in (("pp2:zbv", 2), ("pp2:dualpipev", 2), ("pp2:interleaved/2", 3)):
        whole = f"{text},tp2"  # beside tp a backward is whole
        assert length(whole, 1, times) == pytest.approx(4 * 3 + 2 * messages * 0.5), text
        assert stages.timeline(Strategy.parse(whole), 1, times).length == length(whole, 1, times)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("pp2:zb/1", "BFIW"),  # the last backwards of a stage may be whole
        ("pp2:zb/1,dp2", "BFIW"),
        ("pp2:zb/1,fsdp2", "BF"),
        ("pp2:zbv,tp2", "BF"),
        ("pp2:dualpipev,recompute:full", "BF"),
    ],
)
def test_the_list_that_runs_is_priced(text: str, ops: str) -> None:
    """Beside axes that make both gradients at once no backward is split, run or priced."""
    strategy = Strategy.parse(text)
    schedule = plan_decoder(strategy, shape_of("demo"), torch.float32).schedule(6)
    assert schedule is not None and schedule == schedule_of(strategy, 6)
    found = {action.op for order in schedule.orders for action in order}
    assert found <= set(ops) and ("W" in found) == ("W" in ops)
    times = (EQUAL,) * schedule.num_stages
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    run = simulate(schedule, lambda action: seconds[action.op])
    assert stages.step_s(strategy, 6, times) == pytest.approx(run.length)


def test_split_backwards_shorten_the_bubble() -> None:
    """Qi et al. 2023: a third of the bubble of 1F1B at its memory."""
    times = (StageTimes(1.0, 2.0, 0.0),) * 4
    ideal = 3 * 8
    bubbles = [length(text, 8, times) - ideal for text in ("pp4", "pp4:zb/1")]
    assert 0 < bubbles[1] <= bubbles[0] / 2


def test_the_slowest_stage_is_found() -> None:
    times = [EQUAL, EQUAL, StageTimes(2.0, 2.0, 0.0), EQUAL]
    assert stages.busiest(times, None) == (0,)
    assert stages.busiest(times, schedule_of(Strategy.parse("pp4"), 8)) == (2,)


def test_messages_lengthen_a_step() -> None:
    late = StageTimes(1.0, 2.0, 0.5)
    assert length("pp4", 8, (late,) * 4) >= 3 * 11 + 0.5 * 3 * 2


@pytest.mark.parametrize("text", ["pp4", "pp4:interleaved/2", "pp2:zbv"])
def test_no_schedule_of_a_million_microbatches_is_made(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Price and memory of a step of so many are worked out from a few rounds."""
    made: list[int] = []

    def build(kind: str, degree: int, num: int, option: int) -> Schedule:
        made.append(num)
        return build_schedule(kind, degree, num, option)

    monkeypatch.setattr(cut, "build_schedule", build)
    strategy, job = Strategy.parse(text), cluster("h100:4")
    found = [
        (price(planned, job, DEFAULT), memory(planned, job.device.kind))
        for num in (64, 10**6)
        for planned in [decoder_step(shape_of("llama3-8b"), strategy, 4096, 1, num, "bfloat16")]
    ]
    assert max(made, default=0) <= 64
    (few, held), (many, held_by_many) = found
    assert many.step_s > 10_000 * few.step_s
    assert held == held_by_many
