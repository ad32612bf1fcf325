"""Render the console output at the end of a run: the result, and with --report, tables."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.comm.ledger import Entry
from phalanx.measure.summary import summary_table
from phalanx.report.tabular import Line, Number, Part, Table, columns
from phalanx.report.units import MIB, percent, size_text

if TYPE_CHECKING:
    from phalanx.train.report.summary import Summary

TEXT = 12
"""Column at which the texts of the result begin."""

SAMPLE_LINES = 8
"""Most lines of the generated text that are shown; the records have all of the text."""


def parts_of(summary: Summary, *, report: bool) -> Iterator[Part]:
    """Yield the tables if `report` is set, and the result last, at the bottom of the screen."""
    yield ""
    if summary.straggler is not None:
        yield from (summary.straggler, "")
    if report:
        yield from _tables(summary)
    yield columns([*_results(summary)], TEXT)
    if lines := "".join(map(_shown, summary.sample)).splitlines():
        more = ["..."] if len(lines) > SAMPLE_LINES else []
        yield "\nThe model writes:"
        yield from (Line(line, "italic") for line in [*lines[:SAMPLE_LINES], *more])
    yield ""
    for name, path in [*summary.paths.items(), ("resume", summary.resume)]:
        yield Line(f"{name:<{TEXT}}{path}", wraps=False)
    if not report and summary.steps is not None:
        yield columns([("tables", "--report prints where time, bytes and memory went")], TEXT)


def _results(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the (name, text) rows of the result; omit unknown values."""
    first, last = summary.bits_per_byte_first, summary.bits_per_byte_last
    if first is not None and last is not None:
        is_share = math.isfinite(last) and first > 0
        share = f", {last / first:.2f} of where this run began" if is_share else ""
        yield "validation", f"{first:.3f} -> {last:.3f} bits per byte{share}"
    elif summary.evaluations:
        before, after = summary.evaluations[0], summary.evaluations[-1]
        words = [f"loss {before.loss:.4f} -> {after.loss:.4f}"]
        for name, value in after.metrics.items():
            words.append(f"{name} {before.metrics[name]:.4f} -> {value:.4f}")
        yield "validation", ", ".join(words)
    if summary.best is not None:
        yield "best", summary.best
    if summary.loss is not None:
        unit = "nats a token " if summary.unit == "tokens" else ""
        yield "loss", f"{summary.loss:.4f} {unit}in the last step"
    if summary.routing is not None:
        yield "experts", summary.routing.text()
    steps = summary.steps
    if steps is not None and steps.doubt is not None:
        yield "speed", steps.doubt
    elif steps is not None:
        rates = f"{summary.units_per_s:,.0f} {summary.unit}/s, "
        rates += f"{summary.batches_per_s:.3g} global batches/s"
        step = f"{1e3 * steps.wall_s:,.1f} ms a step (median of {steps.num_steps:,})"
        yield "speed", f"{rates}, {step}"
        terms = sorted(steps.shares.items(), key=lambda item: -item[1])
        yield "step", ", ".join(f"{term} {percent(s)}" for term, s in terms if s >= 0.0005)
    if summary.served_text is not None:
        yield "servers", summary.served_text
    if summary.utilization is not None and (brief := summary.utilization.brief()) is not None:
        yield "MFU", f"{_whose(summary)}{brief}"
    held, memory = "", summary.memory
    if memory is not None and memory.doubt is None:
        held = f"{size_text(memory.largest_bytes)} of tensors at the peak of any rank, in "
        held += f"{memory.peak_phase}; "
    yield "memory", f"{held}rank 0's process had up to {size_text(summary.resident_bytes)} in RAM"
    if summary.predicted is not None:
        yield "predicted", summary.predicted.line()
    yield (
        "time",
        f"{_duration(summary.seconds)} for {summary.num_steps:,} steps, evaluations and saves",
    )
    yield "run", summary.run


def _tables(summary: Summary) -> Iterator[Part]:
    """Yield the tables, each with an empty line below."""
    if summary.placement is not None and len(summary.placement.hosts) == 1:  # else it was shown
        yield from (summary.placement.table(), "")
    if summary.steps is not None:
        if summary.ranks is None or summary.steps.doubt is not None:
            yield summary_table(summary.steps)
        else:
            yield summary.ranks.table()
        yield from (summary.advice or "", "")
        if summary.predicted is not None and summary.predicted.time_s:
            yield from (summary.predicted.table(), "")
    if summary.sent:
        yield from (_sent_table(summary.sent), "")
    if summary.memory is not None:
        judged = summary.predicted
        both = (judged.bytes, judged.bytes_at_peak) if judged is not None else ()
        expected = ({name: int(each.predicted) for name, each in of.items()} for of in both)
        yield from (summary.memory.table(*expected), summary.memory.text(), "")
    elif summary.no_memory is not None:
        yield from (summary.no_memory, "")
    if summary.utilization is not None:
        yield from (f"{_whose(summary)}{summary.utilization.text()}", "")


def _whose(summary: Summary) -> str:
    """Return the worker that the MFU is of, with parameter servers."""
    return "" if summary.served_text is None else "worker 0: "


def _sent_table(entries: list[Entry]) -> Table:
    sizes = (Number(f"{name} MiB", ".3f", MIB) for name in ("payload", "sent"))
    heads = ("phase", "axis", "collective", Number("calls", "d"), *sizes)
    rows = [(e.phase, e.axis, e.op, e.calls, e.payload_bytes, e.sent_bytes) for e in entries]
    return Table("What one rank sends in a step", heads, rows)


def _shown(character: str) -> str:
    """Return `character`, or a middle dot if it is a control or format character."""
    is_kept = character == "\n" or unicodedata.category(character) not in ("Cc", "Cf")
    return character if is_kept else "\u00b7"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"
