"""Pipelines whose stages sleep: what runs is what was planned."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from bisect import bisect
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.comm.comm import Ranks
from phalanx.comm.together import barrier
from phalanx.comm.waits import around_waits
from phalanx.config.profile_options import ProfileOptions
from phalanx.launch.local import run_ranks
from phalanx.measure.profile import Profile
from phalanx.measure.timer import StepTimer
from phalanx.parallel.pipeline.runtime import Pipeline
from phalanx.parallel.pipeline.schedule import Action, Schedule
from phalanx.parallel.pipeline.simulate import Span, most_in_flight, simulate
from phalanx.review.merge import merge
from phalanx.show.schedules import ShowSchedule, StageDurations, plan, schedule_of, stage_times
from phalanx.strategy import Strategy
from phalanx.train.step import TERMS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/pipeline"))

from sleeping import (
    MeasureSchedule,
    RankRecord,
    TimedStages,
    half_square,
    joined,
    measure,
    measured_timeline,
    parts_of,
    remarks,
    run_rank,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved/2", "zb/1", "zb/2", "zbv", "dualpipev")


def built(text: str, p: int, m: int) -> Schedule:
    kind, _, chunks = text.partition("/")
    config = ShowSchedule(ranks=p, microbatches=m, chunks=int(chunks) if chunks else None)
    return schedule_of(kind, config)


RUNS = [(text, m) for text in SCHEDULES for m in (3, 8)]


def run_all(p: int, message_size: int) -> list[RankRecord]:
    times = StageDurations(5e-4, 5e-4, 5e-4)
    found: list[RankRecord] = []
    for text, m in RUNS:
        schedule = built(text, p, m)
        chunks = len(schedule.stages_of(0))
        found.append(run_rank(schedule.kind, chunks, m, times, message_size, 2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4])
def test_what_runs_is_what_was_planned(p: int, subtests: pytest.Subtests) -> None:
    """Actions, their order on each rank, activations held, and the gradients that come of them."""
    message_size = 300
    ranks: list[list[RankRecord]] = run_ranks(run_all, p, p, message_size, threads=1)
    for number, (text, m) in enumerate(RUNS):
        with subtests.test(schedule=text, microbatches=m):
            schedule = built(text, p, m)
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


def profile_all(p: int, times: StageDurations, folder: str) -> list[list[float]]:
    """Profile each schedule in a run of its own; return its bubble on this rank in each step."""
    comm, ledger = Ranks(strategy := Strategy.parse(f"pp{p}")), list[list[float]]()
    for number, text in enumerate(SCHEDULES):
        schedule = built(text, p, 4)
        stages = TimedStages(schedule.num_stages, schedule.stages_of(comm.rank), times, 300)
        pipeline = Pipeline(stages, comm, lambda _, schedule=schedule: schedule)
        options = ProfileOptions(wait=0, warmup=1, active=3)
        profile = Profile(
            Path(folder, str(number)), comm, strategy, options,
            model=nn.Linear(1, 1), optimizers=None, phases=TERMS, say=print,
        )  # fmt: skip
        timer = StepTimer()

        def phase(name: str, timer: StepTimer = timer) -> AbstractContextManager[None]:
            return timer.phase(TERMS[name])

        with around_waits(lambda _, axis, timer=timer: timer.wait(axis)):
            for step in range(1, 5):
                barrier()
                profile.begin_step(step)
                timer.begin_step()
                pipeline(range(4), torch.tensor, half_square, phase)
                with phase("metrics"):
                    comm.all_reduce(torch.zeros(1), "loss")
                profile.end_step(timer.end_step().terms_s, timer.switches)
        profile.close(is_failed=False)
        ledger.append([step.terms_s["bubble"] for step in timer.history][1:])
    return ledger


@pytest.mark.slow
def test_the_traced_bubble_and_microbatches_in_flight_are_those_of_the_simulation(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    p, times = 4, StageDurations(0.1, 0.1, 0.1)
    ledger: list[list[list[float]]] = run_ranks(
        profile_all, p, p, times, str(tmp_path), threads=1
    )  # fmt: skip
    for number, text in enumerate(SCHEDULES):
        schedule = built(text, p, 4)
        out = tmp_path / str(number) / "merged.json"
        assert not merge(out.parent, out).notes
        events = json.loads(out.read_text())["traceEvents"]
        begins = [[e["ts"] for e in events if (e["pid"], e.get("cat")) == (r, "step")]
                  for r in range(p)]  # fmt: skip
        traced_s = [Counter[object]() for _ in begins[0]]
        for event in events:
            if event["ph"] == "X" and "term" in event["args"]:
                step, args = bisect(begins[event["pid"]], event["ts"]) - 1, event["args"]
                key = event["pid"] if args["term"] == "bubble" else args.get("part")
                traced_s[step][key] += event["dur"] / 1e6
        # Other work on these cores lengthens a wait; the simulation takes waits as they were.
        timelines = [
            simulate(schedule, lambda action, of_step=of_step: of_step[str(action)])
            for of_step in traced_s
        ]
        for rank in range(p):
            own = [e["args"] for e in events if (e["pid"], e["name"]) == (rank, "in flight")]
            idle_s = [
                each.length - sum(end - begin for _, begin, end in each.lanes[rank])
                for each in timelines
            ]
            bubble_s = [of_step[rank] for of_step in traced_s]
            with subtests.test(schedule=text, rank=rank):
                assert max(args["microbatches"] for args in own) == most_in_flight(schedule)[rank]
                assert bubble_s == pytest.approx(ledger[rank][number], abs=1e-3)
                nearest = min(zip(bubble_s, idle_s, strict=True), key=lambda e: abs(e[0] - e[1]))
                assert nearest[0] == pytest.approx(nearest[1], rel=0.05, abs=0.01)


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


def test_a_plan_and_its_measurement_hold_the_same_work() -> None:
    config = MeasureSchedule(ranks=2, microbatches=2, chunks=2, forward_ms=2.0, steps=1)
    schedule = schedule_of("zb", config)
    times = stage_times(config, schedule)
    first, second = plan(schedule, times), measure(config, schedule, times)
    assert first.held == second.held == (4, 4)
    assert second.timeline.length >= first.timeline.length == pytest.approx(0.013)
    assert second.highest_mfu <= 12 / 13


@pytest.mark.parametrize(("factor", "is_said"), [(1.01, False), (1.1, True), (3.0, True)])
def test_waits_that_took_too_long_are_said(factor: float, is_said: bool) -> None:
    config = MeasureSchedule(ranks=4, microbatches=8)
    schedule = schedule_of("1f1b", config)
    times = stage_times(config, schedule)
    longer = plan(schedule, StageDurations(*(factor * time_s for time_s in times)))
    measured = dataclasses.replace(longer, work_s=plan(schedule, times).work_s)
    lines = " ".join(remarks(config, measured))
    said = f"Stages waited {100 * (factor - 1):.1f} % longer than asked"
    assert (said in lines) is is_said
    # Time that was spent, and no work done in it, is not in the highest MFU.
    assert measured.highest_mfu == pytest.approx(8 / 11 / factor)
    assert measured.timeline.bubble == pytest.approx(3 / 11)
