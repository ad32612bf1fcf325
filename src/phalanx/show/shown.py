"""Data classes of a topic's result, which tables.py prints and animation.py draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from phalanx.config.fields import Range
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.simulate import Timeline
from phalanx.report.tabular import Table

MOST_RANKS = 8
"""Largest number of ranks: more do not fit a table of 100 columns, and take over a second on a
small machine."""


@dataclass(frozen=True, kw_only=True)
class ShowTopic:
    """Run a method and print it step by step."""

    svg: str | None = None
    """Draw it into this file too, as an animated SVG."""
    json: bool = False
    """Make the last line of standard output one JSON document."""


@dataclass(frozen=True, kw_only=True)
class ShowRun(ShowTopic):
    """Run a method on processes of this host, with small tensors, and print it step by step."""

    ranks: Annotated[int, Range(1, MOST_RANKS, "[]")] = 4
    """Ranks, processes of this host."""


class MessageSent(NamedTuple):
    """A message from rank `source` to rank `target`; `what` describes its content."""

    source: int
    target: int
    what: str
    num_bytes: int


@dataclass(frozen=True)
class Frame:
    """State of all ranks after a step.

    Attributes:
        cells: rank -> values on the rank, one for each head of the strip.
        sent: messages of the step.
    """

    title: str
    cells: Sequence[Sequence[str]]
    sent: Sequence[MessageSent] = ()


@dataclass(frozen=True)
class Strip:
    """A sequence of steps of the same ranks; `heads` are the names of the cells of a rank."""

    title: str
    heads: Sequence[str]
    frames: Sequence[Frame]


@dataclass(frozen=True)
class Outcome:
    """A timeline of a schedule, and figures computed from it.

    Attributes:
        name: "planned" or "measured".
        timeline: timeline, seconds.
        held: for each rank, the peak number of stage forwards whose activations it stores.
        work_s: sum of the planned times of all actions.
    """

    name: str
    timeline: Timeline
    held: Sequence[int]
    work_s: float

    @property
    def highest_mfu(self) -> float:
        """MFU if ranks compute the planned work at peak speed: work / (step x ranks)."""
        return self.work_s / (self.timeline.length * len(self.timeline.lanes))

    @property
    def busy(self) -> list[float]:
        """For each rank, the fraction of the step in which it is busy."""
        return [
            sum(span.end - span.begin for span in lane) / self.timeline.length
            for lane in self.timeline.lanes
        ]


@dataclass(frozen=True)
class Lanes:
    """Timelines of one schedule with a common time scale, one above the other."""

    schedule: Schedule
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class ServedJob:
    """The processes of a job with parameter servers, under several consistencies.

    Attributes:
        shapes: process -> what it stores or sends.
        groups: processes of each worker group, the scheduler first.
        connected: process -> processes to which its sockets have connected.
        tasks: name of a consistency -> worker -> its tasks.
    """

    title: str
    shapes: Mapping[str, str]
    groups: Sequence[Sequence[str]]
    connected: Mapping[str, Sequence[str]]
    tasks: Mapping[str, Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class Sketch:
    """A picture of characters of one width, at most 100 in a line."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Shown:
    """Result of a topic.

    Attributes:
        about: introductory sentences.
        parts: strips, sketches, tables, timelines, processes and sentences, in order.
        in_torch: equivalent call of torch; empty if there is none to show.
        document: document of --json; None for the result itself.
    """

    title: str
    about: Sequence[str]
    parts: Sequence[Strip | Sketch | Table | Lanes | ServedJob | str]
    in_torch: str = ""
    document: Any = None
