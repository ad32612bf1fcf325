"""A pipeline's bubble: planned figures against formulas."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.schedule import KINDS, Schedule
from phalanx.parallel.pipeline.simulate import simulate
from phalanx.report.tabular import Table
from phalanx.show.schedules import (
    ShowSchedule,
    StageDurations,
    plan,
    schedule_of,
    show_schedule,
    stage_times,
)
from phalanx.show.shown import Lanes, Outcome

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved/2", "zb/1", "zb/2", "zbv", "dualpipev")


def config_of(text: str, p: int, m: int, **times_ms: float) -> tuple[str, ShowSchedule]:
    kind, _, chunks = text.partition("/")
    asked = int(chunks) if chunks else None
    return kind, ShowSchedule(ranks=p, microbatches=m, chunks=asked, **times_ms)  # pyright: ignore[reportArgumentType]


def built(text: str, p: int, m: int) -> Schedule:
    return schedule_of(*config_of(text, p, m))


def planned(text: str, p: int, m: int, **times_ms: float) -> Outcome:
    kind, config = config_of(text, p, m, **times_ms)
    schedule = schedule_of(kind, config)
    return plan(schedule, stage_times(config, schedule))


def in_flight(text: str, p: int, m: int) -> list[float]:
    chunks = len(built(text, p, m).stages_of(0))
    return [held / chunks for held in planned(text, p, m).held]


def test_every_kind_is_covered() -> None:
    assert {text.partition("/")[0] for text in SCHEDULES} == set(KINDS)


@pytest.mark.parametrize(
    ("text", "mfu", "held"),
    [
        ("naive", 1 / 4, [1, 1, 1, 1]),
        ("gpipe", 4 / 7, [4, 4, 4, 4]),
        ("1f1b", 4 / 7, [4, 3, 2, 1]),
        ("interleaved/2", 8 / 11, [4, 4, 3.5, 2.5]),
        ("zb/1", 12 / 15, [4, 4, 4, 4]),
        ("zb/2", 24 / 27, [4, 4, 4, 4]),
        ("zbv", 24 / 30, [2.5, 3, 3.5, 4]),
        ("dualpipev", 24 / 33, [2.5, 3, 3.5, 4]),
    ],
)
def test_four_stages_and_four_microbatches(text: str, mfu: float, held: list[float]) -> None:
    found = planned(text, 4, 4)
    assert found.highest_mfu == pytest.approx(mfu)
    assert found.timeline.bubble == pytest.approx(1 - mfu)
    assert in_flight(text, 4, 4) == held


def test_the_table_in_the_document_has_the_planned_figures() -> None:
    page = (Path(__file__).parents[2] / "benchmarks/pipeline/README.md").read_text()
    for text in SCHEDULES:
        found = planned(text, 4, 4, forward_ms=100.0)
        step = f"{1e3 * found.timeline.length:.1f}"
        bubble, mfu = f"{100 * found.timeline.bubble:.1f} %", f"{100 * found.highest_mfu:.1f} %"
        measured = r"[\d.]+( %)?"
        cells = (f"`{text}`", step, measured, bubble, measured, mfu, measured)
        row = " \\| ".join((*cells, f"{max(in_flight(text, 4, 4)):g}"))
        assert re.search(f"(?m)^\\| {row} \\|$", page), (
            f"benchmarks/pipeline/README.md should hold {row}"
        )


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (3, 9)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 2.5, 1.75)])
def test_bubbles_by_formula(p: int, m: int, times: tuple[float, float, float]) -> None:
    """Idle time of a rank, where F, I and W are those of a rank and p divides m >= 2 p."""
    f, i, w = times

    def idle(text: str) -> float:
        found = planned(text, p, m, forward_ms=f, input_ms=i, weights_ms=w)
        step_ms = 1e3 * found.timeline.length
        assert found.timeline.bubble == pytest.approx(1 - found.highest_mfu)
        assert found.timeline.bubble == pytest.approx(1 - m * (f + i + w) / step_ms)
        return step_ms - m * (f + i + w)

    whole = f + i + w
    assert idle("naive") == pytest.approx((p - 1) * m * whole)
    assert idle("gpipe") == pytest.approx((p - 1) * whole)
    assert idle("1f1b") == pytest.approx((p - 1) * whole)
    for v in (2, 3):
        assert idle(f"interleaved/{v}") == pytest.approx((p - 1) * whole / v)
    for v in (1, 2, 3):
        assert idle(f"zb/{v}") == pytest.approx((p - 1) * (f + i - w) / v)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (3, 9)])
def test_bubbles_of_a_v_by_formula(p: int, m: int) -> None:
    """Where F, I and W are alike; all but zbv wait for more elsewhere."""
    for text in ("zbv", "dualpipev"):
        assert planned(text, p, m).timeline.bubble == pytest.approx((p - 1) / (6 * m + p - 1))


def test_the_first_stage_without_a_gradient_of_its_input_changes_no_plan() -> None:
    """Its I takes nothing and its W both, in place of one each."""
    for text, p, m in itertools.product(SCHEDULES, (2, 3, 4), (1, 4, 7, 12)):
        schedule = built(text, p, m)
        alike = plan(schedule, StageDurations(1.0, 1.0, 1.0)).timeline.length
        assert simulate(schedule).length == pytest.approx(alike), (text, p, m)


def test_it_is_listed_drawn_and_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    kind, config = config_of("zb/2", 2, 2, forward_ms=2.0)
    config = dataclasses.replace(config, trace=str(trace))
    shown = show_schedule(kind, config)
    (lanes,) = (part for part in shown.parts if isinstance(part, Lanes))
    (outcome,) = lanes.outcomes
    assert outcome.timeline.bubble == pytest.approx(1 / 13)
    assert outcome.held == (4, 4) and outcome.timeline.length == pytest.approx(0.013)
    units, lists = (part for part in shown.parts if isinstance(part, Table))
    assert units.rows[0][1].split()[:2] == ["F0", "F1"]
    listed = " ".join(row[1] for row in lists.rows if row[0] != "1").split()
    assert listed[: len(lower(lanes.schedule, 0))] == [*map(str, lower(lanes.schedule, 0))]
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, lanes.schedule.orders))
    config = dataclasses.replace(config, trace=str(tmp_path / "none" / "trace.json"))
    with pytest.raises(ConfigError, match=r"cannot write .*trace.json: No such file"):
        show_schedule(kind, config)


@pytest.mark.parametrize(
    ("text", "p", "expected"),
    [
        ("interleaved/1", 4, "interleaved takes at least 2; the nearest is 2"),
        ("zbv/3", 4, "zbv has 2 a rank"),
        ("1f1b", 1, "a pipeline takes at least 2; the nearest is 2"),
    ],
)
def test_bad_settings_are_one_message(text: str, p: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        built(text, p, 4)
