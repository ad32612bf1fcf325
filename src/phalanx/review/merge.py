"""Merge the spans of all ranks into one trace, which Perfetto and chrome://tracing open.

    process   a rank
    lanes     step, compute, wait, then one for each axis; "dp 2" has collectives of dp that overlap
              collectives in the lane "dp", so that spans of a lane never overlap
    arrows    from a send to its receive; from the rank that began a collective first to the others
    counters  memory by kind, microbatches in flight

The files are read twice, one at a time: first for the few numbers by which times are corrected (see
measure.clock and causality), then to write the events as a stream. Format: Chrome's Trace Event
Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np

from phalanx.errors import ConfigError, named
from phalanx.measure import spans
from phalanx.measure.clock import CLOCK, Clocks, clocks
from phalanx.measure.spans import CollectiveSpan, CounterSample, StepSpans, span_files
from phalanx.report.tabular import Number, Part, Table
from phalanx.report.units import size_text, time_text
from phalanx.review.causality import MARGIN_S, MUTUAL, Array, Node, correct
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
    try:
        compared = clocks(run)
    except OSError:
        compared = Clocks([])
        notes.append(f"{run / CLOCK} is missing: ranks are placed by the Unix time of their hosts")

    def scanned() -> Generator[StepSpans]:
        """Yield the wanted steps; keep the times of their collectives."""
        unix_s: float | None = None  # of the instant 0 of rank 0's clock
        for file in span_files(run):
            try:
                if not is_wanted(int(file.parent.name.removeprefix("step"))):
                    continue
                step = spans.read_spans(file)
                begin_s, end_s, error_s = step.begin_s, step.end_s, UNKNOWN_S
                if step.rank in compared:
                    begin_s, end_s = (compared.to_rank0(step.rank, t) for t in (begin_s, end_s))
                    error_s = compared.error_s(step.rank, step.begin_s, step.end_s)
                if unix_s is None:
                    unix_s = step.unix_s - begin_s
                if step.rank not in compared:
                    begin_s = step.unix_s - unix_s
                    end_s = begin_s + step.end_s - step.begin_s
                nodes[file] = _node(step, begin_s, end_s, error_s)
            except (
                OSError,
                ValueError,
                TypeError,
                LookupError,
                ArithmeticError,
                StopIteration,
            ) as error:
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
    ranks_of = defaultdict[int, set[int]](set)
    for node in nodes.values():
        ranks_of[node.head.step].add(node.head.rank)
    num_ranks = max(node.head.num_ranks for node in nodes.values())
    for step, ranks in ranks_of.items():
        if missing := [rank for rank in range(num_ranks) if rank not in ranks]:
            notes.append(f"step {step} has no spans of {named(missing)}")
    if contradicting := correct([*nodes.values()]):
        notes.append(
            f"messages contradict the measured clocks of {contradicting} ranks, whose errors may "
            "be larger than printed; a receive that ends before its send has no arrow"
        )
    errors_s = dict.fromkeys(sorted(set[int]().union(*ranks_of.values())), 0.0)
    for node in nodes.values():
        error_s = node.error_s + float(abs(node.shifts_s).max())
        rank = node.head.rank
        errors_s[rank] = max(errors_s[rank], error_s if rank in compared else inf)
    strategy = next(iter(nodes.values())).head.strategy
    about = {
        "strategy": strategy,
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
        strategy=strategy,
        steps=[*ranks_of],
        num_spans=num_spans,
        num_bytes=num_bytes,
        collectives={axis: dict(ops) for axis, ops in counts.items()},
        clock_errors_s=errors_s,
        overlap=overlap,
        notes=notes,
    )


def _node(step: StepSpans, begin_s: float, end_s: float, error_s: float) -> Node:
    """Return the collectives of a step that lies between two times of rank 0's clock."""
    calls = [span for span in step.spans if isinstance(span, CollectiveSpan)]
    node = Node(
        head=replace(step, spans=[]),
        begin_s=begin_s,
        end_s=end_s,
        error_s=error_s,
        ids=np.array([_call_id(step.step, step.rank, span) for span in calls], np.int64),
        begins_s=np.array([span.begin_s for span in calls], float),
        ends_s=np.array([span.end_s for span in calls], float),
        is_source=np.array([s.op == "send" or s.op in MUTUAL for s in calls], bool),
        is_target=np.array([s.op[:4] == "recv" or s.op in MUTUAL for s in calls], bool),
        shifts_s=np.zeros(2),
    )
    node.begins_s, node.ends_s = node.measured(node.begins_s), node.measured(node.ends_s)
    return node


def _call_id(step: int, rank: int, span: CollectiveSpan) -> int:
    """Return a number of 48 bits that is equal on the ranks of a collective or message."""
    name = f"{span.op} {span.ranks}"
    if span.op in ("send", "recv"):
        ends = (rank, span.peer) if span.op == "send" else (span.peer, rank)
        name = f"message {span.ranks} {ends}"
    text = f"{step} {name} {span.number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest())


