"""Overlap of communication with arithmetic, by axis and by part of the model, from spans.

Every second in which a collective of an axis is under way on a rank has one kind:

    collectives of dp   |------------------------|
    the rank's thread   | backward | wait tp |...| wait dp |
    seconds             |  hidden  | beside  |hid| exposed |

    exposed    the rank waits for this axis, outside of a pipeline's bubble
    beside     the rank waits for another axis, or in the bubble
    hidden     the rank waits for nobody: the communication is beneath its arithmetic

Seconds in which several collectives of an axis are under way count once. Where a backend does not
say when a collective was complete, it is under way until its rank has waited for it, and `hidden`
is an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.measure.spans import CollectiveSpan, ComputeSpan, StepSpans, WaitSpan
from phalanx.report.tabular import Number, Table
from phalanx.report.units import percent

Intervals = list[tuple[float, float]]
"""Intervals in order that do not touch one another."""

TERMS: Final = ("forward", "backward")
"""Terms of the parts beneath which collectives are listed."""

LEAST_SHARE: Final = 0.2
"""Least fraction of a collective, or of a part, for which the one is beneath the other."""

MOST_ROWS: Final = 24
"""Parts that the printed table has; JSON has all."""


@dataclass(frozen=True)
class AxisOverlap:
    """Seconds of an axis's communication in a step, on average over ranks; see the file's top."""

    axis: str
    under_way_s: float
    hidden_s: float
    exposed_s: float
    beside_s: float

    @property
    def hidden_share(self) -> float | None:
        """The hidden fraction of the communication; None without communication."""
        return self.hidden_s / self.under_way_s if self.under_way_s else None


@dataclass(frozen=True)
class Beneath:
    """Collectives that are under way while a part of the model computes, in all steps together."""

    phase: str
    part: str
    op: str
    label: str
    axis: str
    seconds: float
    share_of_part: float
    share_of_collective: float


@dataclass(frozen=True)
class Overlap:
    """Overlap by axis, and which collectives are under way beneath which part, in order of time."""

    axes: list[AxisOverlap]
    beneath: list[Beneath]

    def tables(self) -> list[Table]:
        """Return the tables to print; none without communication."""
        if not self.axes:
            return []
        names = ("under way", "hidden", "exposed", "beside")
        heads = ("axis", *(Number(f"{name} ms", ",.2f", 1e-3) for name in names), "hidden share")
        rows = [
            (a.axis, a.under_way_s, a.hidden_s, a.exposed_s, a.beside_s, percent(a.hidden_share))
            for a in self.axes
        ]
        note = "a step, on average over ranks; beside: while the rank waits for another axis"
        tables = [Table("Overlap by axis", heads, rows, ("hidden share",), note)]
        lines = defaultdict[str, list[str]](list)
        for each in self.beneath:
            name = f"{each.op} {each.label}".rstrip()
            name = f"{name} ({each.axis}, {percent(each.share_of_collective)} of it)"
            lines[f"{each.phase} {each.part}"].append(name)
        left = len(lines) - MOST_ROWS
        if lines:
            rows = [(part, "; ".join(names)) for part, names in [*lines.items()][:MOST_ROWS]]
            note = f"and beneath {left} more parts, see --json" if left > 0 else ""
            tables.append(Table("At the same time", ("beneath", "travel"), rows, (), note))
        return tables


def overlap_of(steps: Iterable[StepSpans]) -> Overlap:
    """Return the overlap of steps, each of one rank; only one is in memory if they are generated.

    Times of one rank are compared with one another alone, so its clock may be wrong.
    """
    num_steps = 0
    sums = defaultdict[str, list[float]](lambda: [0.0] * 4)
    parts_s = defaultdict[tuple[str, str], float](float)
    flights_s = defaultdict[tuple[str, str, str], float](float)
    both_s = defaultdict[tuple[str, str, str, str, str], float](float)
    first_s: dict[tuple[str, str], float] = {}
    for step in steps:
        num_steps += 1
        flights = [span for span in step.spans if isinstance(span, CollectiveSpan)]
        waits = [span for span in step.spans if isinstance(span, WaitSpan)]
        all_waits = union((wait.begin_s, wait.end_s) for wait in waits)
        for axis in dict.fromkeys(span.axis for span in (*flights, *waits)):
            exposed = union(
                (w.begin_s, w.end_s) for w in waits if w.axis == axis and w.term != "bubble"
            )
            moving = [(span.begin_s, span.end_s) for span in flights if span.axis == axis]
            under_way = union((*moving, *exposed))
            num_s, exposed_s = length(under_way), length(exposed)
            # |A and B| = |A| + |B| - |A or B|
            waited_s = num_s + length(all_waits) - length(union((*under_way, *all_waits)))
            values = (num_s, num_s - waited_s, exposed_s, waited_s - exposed_s)
            sums[axis] = [a + b for a, b in zip(sums[axis], values, strict=True)]
        computes = sorted(
            (
                span
                for span in step.spans
                if isinstance(span, ComputeSpan) and span.part and span.term in TERMS
            ),
            key=lambda span: span.begin_s,
        )
        ends_s = [span.end_s for span in computes]
        for span in computes:
            parts_s[span.phase, span.part] += span.end_s - span.begin_s
            at_s = span.begin_s - step.begin_s
            first_s[span.phase, span.part] = min(at_s, first_s.get((span.phase, span.part), at_s))
        for flight in flights:
            name = (flight.op, flight.label, flight.axis)
            flights_s[name] += flight.end_s - flight.begin_s
            for number in range(bisect_right(ends_s, flight.begin_s), len(computes)):
                span = computes[number]
                if span.begin_s >= flight.end_s:
                    break
                seconds = min(flight.end_s, span.end_s) - max(flight.begin_s, span.begin_s)
                both_s[span.phase, span.part, *name] += seconds
    beneath = [
        Beneath(*key, s, s / parts_s[key[:2]], s / flights_s[key[2:]])
        for key, s in both_s.items()
        if s >= LEAST_SHARE * min(parts_s[key[:2]], flights_s[key[2:]]) > 0
    ]
    beneath.sort(key=lambda each: (first_s[each.phase, each.part], -each.share_of_collective))
    axes = [AxisOverlap(axis, *(s / num_steps for s in values)) for axis, values in sums.items()]
    return Overlap(axes, beneath)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Intervals) -> float:
    """Return the length of a union of intervals."""
    return sum(end - begin for begin, end in intervals)
