"""Pipeline schedules: the actions of each rank, and the planned and the measured timeline.

The plan is a simulation of the schedule. The measurement runs the same actions on real processes
with the training runtime, and with stages that sleep for the given times (`timed.py`). So the
difference between the timelines is the cost of the runtime and of the messages.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from phalanx.account.fit import check_memory_for
from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.schedule import KINDS, Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import Span, Timeline, most_in_flight, simulate
from phalanx.planner.stages import write_trace
from phalanx.show.shown import Grid, Lanes, Outcome, Shown, ShowRun
from phalanx.show.timed import RankRecord, WaitTimes, run_rank

MESSAGE_NUMBERS: Final = 1024
"""Number of float32 values of an activation, and of its gradient."""

DISTURBED: Final = 0.02
"""Relative excess of the measured waits above which a remark on a disturbed machine is shown."""

MOST_SLOTS: Final = 30
"""Largest length of a drawn timeline, in units of a forward, to fit 100 columns."""

LINE: Final = 84

CHUNKS_ABOUT: Final = {"interleaved": 2, "zb": 1}
"""Kind with a variable number of stages per rank -> default number to show."""


IN_TORCH: Final = {
    "gpipe": "torch.distributed.pipelining.ScheduleGPipe",
    "1f1b": "torch.distributed.pipelining.Schedule1F1B",
    "interleaved": "torch.distributed.pipelining.ScheduleInterleaved1F1B",
    "zb": "torch.distributed.pipelining.ScheduleInterleavedZeroBubble",
    "zbv": "torch.distributed.pipelining.ScheduleZBVZeroBubble",
    "dualpipev": "torch.distributed.pipelining.ScheduleDualPipeV",
}


@dataclass(frozen=True, kw_only=True)
class ShowSchedule(ShowRun):
    """Run a pipeline schedule with stages that wait, and print its lists and timelines."""

    microbatches: Annotated[int, Range(1, 64, "[]")] = 4
    """Microbatches of a step."""
    chunks: Annotated[int | None, Range(1, 8, "[]")] = None
    """Stages a rank, of kinds that leave it open: interleaved and zb."""
    forward_ms: Annotated[float, Range(0, 1000, "(]")] = 10.0
    """Forward of a microbatch on a rank, F; with v stages a rank each takes 1/v of it."""
    input_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradient of the input, I, likewise; as long as the forward if unset. B is I + W."""
    weights_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradients of the weights, W, likewise; as long as the forward if unset."""
    steps: Annotated[int, Range(1, 100, "[]")] = 3
    """Steps to measure, after one that warms up."""
    trace: str | None = None
    """Write the measured timeline into this file, for ui.perfetto.dev."""


def show_schedule(kind: str, config: ShowSchedule) -> Shown:
    """Simulate and measure a schedule, and show both timelines.

    Raises:
        ConfigError: `chunks` is invalid for the kind, memory is too small for the processes, or the
            trace cannot be written.
    """
    schedule = schedule_of(kind, config)
    check_memory_for(config.ranks)
    times = stage_times(config, schedule)
    outcomes = (plan(schedule, times), measure(config, schedule, times))
    if config.trace is not None:
        try:
            write_trace(outcomes[1].timeline, Path(config.trace))
        except OSError as error:
            raise ConfigError(f"cannot write {config.trace}: {error.strerror}") from None
    name = f"{kind}/{len(schedule.stages_of(0))}" if KINDS[kind].chunks is None else kind
    return Shown(
        f"{name}: {config.ranks} ranks, {schedule.num_stages} stages, {config.microbatches} "
        "microbatches",
        [
            "F forward, B backward, I gradient of the input, W gradients of the weights; 2F0 is "
            "the forward of microbatch 0 in stage 2, and 2SEND_F0 sends it to the next.",
            " ".join((KINDS[kind].phases.__doc__ or "").split()),
        ],
        [
            *drawing(schedule),
            lists(schedule),
            Lanes(schedule, outcomes),
            *remarks(config, outcomes[1]),
        ],
        IN_TORCH.get(kind, ""),
    )


def schedule_of(kind: str, config: ShowSchedule) -> Schedule:
    """Build the schedule that `config` describes.

    Raises:
        ConfigError: `chunks` is invalid for the kind, or there are fewer than 2 ranks.
    """
    fixed, asked = KINDS[kind].chunks, config.chunks
    least = 2 if kind == "interleaved" else 1
    if fixed is not None and asked not in (None, fixed):
        raise ConfigError(f"chunks is {asked}; {kind} has {fixed} a rank; leave it out")
    if fixed is None and asked is not None and asked < least:
        raise ConfigError(
            f"chunks is {asked}; {kind} takes at least {least}; the nearest is {least}"
        )
    if config.ranks < 2:
        raise ConfigError(f"ranks is {config.ranks}; a pipeline takes at least 2; the nearest is 2")
    chunks = fixed or asked or CHUNKS_ABOUT[kind]
    return build_schedule(kind, config.ranks, config.microbatches, chunks)


def stage_times(config: ShowSchedule, schedule: Schedule) -> WaitTimes:
    """Return the times of a stage: the stages of a rank divide its time evenly."""
    chunks = len(schedule.stages_of(0))
    forward_ms, input_ms, weights_ms = config.forward_ms, config.input_ms, config.weights_ms
    of_rank_ms = (
        forward_ms,
        forward_ms if input_ms is None else input_ms,
        forward_ms if weights_ms is None else weights_ms,
    )
    return WaitTimes(*(time_ms / 1e3 / chunks for time_ms in of_rank_ms))


def plan(schedule: Schedule, times: WaitTimes) -> Outcome:
    """Simulate the schedule with messages that take no time."""
    timeline = simulate(schedule, times.of)
    return _outcome("planned", timeline, most_in_flight(schedule), schedule, times)


def measure(config: ShowSchedule, schedule: Schedule, times: WaitTimes) -> Outcome:
    """Run the schedule on processes of this host, and measure its timeline."""
    records: list[RankRecord] = run_ranks(
        run_rank,
        config.ranks,
        schedule.kind,
        len(schedule.stages_of(0)),
        config.microbatches,
        times,
        MESSAGE_NUMBERS,
        config.steps,
        threads=1,
    )
    timeline = measured_timeline(schedule, records)
    held = [record.most_held for record in records]
    return _outcome("measured", timeline, held, schedule, times)


def _outcome(
    name: str, timeline: Timeline, held: Sequence[int], schedule: Schedule, times: WaitTimes
) -> Outcome:
    work_s = sum(times.of(action) for order in schedule.orders for action in order)
    return Outcome(name, timeline, tuple(held), work_s)


def measured_timeline(schedule: Schedule, records: Sequence[RankRecord]) -> Timeline:
    """Return a timeline of the median begin and end of each action over the steps.

    Time 0 of a step is the begin of its first action on any rank. Medians keep the order: if in
    every step one action starts after another has ended, it does so in the medians too.
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
    """Return the span of each action of a rank from its waits, which are in execution order."""
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
    """Return the waits that make up an action; see `timed.py`."""
    if action.stage == 0:
        return {"F": [action], "I": []}.get(action.op, [action._replace(op="W")])
    return [action] if action.op != "B" else [action._replace(op=op) for op in ("I", "W")]


