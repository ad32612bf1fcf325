"""Merge the spans of all ranks into one trace, which Perfetto and chrome://tracing open.

    process   a rank
    lanes     step, compute, wait, then one for each axis; "dp 2" has collectives of dp that overlap
              collectives in the lane "dp", so that spans of a lane never overlap
    arrows    from a send to its receive; from the rank that began a collective first to the others
    counters  memory by kind, microbatches in flight

The files are read twice, one at a time: first for the times of collectives, by which clocks are
corrected (see causality), then to write the events as a stream. Format: Chrome's Trace Event
Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np

from phalanx.errors import ConfigError, named
from phalanx.measure import spans
from phalanx.measure.clock import CLOCK, Comparison, offset, read_comparisons
from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    CounterSample,
    StepSpans,
    WaitSpan,
    span_files,
)
from phalanx.report.tabular import Number, Part, Table
from phalanx.report.units import size_text, time_text
from phalanx.review.causality import MUTUAL, Node, align
from phalanx.review.overlap_by_axis import Overlap, overlap_of
from phalanx.storage import PARTIAL

UNKNOWN_S: Final = 1.0
"""Allowed error of ranks whose clocks were not compared, which are placed by their Unix time."""

LANES: Final = 1000
"""Numbers of lanes that each axis has, for collectives that overlap."""

MOST_CLOCKS: Final = 8
"""Ranks whose clocks the printed table has one by one."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged trace.

    Attributes:
        num_spans: spans in the trace, without steps.
        collectives: axis -> op -> number of calls, summed over ranks.
        clock_errors_s: rank -> largest error of its times; infinite if clocks were not compared.
        notes: sentences on missing files and contradictions.
    """

    file: str
    strategy: str
    steps: list[int]
    num_spans: int
    num_bytes: int
    collectives: dict[str, dict[str, int]]
    clock_errors_s: dict[int, float]
    overlap: Overlap
    notes: list[str]

    def parts(self) -> list[Part]:
        """Return the report to print."""
        rows = [(axis, op, n) for axis, ops in self.collectives.items() for op, n in ops.items()]
        errors = [(f"rank {rank}", error_s) for rank, error_s in self.clock_errors_s.items()]
        if len(errors) > MOST_CLOCKS:  # the least of others than rank 0, and the most
            _, least, *_, most = sorted(errors, key=lambda each: each[1])
            errors = [least, most]
        texts = [(rank, time_text(e) if isfinite(e) else "unknown") for rank, e in errors]
        return [
            f"{self.strategy or 'one process'}; ranks: {len(self.clock_errors_s)}; "
            f"steps: {', '.join(map(str, self.steps))}; spans: {self.num_spans:,}",
            Table("collectives", ("axis", "op", Number("calls of all ranks", ",d")), rows),
            Table("error of clocks, beside rank 0", ("", ""), texts),
            *self.overlap.tables(),
            *self.notes,
            f"wrote {self.file} ({size_text(self.num_bytes)}); open it at https://ui.perfetto.dev",
        ]


def merge(run: Path, out: Path, is_wanted: Callable[[int], bool] = lambda _: True) -> Merged:
    """Write the trace of the steps of a run for whose numbers `is_wanted` is true to `out`.

    Raises:
        ConfigError: the run has no spans of these steps.
        OSError: `out` cannot be written.
    """
    notes: list[str] = []
    nodes: dict[Path, Node] = {}
    counts = defaultdict[str, Counter[str]](Counter)
    numbers: dict[tuple[Any, ...], int] = {}

    def scanned() -> Generator[StepSpans]:
        """Yield the wanted steps; keep the times of their collectives."""
        for file in span_files(run):
            try:
                if not is_wanted(int(file.parent.name.removeprefix("step"))):
                    continue
                step = spans.read_spans(file)
                nodes[file] = _node(step, numbers)
            except (OSError, ValueError, TypeError, LookupError, StopIteration) as error:
                reason = (isinstance(error, OSError) and error.strerror) or "it is damaged"
                notes.append(f"{file} is left out: {reason}")
                continue
            for span in step.spans:
                if isinstance(span, CollectiveSpan):
                    counts[span.axis][span.op] += 1
            yield step

    overlap = overlap_of(scanned())
    if not nodes:
        raise ConfigError(
            f"{run} has no spans{' of these steps' if next(span_files(run), None) else ''}; "
            "`phalanx train --profile wait=1,warmup=1,active=2` records two steps"
        )
    heads = [node.head for node in nodes.values()]
    try:
        known = read_comparisons(run)
    except OSError:
        known = dict[int, list[Comparison]]()
        notes.insert(
            0, f"{run / CLOCK} is missing: ranks are placed by the Unix time of their hosts"
        )
    compared = {*known}
    # Other ranks are placed by their Unix time, beside the first rank whose clock is known.
    first = next((head for head in heads if head.rank in known), heads[0])
    if not known:
        known[first.rank] = [Comparison(first.rank, first.begin_s, 0.0, 0.0)]
    unix_s = first.unix_s - first.begin_s + float(offset(known[first.rank], first.begin_s)[0])
    for head in heads:
        if head.rank not in compared and head is not first:
            offset_s = head.begin_s - head.unix_s + unix_s
            placed = Comparison(head.rank, head.begin_s, offset_s, UNKNOWN_S)
            known.setdefault(head.rank, []).append(placed)
    contradicting = align([*nodes.values()], known)
    ranks_of = defaultdict[int, set[int]](set)
    errors_s = dict.fromkeys(sorted({head.rank for head in heads}), 0.0)
    for node in nodes.values():
        rank = node.head.rank
        ranks_of[node.head.step].add(rank)
        errors_s[rank] = max(errors_s[rank], node.error_s if rank in compared else inf)
    for step, ranks in ranks_of.items():
        if missing := [r for r in range(max(head.num_ranks for head in heads)) if r not in ranks]:
            notes.append(f"step {step} has no spans of {named(missing)}")
    if contradicting:
        notes.append(
            f"messages contradict the measured clocks of {len(contradicting)} ranks, whose errors "
            "may be larger than printed; a receive that ends before its send has no arrow"
        )
    about = {
        "strategy": heads[0].strategy,
        "steps": [*ranks_of],
        "clock error by rank, s": [e if isfinite(e) else None for e in errors_s.values()],
    }
    num_spans = 0
    partial = out.with_name(out.name + PARTIAL)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"traceEvents":[\n')
            for number, event in enumerate(_events(nodes)):
                num_spans += event["ph"] == "X" and event["tid"] > LANES
                file.write(",\n" * (number > 0) + json.dumps(event, separators=(",", ":")))
            file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(about)}}}\n')
        num_bytes = partial.stat().st_size
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return Merged(
        file=str(out),
        strategy=heads[0].strategy,
        steps=[*ranks_of],
        num_spans=num_spans,
        num_bytes=num_bytes,
        collectives={axis: dict(ops) for axis, ops in counts.items()},
        clock_errors_s=errors_s,
        overlap=overlap,
        notes=notes,
    )


def _node(step: StepSpans, numbers: dict[tuple[Any, ...], int]) -> Node:
    """Return the times of a step's collectives; `numbers` has the calls of all ranks."""
    own_s, calls, is_source, is_target = [(step.begin_s, step.end_s)], [-1], [False], [False]
    for span in step.spans:
        if isinstance(span, CollectiveSpan):
            ends = {"send": (step.rank, span.peer), "recv": (span.peer, step.rank)}.get(span.op)
            key = (step.step, ends or span.op, span.ranks, span.number)
            is_mutual = span.op in MUTUAL and len(span.ranks) > 1
            own_s.append((span.begin_s, span.end_s))
            calls.append(numbers.setdefault(key, len(numbers)))
            is_source.append(span.op == "send" or is_mutual)
            is_target.append(span.op == "recv" or is_mutual)
    return Node(
        replace(step, spans=[]),
        *(np.array(own_s, float), np.array(calls), np.array(is_source), np.array(is_target)),
    )


