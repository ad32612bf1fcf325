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
from math import inf
from typing import Any, Final

from phalanx.measure.spans import CollectiveSpan, ComputeSpan, StepSpans, WaitSpan
from phalanx.report.tabular import Number, Table
from phalanx.report.units import percent

TERMS: Final = ("forward", "backward")
"""Terms of the parts beneath which collectives are listed."""

LEAST_SHARE: Final = 0.2
"""Least fraction of a collective, or of a part, for which the one is beneath the other."""

MOST_ROWS: Final = 24
"""Parts that the printed table has; JSON has all."""


@dataclass(frozen=True)
class Overlap:
    """Overlap by axis, and which collectives are under way beneath which part, in order of time.

    Attributes:
        axes: seconds of each axis in a step, on average over ranks, and the hidden fraction.
        beneath: phase and part, the collective, their seconds in all steps together, also as a
            fraction of both.
    """

    axes: list[dict[str, Any]]
    beneath: list[dict[str, Any]]

    def tables(self) -> list[Table]:
        """Return the tables to print; none without communication."""
        names = ("under way", "hidden", "exposed", "beside")
        heads = ("axis", *(Number(f"{name} ms", ",.2f", 1e-3) for name in names), "hidden share")
        rows = [[*(axis | {"hidden_share": percent(axis["hidden_share"])}).values()]
                for axis in self.axes]  # fmt: skip
        note = "a step, on average over ranks; beside: while the rank waits for another axis"
        tables = [Table("Overlap by axis", heads, rows, ("hidden share",), note)]
        lines = defaultdict[str, list[str]](list)
        for each in self.beneath:
            name = f"{each['op']} {each['label']}".rstrip()
            name = f"{name} ({each['axis']}, {percent(each['share_of_collective'])} of it)"
            lines[f"{each['phase']} {each['part']}"].append(name)
        left = len(lines) - MOST_ROWS
        rows = [(part, "; ".join(names)) for part, names in [*lines.items()][:MOST_ROWS]]
        note = f"and beneath {left} more parts, see --json" if left > 0 else ""
        tables.append(Table("At the same time", ("beneath", "travel"), rows, (), note))
        return [table for table in tables if table.rows]


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
        for axis in dict.fromkeys(span.axis for span in (*flights, *waits)):
            exposed = [wait for wait in waits if wait.axis == axis and wait.term != "bubble"]
            under_way = [*exposed, *(span for span in flights if span.axis == axis)]
            under_way_s, exposed_s = _length(under_way), _length(exposed)
            hidden_s = _length([*under_way, *waits]) - _length(waits)
            values = (under_way_s, hidden_s, exposed_s, under_way_s - hidden_s - exposed_s)
            sums[axis] = [a + b for a, b in zip(sums[axis], values, strict=True)]
        computes = [span for span in step.spans if isinstance(span, ComputeSpan) and span.part]
        computes = sorted(
            (span for span in computes if span.term in TERMS), key=lambda span: span.begin_s
        )
        ends_s = [span.end_s for span in computes]
        for span in computes:
            key = (span.phase, span.part)
            parts_s[key] += span.end_s - span.begin_s
            first_s[key] = min(span.begin_s - step.begin_s, first_s.get(key, inf))
        for flight in flights:
            name = (flight.op, flight.label, flight.axis)
            flights_s[name] += flight.end_s - flight.begin_s
            for span in computes[bisect_right(ends_s, flight.begin_s) :]:
                if span.begin_s >= flight.end_s:
                    break
                seconds = min(flight.end_s, span.end_s) - max(flight.begin_s, span.begin_s)
                both_s[span.phase, span.part, *name] += seconds
    beneath: list[dict[str, Any]] = [
        {
            "phase": phase, "part": part, "op": op, "label": label, "axis": axis, "seconds": s,
            "share_of_part": s / parts_s[phase, part],
            "share_of_collective": s / flights_s[op, label, axis],
        }
        for (phase, part, op, label, axis), s in both_s.items()
        if s >= LEAST_SHARE * min(parts_s[phase, part], flights_s[op, label, axis]) > 0
    ]  # fmt: skip
    beneath.sort(key=lambda e: (first_s[e["phase"], e["part"]], -e["share_of_collective"]))
    names = ("under_way_s", "hidden_s", "exposed_s", "beside_s")
    axes = [
        {"axis": axis}
        | {name: value / num_steps for name, value in zip(names, values, strict=True)}
        | {"hidden_share": values[1] / values[0] if values[0] else None}
        for axis, values in sums.items()
    ]
    return Overlap(axes, beneath)


def _length(spans: Iterable[CollectiveSpan | WaitSpan]) -> float:
    """Return the seconds in which at least one of the spans is under way."""
    seconds, last_s = 0.0, -inf
    for span in sorted(spans, key=lambda span: span.begin_s):
        seconds += max(0.0, span.end_s - max(span.begin_s, last_s))
        last_s = max(last_s, span.end_s)
    return seconds