def _arrows(nodes: list[Node]) -> list[Array]:
    """Return the end of an arrow, "s" or "f", or "" for each call of each node."""
    ids = np.concatenate([node.ids for node in nodes])
    begins_s = np.concatenate([node.corrected(node.begins_s) for node in nodes])
    ends_s = np.concatenate([node.corrected(node.ends_s) for node in nodes])
    is_recv = np.concatenate([node.is_target & ~node.is_source for node in nodes])
    roles = np.full(len(ids), "")
    order = np.lexsort((begins_s, is_recv, ids))  # of one call, its earliest begin comes first
    is_first = np.ones(len(ids), bool)
    is_first[1:] = ids[order][1:] != ids[order][:-1]
    start = order[is_first][np.cumsum(is_first) - 1]
    is_finish = ~is_first & (ends_s[order] > begins_s[start] + MARGIN_S / 2) & ~is_recv[start]
    roles[order[is_finish]] = "f"
    roles[start[is_finish]] = "s"
    return np.split(roles, np.cumsum([len(node.ids) for node in nodes])[:-1])


def _events(nodes: dict[Path, Node]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, rank by rank, whose files are read one at a time."""
    origin_s = min(
        node.corrected(np.append(node.begins_s, node.begin_s)).min() for node in nodes.values()
    )
    arrows = dict(zip(nodes, _arrows([*nodes.values()]), strict=True))
    of_rank = defaultdict[int, list[Path]](list)
    for file, node in nodes.items():
        of_rank[node.head.rank].append(file)
    for rank, files in sorted(of_rank.items()):
        head = nodes[files[0]].head
        coords = ", ".join(f"{axis} {coord}" for axis, coord in head.coords.items())
        name = f"rank {rank} host {head.host}: {coords}".removesuffix(": ")
        for key, value in (("name", name), ("sort_index", rank)):
            yield {"ph": "M", "pid": rank, "tid": 0, "ts": 0, "name": f"process_{key}",
                   "args": {key: value}}  # fmt: skip
        kinds = ["step", "compute", "wait", *head.axes]
        lanes = defaultdict[str, list[int]](list)  # kind -> ends of its lanes
        for file in files:
            step, node = spans.read_spans(file), nodes[file]
            times_s = [(step.begin_s, step.end_s)]
            times_s += [
                (s.at_s, s.at_s) if isinstance(s, CounterSample) else (s.begin_s, s.end_s)
                for s in step.spans
            ]
            times_s = node.corrected(node.measured(np.array(times_s))) - origin_s
            times: Iterator[tuple[int, int]]  # nanoseconds
            times = map(tuple, np.rint(times_s * 1e9).astype(int).tolist())
            calls = iter(zip(node.ids.tolist(), arrows[file].tolist(), strict=True))
            terms = {f"{term} ms": 1e3 * seconds for term, seconds in step.terms_s.items()}
            slices: list[tuple[int, int, str, str, dict[str, Any], tuple[int, str]]]
            slices = [(*next(times), "step", f"step {step.step}", terms, (0, ""))]
            for span, (begin, end) in zip(step.spans, times, strict=True):
                if isinstance(span, CounterSample):
                    yield {"ph": "C", "pid": rank, "tid": 0, "ts": begin / 1e3,
                           "name": span.counter, "args": span.values}  # fmt: skip
                    continue
                call = (0, "")
                args: dict[str, Any]
                if isinstance(span, spans.ComputeSpan):
                    kind, name = "compute", f"{span.phase} {span.part}".rstrip()
                    args = {"part": span.part, "microbatch": span.microbatch, "term": span.term}
                elif isinstance(span, spans.WaitSpan):
                    kind, name = "wait", f"wait {span.axis}"
                    args = {"axis": span.axis, "term": span.term}
                else:
                    kind, name, call = span.axis, f"{span.op} {span.label}".rstrip(), next(calls)
                    args = {"axis": kind, "op": span.op, "bytes": span.payload_bytes,
                            "number": span.number, "peer": span.peer, "ranks": len(span.ranks),
                            "exposed ms": 1e3 * span.exposed_s}  # fmt: skip
                    end = max(end, begin + 1)
                if end > begin:
                    slices.append((begin, end, kind, name, args | {"phase": span.phase}, call))
            for begin, end, kind, name, args, (call, role) in sorted(
                slices, key=lambda each: (each[0], -each[1])
            ):
                ends = lanes[kind]
                lane = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
                if kind not in kinds:
                    kinds.append(kind)
                at = {"pid": rank, "tid": 1 + LANES * kinds.index(kind) + lane}
                if lane == len(ends):
                    ends.append(0)
                    lane_name = f"{kind} {lane + 1}" if lane else kind
                    for key, value in (("name", lane_name), ("sort_index", at["tid"])):
                        yield {"ph": "M", **at, "ts": 0, "name": f"thread_{key}",
                               "args": {key: value}}  # fmt: skip
                ends[lane] = end
                args = {key: value for key, value in args.items() if value not in (None, "")}
                yield {"ph": "X", **at, "ts": begin / 1e3, "dur": (end - begin) / 1e3,
                       "name": name, "cat": kind, "args": args}  # fmt: skip
                if role:  # bound to the slice around its time, also where that is the end
                    yield {"ph": role, "bp": "e", **at, "name": "call", "cat": "call", "id": call,
                           "ts": (begin if role == "s" else end - 1) / 1e3}  # fmt: skip
