"""What a topic shows: parts in order, which one renderer prints (tables.py) and another draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from phalanx.config.fields import Range
from phalanx.parallel.pipeline.schedule import Schedule
from phalanx.parallel.pipeline.simulate import Timeline

MOST_RANKS = 8
"""More do not fit a table of 100 columns, nor a second of a small machine."""


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
    """A message between two ranks."""

    source: int
    target: int
    what: str
    num_bytes: int


@dataclass(frozen=True)
class Frame:
    """The ranks after one step.

    Attributes:
        cells: rank -> what it holds, under the heads of the strip.
        sent: the messages of the step.
    """

    title: str
    cells: Sequence[Sequence[str]]
    sent: Sequence[MessageSent] = ()


@dataclass(frozen=True)
class Strip:
    """Steps one after another, over the same ranks."""

    title: str
    heads: Sequence[str]
    frames: Sequence[Frame]


@dataclass(frozen=True)
class Grid:
    """A table of words; the columns whose heads are in `numbers` are aligned to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """A timeline of a schedule, and figures that follow from it.

    Attributes:
        name: "planned" or "measured".
        timeline: in seconds.
        held: for each rank, the most forwards of one stage whose activations it holds at a time.
        work_s: time of all actions together, as planned.
    """

    name: str
    timeline: Timeline
    held: Sequence[int]
    work_s: float

    @property
    def highest_mfu(self) -> float:
        """The MFU if ranks do the planned work at their peak: work / (step x ranks)."""
        return self.work_s / (self.timeline.length * len(self.timeline.lanes))

    @property
    def busy(self) -> list[float]:
        """For each rank, the part of the step in which it is busy."""
        return [
            sum(span.end - span.begin for span in lane) / self.timeline.length
            for lane in self.timeline.lanes
        ]


@dataclass(frozen=True)
class Lanes:
    """Timelines of a schedule over the same time, one above the other."""

    schedule: Schedule
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class Shown:
    """A topic that was run.

    Attributes:
        about: sentences that come first.
        parts: strips, grids, timelines and sentences, in order.
        in_torch: the call of torch that does the same.
    """

    title: str
    about: Sequence[str]
    parts: Sequence[Strip | Grid | Lanes | str]
    in_torch: str = ""