def _events(nodes: Mapping[Path, Node]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, rank by rank, whose files are read one at a time."""
    for rank, of_rank in groupby(
        sorted(nodes, key=lambda file: nodes[file].head.rank), lambda file: nodes[file].head.rank
    ):
        files = [*of_rank]
        head = nodes[files[0]].head
        coords = ", ".join(f"{axis} {coord}" for axis, coord in head.coords.items())
        name = f"rank {rank} host {head.host}: {coords}".removesuffix(": ")
        yield from _named("process", {"pid": rank, "tid": 0}, name, rank)
        kinds = ["step", "compute", "wait", *head.axes]
        lanes = defaultdict[str, list[int]](list)  # kind -> ends of its lanes
        for file in files:
            step, node = spans.read_spans(file), nodes[file]
            calls = zip(node.calls.tolist(), node.roles.tolist(), strict=True)
            terms = {f"{term} ms": 1e3 * seconds for term, seconds in step.terms_s.items()}
            rows = [(step.begin_s, step.end_s, "step", f"step {step.step}", terms, next(calls))]
            for span in step.spans:
                args: dict[str, Any] = {key: getattr(span, key) for key in span.__slots__}
                call = (0, "")
                if isinstance(span, CounterSample):
                    args = {"begin_s": span.at_s, "end_s": span.at_s} | span.values
                    kind, name = "counter", span.counter
                elif isinstance(span, ComputeSpan):
                    kind, name = "compute", f"{span.phase} {span.part}".rstrip()
                elif isinstance(span, WaitSpan):
                    kind, name = "wait", f"wait {span.axis}"
                else:
                    kind, name, call = span.axis, f"{span.op} {span.label}".rstrip(), next(calls)
                    args |= {"ranks": len(span.ranks), "label": "", "bytes": span.payload_bytes,
                             "exposed ms": 1e3 * span.exposed_s}  # fmt: skip
                    del args["payload_bytes"], args["exposed_s"]
                rows.append((args.pop("begin_s"), args.pop("end_s"), kind, name, args, call))
            times_s = node.to_rank0(np.array([row[:2] for row in rows]))
            times = np.rint(times_s * 1e9).astype(int)  # nanoseconds
            times[:, 1] += (times[:, 0] == times[:, 1]) & np.array([row[5][0] > 0 for row in rows])
            for number in np.lexsort((-times[:, 1], times[:, 0])):
                begin, end = times[number].tolist()
                _, _, kind, name, args, (call, role) = rows[number]
                args = {key: value for key, value in args.items() if value not in (None, "")}
                if kind == "counter":
                    yield {"ph": "C", "pid": rank, "tid": 0, "ts": begin / 1e3, "name": name,
                           "args": args}  # fmt: skip
                if end == begin:  # a counter, or too short to be drawn
                    continue
                if kind not in kinds:
                    kinds.append(kind)
                ends = lanes[kind]
                lane = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
                at = {"pid": rank, "tid": 1 + LANES * kinds.index(kind) + lane}
                if lane == len(ends):
                    ends.append(0)
                    yield from _named(
                        "thread", at, f"{kind} {lane + 1}" if lane else kind, at["tid"]
                    )
                ends[lane] = end
                yield {"ph": "X", **at, "ts": begin / 1e3, "dur": (end - begin) / 1e3,
                       "name": name, "cat": kind, "args": args}  # fmt: skip
                if role:  # bound to the slice around its time, also where that is the end
                    yield {"ph": role, "bp": "e", **at, "name": "call", "cat": "call", "id": call,
                           "ts": (begin if role == "s" else end - 1) / 1e3}  # fmt: skip


def _named(kind: str, at: dict[str, int], name: str, index: int) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process or a lane, and place it among the others."""
    for key, value in (("name", name), ("sort_index", index)):
        yield {"ph": "M", **at, "ts": 0, "name": f"{kind}_{key}", "args": {key: value}}
