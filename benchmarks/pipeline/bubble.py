"""A pipeline schedule as planned and as measured: two timelines, a lane a rank.

python benchmarks/pipeline/bubble.py [--schedule zb/1] [--ranks 4] [--out FOLDER] [--help]

The plan is the simulation of the schedule. The measurement runs the same schedule on as many
processes, through the runtime that trains, with stages that wait as long as they are told
(`timed.py`). Beside the plan stands what the runtime and the messages cost.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.table import Table

from phalanx.account.fit import check_memory_for
from phalanx.bench.verb import Found, ResultConfig, Say, table
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.measure.utilization import percent
from phalanx.parallel.pipeline.schedule import Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import Span, Timeline, most_in_flight, simulate
from phalanx.strategy import Axis, Strategy
from timed import RankRecord, StageTimes, run_rank
from timeline import Outcome, write_trace
from timeline_picture import draw_outcomes

NUMBER_BYTES = 4
"""Of one number of a message, float32."""

DISTURBED = 0.02
"""Share by which waits may be too long before it is said."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(ResultConfig):
    """Draw the timeline of a pipeline schedule, as planned and as measured on CPU ranks."""

    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved/CHUNKS, zb/CHUNKS, zbv or dualpipev."""
    ranks: Annotated[int, Range(2)] = 4
    """Ranks of the pipeline, processes of this host."""
    microbatches: Annotated[int, Range(1)] = 8
    """Microbatches of a step."""
    forward_ms: Annotated[float, Range(0, 1000, "(]")] = 30.0
    """Forward of a microbatch on a rank, F; with v stages a rank each takes 1/v of it."""
    input_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradient of the input, I, likewise; as long as the forward if unset. B is I + W."""
    weights_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradients of the weights, W, likewise; as long as the forward if unset."""
    message_kib: Annotated[int, Range(1)] = 64
    """Size of an activation, and of its gradient, that one stage sends another."""
    steps: Annotated[int, Range(1)] = 5
    """Steps to measure, after one that warms up."""


def run(config: PipelineConfig, say: Say) -> Found:
    """Plan, measure, and show both.

    Raises:
        ConfigError: the schedule cannot be read, or memory is short for so many processes.
    """
    axis = parse_schedule(config.schedule, config.ranks)
    check_memory_for(config.ranks)
    chunks = axis.option or 1
    schedule = build_schedule(axis.kind, config.ranks, config.microbatches, chunks)
    times = stage_times(config, schedule)
    planned = plan(schedule, times)
    step_s = planned.timeline.length
    say(
        f"{config.schedule}: {config.ranks} ranks, {schedule.num_stages} stages, "
        f"{config.microbatches} microbatches; {1 + config.steps} steps of about {step_s:.3g} s ..."
    )
    measured = measure(config, schedule, times)
    outcomes = (planned, measured)
    title = (
        f"{config.schedule}, {config.ranks} ranks, {schedule.num_stages} stages, "
        f"{config.microbatches} microbatches"
    )
    return Found(
        name=f"pipeline-{config.schedule.replace('/', '-')}-{config.ranks}x{config.microbatches}",
        shown=[
            _table(outcomes),
            _table_of_ranks(schedule, outcomes),
            *_remarks(config, measured),
        ],
        values={
            "schedule": config.schedule,
            "ranks": config.ranks,
            "stages": schedule.num_stages,
            "microbatches": config.microbatches,
            "stage_times": times._asdict(),
            "message_bytes": 1024 * config.message_kib,
            "steps": config.steps,
            **{outcome.name: outcome.as_dict() for outcome in outcomes},
        },
        files={
            "trace.json": partial(write_trace, schedule, outcomes),
            "svg": partial(draw_outcomes, schedule, outcomes, title),
        },
    )


def parse_schedule(text: str, num_ranks: int) -> Axis:
    """Read a kind of pp with its option, such as "zb/1".

    Raises:
        StrategyError: it cannot be read.
        ConfigError: it has more than a kind of pp.
    """
    strategy = Strategy.parse(f"pp{num_ranks}:{text}")
    if strategy != Strategy(pp=strategy.pp):
        raise ConfigError(
            f"schedule is '{text}'; it must be one kind of pp alone, such as {strategy.pp.kind}"
        )
    return strategy.pp


def stage_times(config: PipelineConfig, schedule: Schedule) -> StageTimes:
    """Return how long each stage takes: a rank's stages share its time evenly."""
    chunks = _chunks(schedule)
    input_ms, weights_ms = config.input_ms, config.weights_ms
    of_rank_ms = (
        config.forward_ms,
        config.forward_ms if input_ms is None else input_ms,
        config.forward_ms if weights_ms is None else weights_ms,
    )
    return StageTimes(*(time_ms / 1e3 / chunks for time_ms in of_rank_ms))


