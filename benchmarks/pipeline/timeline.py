"""A timeline of a pipeline with its figures, and as a trace.

The trace is in the Trace Event Format of Chrome (Google 2016), which ui.perfetto.dev opens: a
process for each timeline, a thread for each rank, and a counter of the microbatches that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from phalanx.parallel.pipeline.schedule import Op, Schedule
from phalanx.parallel.pipeline.simulate import Timeline

MEANINGS: Final[dict[Op, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradients of the weights",
}


@dataclass(frozen=True)
class Outcome:
    """A timeline of a schedule, and what follows from it.

    Attributes:
        name: "planned" or "measured".
        timeline: in seconds.
        held: for each rank, the most forwards of one stage whose activations it holds at a time.
        chunks: stages a rank.
        work_s: what all actions together take as planned.
    """

    name: str
    timeline: Timeline
    held: tuple[int, ...]
    chunks: int
    work_s: float

    @property
    def highest_mfu(self) -> float:
        """The MFU if ranks do the planned work at their peak: work / (step x ranks)."""
        return self.work_s / (self.timeline.length * len(self.timeline.lanes))

    @property
    def busy(self) -> list[float]:
        """For each rank, the share of the step in which it is busy."""
        return [
            sum(span.end - span.begin for span in lane) / self.timeline.length
            for lane in self.timeline.lanes
        ]

    @property
    def in_flight(self) -> list[float]:
        """For each rank, the most microbatches that it holds; one in one of v stages is 1/v."""
        return [held / self.chunks for held in self.held]

    def as_dict(self) -> dict[str, Any]:
        """Return its figures, without the spans."""
        return {
            "step_s": self.timeline.length,
            "bubble": self.timeline.bubble,
            "highest_mfu": self.highest_mfu,
            "busy": self.busy,
            "in_flight": self.in_flight,
        }


def stages_text(schedule: Schedule, rank: int) -> str:
    """Return the stages of a rank, such as "stages 0, 7"."""
    stages = schedule.stages_of(rank)
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def write_trace(schedule: Schedule, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the timelines as a trace."""
    path.write_text(json.dumps(trace_of(schedule, outcomes)) + "\n", encoding="utf-8")


def trace_of(schedule: Schedule, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the trace of timelines, as JSON can hold it."""
    return {
        "traceEvents": [
            event
            for process, outcome in enumerate(outcomes)
            for event in _events(schedule, process, outcome)
        ],
        "displayTimeUnit": "ms",
        "otherData": {outcome.name: outcome.as_dict() for outcome in outcomes},
    }


def _events(schedule: Schedule, process: int, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield what a trace has of one timeline: names, actions, and counts; times in microseconds."""
    of_process = {"pid": process}
    yield {"ph": "M", **of_process, "name": "process_name", "args": {"name": outcome.name}}
    for rank, lane in enumerate(outcome.timeline.lanes):
        of_rank = {**of_process, "tid": rank}
        name = f"rank {rank}, {stages_text(schedule, rank)}"
        yield {"ph": "M", **of_rank, "name": "thread_name", "args": {"name": name}}
        held = 0
        for (op, stage, microbatch), begin_s, end_s in lane:
            begin_us, time_us = 1e6 * begin_s, 1e6 * (end_s - begin_s)
            if time_us > 0:
                what = {"name": f"{op} {microbatch}", "cat": MEANINGS[op]}
                when = {"ts": begin_us, "dur": time_us}
                where = {"args": {"stage": stage, "microbatch": microbatch}}
                yield {"ph": "X", **of_rank, **what, **when, **where}
            if op != "I":
                held += 1 if op == "F" else -1
                at_us = begin_us if op == "F" else begin_us + time_us
                count = {"args": {"microbatches": held / outcome.chunks}}
                name = f"in flight on rank {rank}"
                yield {"ph": "C", **of_process, "name": name, "ts": at_us, **count}
