"""A pipeline's bubble: planned figures against formulas, what runs against what was planned."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forked_torchrun import run_script as run_script_alone
from marks import by_hand
from phalanx.cli.bench import measure
from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.pipeline.schedule import KINDS, Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import Span, most_in_flight, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/pipeline"))
import bubble
from bubble import (
    PipelineConfig,
    joined,
    measured_timeline,
    parse_schedule,
    parts_of,
    plan,
    stage_times,
)
from timed import RankRecord, StageTimes, run_rank
from timeline import Outcome, trace_of

SCRIPT = Path(bubble.__file__)
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved/2", "zb/1", "zb/2", "zbv", "dualpipev")


def schedule_of(text: str, p: int, m: int) -> Schedule:
    axis = parse_schedule(text, p)
    return build_schedule(axis.kind, p, m, axis.option or 1)


def planned(text: str, p: int, m: int, **times_ms: float) -> Outcome:
    config = PipelineConfig(schedule=text, ranks=p, microbatches=m, **times_ms)  # pyright: ignore[reportArgumentType]
    schedule = schedule_of(text, p, m)
    return plan(schedule, stage_times(config, schedule))


def test_every_kind_is_covered() -> None:
    assert {parse_schedule(text, 4).kind for text in SCHEDULES} == set(KINDS)


@pytest.mark.parametrize(
    ("text", "mfu", "in_flight"),
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
def test_four_stages_and_four_microbatches(text: str, mfu: float, in_flight: list[float]) -> None:
    found = planned(text, 4, 4)
    assert found.highest_mfu == pytest.approx(mfu)
    assert found.timeline.bubble == pytest.approx(1 - mfu)
    assert found.in_flight == in_flight


def test_the_table_in_the_document_has_the_planned_figures() -> None:
    page = (Path(__file__).parents[2] / "benchmarks/pipeline/README.md").read_text()
    for text in SCHEDULES:
        found = planned(text, 4, 4, forward_ms=100.0)
        step = f"{1e3 * found.timeline.length:.1f}"
        bubble, mfu = f"{100 * found.timeline.bubble:.1f} %", f"{100 * found.highest_mfu:.1f} %"
        measured = r"[\d.]+( %)?"
        cells = (f"`{text}`", step, measured, bubble, measured, mfu, measured)
        row = " \\| ".join((*cells, f"{max(found.in_flight):g}"))
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
        schedule = schedule_of(text, p, m)
        alike = plan(schedule, StageTimes(1.0, 1.0, 1.0)).timeline.length
        assert simulate(schedule).length == pytest.approx(alike), (text, p, m)


RUNS = [(text, m) for text in SCHEDULES for m in (3, 8)]


def run_all(p: int, message_size: int) -> list[RankRecord]:
    times = StageTimes(5e-4, 5e-4, 5e-4)
    found: list[RankRecord] = []
    for text, m in RUNS:
        axis = parse_schedule(text, p)
        found.append(run_rank(axis.kind, axis.option or 1, m, times, message_size, 2))
    return found


@pytest.mark.parametrize("p", [2, by_hand(4)])
def test_what_runs_is_what_was_planned(p: int, subtests: pytest.Subtests) -> None:
    """Actions, their order on each rank, activations held, and the gradients that come of them."""
    message_size = 300
    ranks: list[list[RankRecord]] = run_ranks(run_all, p, p, message_size, threads=1)
    for number, (text, m) in enumerate(RUNS):
        with subtests.test(schedule=text, microbatches=m):
            schedule = schedule_of(text, p, m)
            records = [of_rank[number] for of_rank in ranks]
            for record, order in zip(records, schedule.orders, strict=True):
                expected = [part for action in order for part in parts_of(action)]
                for waits in record.steps:
                    assert [wait.action for wait in waits] == expected
                    assert all(wait.end - wait.begin >= 5e-4 for wait in waits)
            assert [record.most_held for record in records] == most_in_flight(schedule)
            # Messages hold the number of their microbatch, and so do their gradients.
            gradient = message_size * sum(range(m))
            assert [record.gradients for record in records] == [
                dict.fromkeys(schedule.stages_of(rank), gradient) for rank in range(p)
            ]
            check_order(schedule, records)


def check_order(schedule: Schedule, records: list[RankRecord]) -> None:
    """Nothing begins before what it needs has ended, on the one clock of all ranks."""
    timeline = measured_timeline(schedule, records)
    assert min(lane[0].begin for lane in timeline.lanes) == 0
    spans = {span.action: span for lane in timeline.lanes for span in lane}
    assert {action for order in schedule.orders for action in order} == set(spans)
    for lane in timeline.lanes:
        assert all(one.end <= other.begin for one, other in itertools.pairwise(lane))
    for (op, stage, microbatch), span in spans.items():
        if op == "F" and stage > 0:
            assert spans[Action("F", stage - 1, microbatch)].end <= span.begin
        if op in ("B", "I") and 0 < stage < schedule.num_stages - 1:
            after = [spans.get(Action(each, stage + 1, microbatch)) for each in ("B", "I")]
            (needed,) = [each for each in after if each is not None]
            assert needed.end <= span.begin


def test_an_action_is_joined_of_its_waits() -> None:
    order = [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("I", 1, 1)]
    waits = [
        Span(Action(op, 1, microbatch), float(at), at + 0.5)
        for at, (op, microbatch) in enumerate([("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1)])
    ]
    spans = [(span.begin, span.end) for span in joined(order, waits)]
    assert spans == [(0.0, 0.5), (1.0, 2.5), (3.0, 3.5), (4.0, 4.5)]
    with pytest.raises(AssertionError, match="its actions in their order"):
        joined(order, waits[::-1])


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 9))
def test_a_trace_has_every_action_once(text: str, p: int, m: int) -> None:
    schedule = schedule_of(text, p, m)
    outcome = plan(schedule, StageTimes(0.02, 0.03, 0.01))
    trace = json.loads(json.dumps(trace_of(schedule, [outcome, outcome])))
    for process in range(2):
        events = [event for event in trace["traceEvents"] if event["pid"] == process]
        (name,) = [event for event in events if event["name"] == "process_name"]
        assert name["args"]["name"] == "planned"
        for rank, lane in enumerate(outcome.timeline.lanes):
            drawn = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
            worked = [span for span in lane if span.end > span.begin]
            assert len(drawn) == len(worked)
            for event, (action, begin, end) in zip(drawn, worked, strict=True):
                assert event["name"] == f"{action.op} {action.microbatch}"
                args = {"stage": action.stage, "microbatch": action.microbatch}
                assert event["args"] == args
                assert event["ts"] == pytest.approx(1e6 * begin)
                assert event["ts"] + event["dur"] == pytest.approx(1e6 * end)
            counts = [
                event["args"]["microbatches"]
                for event in events
                if event["ph"] == "C" and event["name"] == f"in flight on rank {rank}"
            ]
            assert max(counts) == outcome.in_flight[rank] and counts[-1] == 0


def run_script(*words: str) -> None:
    measure(list(words), "pipeline", PipelineConfig, bubble.run, "python bubble.py")


def test_it_prints_draws_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--schedule zb/2 --ranks 2 --microbatches 2 --forward-ms 2 --steps 1 --json --out"
    run_script(*words.split(), str(tmp_path))
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines if str(tmp_path) not in line)
    document = json.loads(last)
    assert json.loads((tmp_path / "pipeline-zb-2-2x2.json").read_text()) == document
    assert document["planned"]["bubble"] == pytest.approx(1 / 13)
    assert document["planned"]["in_flight"] == document["measured"]["in_flight"] == [2, 2]
    assert document["measured"]["step_s"] >= document["planned"]["step_s"] == pytest.approx(0.013)
    assert document["measured"]["highest_mfu"] <= 12 / 13
    trace = json.loads((tmp_path / "pipeline-zb-2-2x2.trace.json").read_text())
    of_steps = document["planned"], document["measured"]
    assert (trace["otherData"]["planned"], trace["otherData"]["measured"]) == of_steps
    picture = (tmp_path / "pipeline-zb-2-2x2.svg").read_text()
    assert picture.startswith("<svg")
    for text in ("zb/2, 2 ranks, 4 stages, 2 microbatches", "planned: step 13.0 ms, bubble 7.7 %"):
        assert text in picture


@pytest.mark.parametrize(("factor", "is_said"), [(1.01, False), (1.1, True)])
def test_waits_that_took_too_long_are_said(
    factor: float,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def disturbed(config: PipelineConfig, schedule: Schedule, times: StageTimes) -> Outcome:
        longer = plan(schedule, StageTimes(*(factor * time_s for time_s in times)))
        work_s = plan(schedule, times).work_s
        return dataclasses.replace(longer, name="measured", work_s=work_s)

    monkeypatch.setattr(bubble, "measure", disturbed)
    run_script("--json")
    *lines, last = capsys.readouterr().out.splitlines()
    assert ("stages waited 10.0 % longer than they were told" in "\n".join(lines)) is is_said
    # Time that was spent, and no work done in it, is not in the highest MFU.
    measured = json.loads(last)["measured"]
    assert measured["highest_mfu"] == pytest.approx(8 / 11 / factor)
    assert measured["bubble"] == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        ("--schedule 1f2b", StrategyError, "did you mean '1f1b'"),
        ("--schedule zb", StrategyError, "zb lacks its option CHUNKS"),
        ("--schedule 1f1b,dp2", ConfigError, "must be one kind of pp alone, such as 1f1b"),
        ("--schedule interleaved/1", StrategyError, "CHUNKS must be at least 2"),
        ("--ranks 1", ConfigError, "ranks is 1; expected at least 2"),
        ("--microbatches 0", ConfigError, "microbatches is 0"),
        ("--forward-ms 0", ConfigError, "forward_ms is 0"),
        ("--ranks 5000", ConfigError, "5000 processes take at least"),
    ],
)
def test_bad_settings_are_one_message(words: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        run_script(*words.split())


def process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_ends_with_one_sentence_and_2() -> None:
    done = run_script_alone(str(SCRIPT), "--ranks", "1")
    expected = "phalanx: ranks is 1; expected at least 2; the nearest is 2\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.slow
def test_the_script_runs_on_ranks_of_its_own() -> None:
    done = process("--ranks=2", "--microbatches=2", "--forward-ms=2", "--steps=1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["planned"]["bubble"] == pytest.approx(1 / 3)