def plan(schedule: Schedule, times: StageTimes) -> Outcome:
    """Simulate the schedule; messages take no time."""
    timeline = simulate(schedule, times.of)
    return _outcome("planned", timeline, most_in_flight(schedule), schedule, times)


def measure(config: PipelineConfig, schedule: Schedule, times: StageTimes) -> Outcome:
    """Run the schedule on processes of this host."""
    records: list[RankRecord] = run_ranks(
        run_rank,
        config.ranks,
        schedule.kind,
        _chunks(schedule),
        config.microbatches,
        times,
        1024 * config.message_kib // NUMBER_BYTES,
        config.steps,
        threads=config.threads,
    )
    timeline = measured_timeline(schedule, records)
    held = [record.most_held for record in records]
    return _outcome("measured", timeline, held, schedule, times)


def _outcome(
    name: str, timeline: Timeline, held: Sequence[int], schedule: Schedule, times: StageTimes
) -> Outcome:
    work_s = sum(times.of(action) for order in schedule.orders for action in order)
    return Outcome(name, timeline, tuple(held), _chunks(schedule), work_s)


def _chunks(schedule: Schedule) -> int:
    return len(schedule.stages_of(0))


def measured_timeline(schedule: Schedule, records: Sequence[RankRecord]) -> Timeline:
    """Return the median begin and end of each action over the steps.

    A step begins with its first action on any rank. Medians keep the order: what never began
    before something else had ended does not in the median.
    """
    steps: list[list[list[Span]]] = []
    for waits in zip(*(record.steps for record in records), strict=True):
        begin_s = min(of_rank[0].begin for of_rank in waits)
        lanes = map(joined, schedule.orders, waits)
        steps.append([[Span(a, b - begin_s, e - begin_s) for a, b, e in lane] for lane in lanes])
    lanes = (
        tuple(
            Span(
                same[0].action,
                statistics.median(span.begin for span in same),
                statistics.median(span.end for span in same),
            )
            for same in zip(*of_rank, strict=True)
        )
        for of_rank in zip(*steps, strict=True)
    )
    return Timeline(tuple(lanes))


def joined(order: Sequence[Action], waits: Sequence[Span]) -> list[Span]:
    """Return when each action of a rank ran, from its waits, which are those of its order."""
    expected = [part for action in order for part in parts_of(action)]
    assert [wait.action for wait in waits] == expected, "a rank runs its actions in their order"
    left, spans = iter(waits), list[Span]()
    for action in order:
        parts = [next(left) for _ in parts_of(action)]
        at = spans[-1].end if spans else waits[0].begin
        ends = [each for part in parts for each in (part.begin, part.end)] or [at]
        spans.append(Span(action, ends[0], ends[-1]))
    return spans


def parts_of(action: Action) -> list[Action]:
    """Return the waits that an action is made of, see `timed.py`."""
    if action.stage == 0:
        return {"F": [action], "I": []}.get(action.op, [action._replace(op="W")])
    return [action] if action.op != "B" else [action._replace(op=op) for op in ("I", "W")]


def _remarks(config: PipelineConfig, measured: Outcome) -> list[str]:
    lines = [
        "bubble = idle time / (step x ranks); highest MFU = planned work / (step x ranks)",
        "in flight: microbatches whose activations a rank holds; one in one of its v stages is 1/v",
        f"measured: median of {config.steps} steps; stages only wait, messages are real",
    ]
    busy_s = sum(measured.busy) * measured.timeline.length
    longer = busy_s / measured.work_s - 1
    if longer > DISTURBED:
        lines.append(
            f"stages waited {percent(longer)} longer than they were told: other work disturbed the "
            "machine, or --forward-ms is too short for its clock"
        )
    return lines


def _table(outcomes: Sequence[Outcome]) -> Table:
    headings = ("", "step ms", "bubble", "highest MFU", "most in flight")
    rows = [
        (
            outcome.name,
            f"{1e3 * outcome.timeline.length:.1f}",
            percent(outcome.timeline.bubble),
            percent(outcome.highest_mfu),
            f"{max(outcome.in_flight):.3g}",
        )
        for outcome in outcomes
    ]
    return table(headings, rows)


def _table_of_ranks(schedule: Schedule, outcomes: Sequence[Outcome]) -> Table:
    names = [outcome.name for outcome in outcomes]
    headings = ("rank", "stages", *(f"busy, {name}" for name in names))
    headings += tuple(f"in flight, {name}" for name in names)
    rows = [
        (
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            *(percent(outcome.busy[rank]) for outcome in outcomes),
            *(f"{outcome.in_flight[rank]:.3g}" for outcome in outcomes),
        )
        for rank in range(len(schedule.orders))
    ]
    return table(headings, rows, num_words=2)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from common import run_as_verb

    run_as_verb("pipeline", PipelineConfig, run)