def drawing(schedule: Schedule) -> list[Grid]:
    """Return a table of the schedule in units of a forward, a row per rank, if it fits a line."""
    timeline = simulate(schedule)
    if timeline.length > MOST_SLOTS:
        return []
    rows = list[list[str]]()
    for rank, lane in enumerate(timeline.lanes):
        slots = ["."] * round(timeline.length)
        for (op, _, microbatch), begin, end in lane:
            for at in range(round(begin), round(end)):
                slots[at] = f"{op}{microbatch}" if at == round(begin) else f"{op}-"
        rows.append([str(rank), "".join(f"{slot:<3}" for slot in slots).rstrip()])
    return [Grid("in units of a forward, B twice as long", ["rank", "time ->"], rows, ["rank"])]


def lists(schedule: Schedule) -> Grid:
    """Return a table of the lowered actions of each rank, in the order in which they run."""
    rows = list[list[str]]()
    for rank in range(len(schedule.orders)):
        words = " ".join(map(str, lower(schedule, rank)))
        lines = textwrap.wrap(words, LINE, break_long_words=False)
        rows += [[str(rank) if at == 0 else "", line] for at, line in enumerate(lines)]
    return Grid("what each rank runs", ["rank", "actions in order"], rows, ["rank"])


def remarks(config: ShowSchedule, measured: Outcome) -> list[str]:
    """Return sentences on the meaning of the figures, and on disturbance by other work."""
    lines = [
        "Bubble is idle time / (step x ranks), and highest MFU planned work / (step x ranks). In "
        "flight are microbatches whose activations a rank holds; one of v stages counts as 1/v. "
        f"Measured is the median of {config.steps} steps: stages sleep, messages are real."
    ]
    longer = sum(measured.busy) * measured.timeline.length / measured.work_s - 1
    if longer > DISTURBED:
        lines.append(
            f"Stages waited {100 * longer:.1f} % longer than asked: other work disturbed the "
            "machine, or --forward-ms is too short for its clock."
        )
    return lines
