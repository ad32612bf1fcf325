"""Synthetic spans of jobs whose ranks have clocks that are wrong, and checks of merged traces."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from phalanx.measure.clock import CLOCK, comparison_of
from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    CounterSample,
    Span,
    StepSpans,
    WaitSpan,
)

Clock = Callable[[float], float]


def write_clocks(run: Path, clocks: list[Clock], ends_s: list[float], seed: int = 0) -> None:
    """Compare clocks at the true times `ends_s`, with messages of random delays."""
    draw = random.Random(seed)
    (run / CLOCK).parent.mkdir(parents=True, exist_ok=True)
    with (run / CLOCK).open("a") as file:
        for end_s in ends_s:
            for rank, clock in enumerate(clocks):
                t_s, rounds = end_s, list[tuple[float, float, float]]()
                for _ in range(4):
                    there_s, back_s = draw.expovariate(5e3), draw.expovariate(2e3)
                    sent_s, read_s = clocks[0](t_s), clock(t_s + there_s)
                    t_s += there_s + back_s
                    rounds.append((sent_s, read_s, clocks[0](t_s)))
                made = comparison_of(rank, rounds)
                values = {"rank": rank, "at_s": made.at_s, "offset_s": made.offset_s,
                          "error_s": made.error_s}  # fmt: skip
                if rank == 0:
                    values |= {"offset_s": 0.0, "error_s": 0.0}
                file.write(json.dumps(values) + "\n")


def bent(ahead_s: float, drift: float) -> Clock:
    return lambda t_s: t_s * (1 + drift) + ahead_s


def write_step(
    run: Path, step: int, clocks: list[Clock], begin_s: float, axes: dict[str, int],
    spans_of: Callable[[int], list[Span]],
) -> None:  # fmt: skip
    """Write the spans of a step, given in true seconds after `begin_s`, by the ranks' clocks."""
    for rank, clock in enumerate(clocks):
        coords, left = dict[str, int](), rank
        for axis, size in reversed(axes.items()):
            coords[axis], left = left % size, left // size
        spans = spans_of(rank)
        last_s = max(s.at_s if isinstance(s, CounterSample) else s.end_s for s in spans)

        def own(span: Span, clock: Clock = clock) -> Span:
            values = {name: getattr(span, name) for name in span.__dataclass_fields__}
            for name in ("begin_s", "end_s", "at_s"):
                if name in values:
                    values[name] = clock(begin_s + values[name])
            return type(span)(**values)

        StepSpans(
            step=step, rank=rank, num_ranks=len(clocks), host="ab"[rank % 2],
            strategy=",".join(f"{axis}{size}" for axis, size in axes.items()), axes=axes,
            coords={axis: coords[axis] for axis in axes}, begin_s=clock(begin_s),
            end_s=clock(begin_s + last_s), unix_s=1.7e9 + begin_s, terms_s={"forward": last_s},
            spans=[own(span) for span in spans],
        ).write(run)  # fmt: skip


def collective(
    begin_s: float, end_s: float, op: str, axis: str, ranks: tuple[int, ...], number: int,
    peer: int | None = None, label: str = "", num_bytes: int = 64,
) -> CollectiveSpan:  # fmt: skip
    return CollectiveSpan(
        begin_s, end_s, 0.0, op, axis, ranks, number, peer, num_bytes, "forward", label
    )


def compute(begin_s: float, end_s: float, phase: str, part: str = "") -> ComputeSpan:
    return ComputeSpan(begin_s, end_s, phase, phase, 0, part)


def wait(begin_s: float, end_s: float, axis: str, term: str = "communication") -> WaitSpan:
    return WaitSpan(begin_s, end_s, term, "backward", axis)


def checked(file: Path) -> list[dict[str, Any]]:
    """Return the events of a trace after checking what every trace must satisfy."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    lanes = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    names = defaultdict[tuple[int, int], list[str]](list)
    flows = defaultdict[int, list[dict[str, Any]]](list)
    for event in events:
        assert event["ph"] in "MXCsf"
        assert all(type(event[key]) in (int, float) for key in ("pid", "tid", "ts"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(
                (event["ts"], round(event["ts"] + event["dur"], 3))
            )
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]].append(event["args"]["name"])
        if event["ph"] in "sf":
            assert event["ph"] == "s" or event["bp"] == "e"
            flows[event["id"]].append(event)
    for lane, spans in lanes.items():
        assert len(names[lane]) == 1
        for (_, end), (begin, _) in pairwise(sorted(spans)):
            assert end <= begin
    for ends in flows.values():
        (start,) = (end for end in ends if end["ph"] == "s")
        assert len(ends) > 1
        for end in ends:
            assert end is start or end["pid"] != start["pid"]
            assert end["ts"] >= start["ts"]
            assert any(b <= end["ts"] < e for b, e in lanes[end["pid"], end["tid"]])
    return events
