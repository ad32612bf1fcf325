"""Pipeline schedules: the actions of each rank, and their timeline by simulation.

The lists are the lists that training runs; benchmarks/pipeline/sleeping.py runs them on processes
whose stages sleep, and compares the measured timeline with this one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from phalanx.config.fields import Range
from phalanx.errors import ConfigError
from phalanx.parallel.pipeline.lowering import lower
from phalanx.parallel.pipeline.schedule import KINDS, Action, Schedule, build_schedule
from phalanx.parallel.pipeline.simulate import Timeline, most_in_flight, simulate
from phalanx.planner.stages import write_trace
from phalanx.report.output import writing
from phalanx.report.tabular import Table
from phalanx.show.shown import MOST_RANKS, Lanes, Outcome, Shown, ShowRun

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
    """Simulate a pipeline schedule, and print its lists and its timeline."""

    ranks: Annotated[int, Range(1, MOST_RANKS, "[]")] = 4
    """Ranks of the pipeline, which is simulated."""
    microbatches: Annotated[int, Range(1, 64, "[]")] = 4
    """Microbatches of a step."""
    chunks: Annotated[int | None, Range(1, 8, "[]")] = None
    """Stages per rank (interleaved, zb)."""
    forward_ms: Annotated[float, Range(0, 1000, "(]")] = 10.0
    """Forward of a microbatch on a rank, F; with v stages a rank each takes 1/v of it."""
    input_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradient of the input, I, likewise; as long as the forward if unset. B is I + W."""
    weights_ms: Annotated[float | None, Range(0, 1000, "(]")] = None
    """Gradients of the weights, W, likewise; as long as the forward if unset."""
    trace: str | None = None
    """Write the timeline into this file, for ui.perfetto.dev."""


class StageDurations(NamedTuple):
    """Times of a stage for one microbatch.

    Attributes:
        forward_s: forward F, seconds.
        input_s: gradient of the input I, seconds.
        weights_s: gradients of the weights W, seconds.
    """

    forward_s: float
    input_s: float
    weights_s: float

    def of(self, action: Action) -> float:
        """Return the time of an action, seconds; the first stage has no gradient of an input."""
        both_s = self.input_s + self.weights_s
        if action.stage == 0:
            return {"F": self.forward_s, "B": both_s, "I": 0.0, "W": both_s}[action.op]
        return {"F": self.forward_s, "B": both_s, "I": self.input_s, "W": self.weights_s}[action.op]


def show_schedule(kind: str, config: ShowSchedule) -> Shown:
    """Simulate a schedule, and show its lists and its timeline.

    Raises:
        ConfigError: `chunks` is invalid for the kind, or the trace cannot be written.
    """
    schedule = schedule_of(kind, config)
    planned = plan(schedule, stage_times(config, schedule))
    if config.trace is not None:
        with writing(config.trace):
            write_trace(planned.timeline, Path(config.trace))
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
            Lanes(schedule, [planned]),
            "Bubble is idle time / (step x ranks), and highest MFU planned work / (step x ranks). "
            "In flight are microbatches whose activations a rank holds; one of v stages counts as "
            "1/v.",
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


def stage_times(config: ShowSchedule, schedule: Schedule) -> StageDurations:
    """Return the times of a stage: the stages of a rank divide its time evenly."""
    chunks = len(schedule.stages_of(0))
    forward_ms, input_ms, weights_ms = config.forward_ms, config.input_ms, config.weights_ms
    of_rank_ms = (
        forward_ms,
        forward_ms if input_ms is None else input_ms,
        forward_ms if weights_ms is None else weights_ms,
    )
    return StageDurations(*(time_ms / 1e3 / chunks for time_ms in of_rank_ms))


def plan(schedule: Schedule, times: StageDurations) -> Outcome:
    """Simulate the schedule with messages that take no time."""
    timeline = simulate(schedule, times.of)
    return outcome_of("planned", timeline, most_in_flight(schedule), schedule, times)


def outcome_of(
    name: str, timeline: Timeline, held: Sequence[int], schedule: Schedule, times: StageDurations
) -> Outcome:
    """Return the timeline `name` with the work that was planned, and the forwards held."""
    work_s = sum(times.of(action) for order in schedule.orders for action in order)
    return Outcome(name, timeline, tuple(held), work_s)


def drawing(schedule: Schedule) -> list[Table]:
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
    return [Table("in units of a forward, B twice as long", ["rank", "time ->"], rows, ["rank"])]


def lists(schedule: Schedule) -> Table:
    """Return a table of the lowered actions of each rank, in the order in which they run."""
    rows = list[list[str]]()
    for rank in range(len(schedule.orders)):
        actions = " ".join(map(str, lower(schedule, rank)))
        lines = textwrap.wrap(actions, LINE, break_long_words=False)
        rows += [[str(rank) if at == 0 else "", line] for at, line in enumerate(lines)]
    return Table("what each rank runs", ["rank", "actions in order"], rows, ["rank"])
