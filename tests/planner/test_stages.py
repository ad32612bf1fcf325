"""The length of pipelines, beside closed forms of their bubbles and beside the simulation."""

from __future__ import annotations

import pytest
import torch

from phalanx.models.registry import shape_of
from phalanx.parallel.pipeline.cut import schedule_of
from phalanx.parallel.pipeline.simulate import simulate
from phalanx.parallel.plan import plan_decoder
from phalanx.planner import stages
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


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "interleaved/2", "zb/1", "zbv", "dualpipev"])
def test_long_steps_are_as_long_as_simulated(kind: str) -> None:
    """Rounds of microbatches that are added are those of the simulation.

    Uneven chunks that are interleaved have not settled after two rounds: they differ by up to 2 %.
    """
    strategy = Strategy.parse(f"pp4:{kind}")
    num_stages = 4 * {"interleaved/2": 2, "zbv": 2, "dualpipev": 2}.get(kind, 1)
    times = tuple(
        StageTimes(1 + 0.1 * (stage % 3), 2 + 0.2 * (stage % 2), 0.05)
        for stage in range(num_stages)
    )
    for num in (8, 12, 20, 40):
        found = stages.step_s(strategy, num, times)
        apart = 0.02 if kind == "interleaved/2" and num == 40 else 1e-9
        assert found == pytest.approx(stages.timeline(strategy, num, times).length, rel=apart)


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
