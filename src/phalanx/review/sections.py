"""The sections of a report, made of the values of `run_values`: for the screen and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from phalanx.report.inline_svg import Chart, SpanLanes
from phalanx.report.html import Section
from phalanx.report.tabular import Line, Number, Part, Table
from phalanx.report.units import MIB

Parts = list[Part | Chart | SpanLanes]

MAX_DRAWN: Final = 8
"""Most ranks whose memory is drawn."""


def significant(value: float) -> str:
    """Return a number with four digits, at most five of them behind the point."""
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(digits, 0), 5)}f}"


def ms(name: str) -> Number:
    """Return the head of a column of times."""
    return Number(f"{name}, ms", significant, 1e-3)


def mib(name: str) -> Number:
    """Return the head of a column of sizes."""
    return Number(f"{name}, MiB", significant, MIB)


_KINDS: Final = (
    *("forward", "backward", "optimizer", "data", "other", "collective"),
    *("wait: bubble", "wait: communication"),
)
"""Kinds of the spans of a timeline, in the order of their colors."""

SHARE: Final = Number("share, %", ".1f", 0.01)
ERROR: Final = Number("error, %", "+.1f", 0.01)


def sections_of_run(run: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of one run; `run` is a keyed document."""
    yield Section("In short", [Line(line, "bold") for line in run["lines"]])
    for title, part in (
        ("Learning curve", "curve"),
        ("Planned beside measured", "planned"),
        ("Where the time of a step went", "ledger"),
        ("Timeline of a step", "timeline"),
        ("Overlap of communication with arithmetic", "overlap"),
        ("Bytes by axis", "bytes"),
        ("Memory", "memory"),
        ("MFU and HFU", "utilization"),
    ):
        if run[part] is not None:
            yield Section(title, [*_PARTS[part](run[part])])
    if run["environment"]:
        yield Section("Environment", [Table("", ("", ""), [*run["environment"].items()])])
    yield Section("Commands", [*_commands(run)])
    rows = [
        (name, str(value)) if isinstance(value, bool) else (name, value)
        for name, value in run["settings"].items()
    ]
    heads = ("setting", Number("value", "g"))
    yield Section("Settings", [Table("", heads, rows)], is_detail=True)


def sections_of_comparison(document: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections that compare the runs of a keyed document."""
    compared, runs = document["comparison"], document["runs"]
    names = compared["names"]
    yield Section("In short", [Line(line, "bold") for line in compared["lines"]])
    rows = [[row["what"], *map(_shown, row["values"])] for row in compared["settings"]]
    heads = ["setting", *(Number(name, "g") for name in names)]
    if rows:
        yield Section("What differs in settings", [Table("", heads, rows)])
    for part, title in (("loss", "Training loss"), ("validation", "Validation loss")):
        curves = {
            name: run["curve"][part]
            for name, run in zip(names, runs, strict=True)
            if run["curve"] and run["curve"][part]
        }
        if curves:
            unit = next(run["curve"]["unit"] for run in runs if run["curve"])
            yield Section(title, [_curve_chart(title, curves, unit)])
    for part, title, unit in (
        ("time_s", "Time of a step, median ms", 1e-3),
        ("sent", "MiB that a rank sends in a step", MIB),
        ("memory", "Memory of rank 0 at its peak, MiB", MIB),
    ):
        heads = ["what", *(Number(name, significant, unit) for name in names)]
        heads += [Number(f"{name} / {names[0]}", ".2f") for name in names[1:]]
        rows = [[row["what"], *row["values"], *row["ratios"][1:]] for row in compared[part]]
        if rows:
            yield Section(title, [Table("", heads, rows)])
    lines = [line for run in runs for line in (*run["lines"], Line(run["folder"], "dim"), "")]
    yield Section("Each run", lines)


def _shown(value: Any) -> Any:
    """Return a setting as a cell: a number, or a text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number or isinstance(value, str) or value is None else str(value)


def _commands(run: Mapping[str, Any]) -> Iterator[Part]:
    for name, command in run["commands"].items():
        yield f"To {name} the run:"
        yield Line(command, wraps=False)


def _curve(curve: Mapping[str, Any]) -> Iterator[Part | Chart]:
    series = {"training": curve["loss"], "validation": curve["validation"]}
    known = {name: points for name, points in series.items() if points}
    yield _curve_chart("Loss by step", known, curve["unit"])
    heads = [Number(f"{name} loss", significant) for name in ("first", "last", "least")]
    yield Table("", heads, [[curve["first"], curve["last"], curve["least"]]])
    for name, points in curve["metrics"].items():
        name = name.replace("_", " ")
        yield _curve_chart(f"Validation: {name} by step", {name: points}, name)


def _curve_chart(title: str, series: Mapping[str, Any], unit: str) -> Chart:
    keys = {name: points.key for name, points in series.items()}
    return Chart(title, "step", unit, dict(series), keys=keys)


def _planned(planned: Mapping[str, Any]) -> Iterator[Part]:
    if planned["largest"]:
        yield planned["largest"]
    for title, name, head in (
        ("Time of a step", "time_s", ms),
        ("Bytes that a rank sends in a step", "sent", mib),
        ("Memory of rank 0, largest bytes", "bytes", mib),
    ):
        rows = [
            (each["what"], each["predicted"], each["measured"], each.get("error"))
            for each in planned[name]
            if each["predicted"] or each["measured"]
        ]
        if rows:
            yield Table(title, ("what", head("predicted"), head("measured"), ERROR), rows)
    if planned["machine"]:
        yield "The prediction is based on:"
        yield planned["machine"]


def _ledger(ledger: Mapping[str, Any]) -> Iterator[Part]:
    yield from filter(None, (ledger["straggler"], ledger["advice"]))
    has_ranks = bool(ledger["ranks"])
    heads: list[str | Number] = ["term", ms("rank 0, median"), SHARE]
    rows = [[row["term"], row["median_s"], row["share"]] for row in ledger["terms"]]
    if has_ranks:
        heads += [ms(f"{name} rank") for name in ("least", "median", "most")]
        for row, term in zip(rows, ledger["terms"], strict=True):
            row += [term["least_s"], term["middle_s"], term["most_s"]]
    note = "Of ranks: the mean of a step." if has_ranks else ""
    yield Table("By term", heads, rows, note=note)
    if has_ranks:
        terms: list[str] = [*ledger["ranks"][0]["terms_s"]]
        short = {"communication": "comm."}
        heads = [Number("rank", ".0f"), "host", Number("step", significant, 1e-3)]
        heads += [Number(short.get(term, term), significant, 1e-3) for term in terms]
        rows = [
            [row["rank"], row["host"], row["wall_s"], *(row["terms_s"].get(t) for t in terms)]
            for row in ledger["ranks"]
        ]
        yield Table("By rank, mean ms of a step", heads, rows)
    if ledger["exposed"]:
        heads = ("axis", *(ms(f"{name} rank") for name in ("least", "median", "most")))
        rows = [[e["axis"], e["least_s"], e["middle_s"], e["most_s"]] for e in ledger["exposed"]]
        yield Table("Exposed communication by axis, mean of a step", heads, rows)


def _timeline(timeline: Mapping[str, Any]) -> Iterator[Part | SpanLanes]:
    yield timeline["text"]
    names = {
        f"rank {lane['rank']:.0f} {lane['axis']}".rstrip(): lane["spans"]
        for lane in timeline["lanes"]
    }
    yield SpanLanes("Phases, waits and collectives", names, _KINDS)


def _overlap(overlap: Mapping[str, Any]) -> Iterator[Part]:
    names = ("under_way_s", "hidden_s", "exposed_s", "beside_s", "hidden_share")
    heads = ["axis", *(ms(name[:-2].replace("_", " ")) for name in names[:-1])]
    rows = [[axis["axis"], *(axis[name] for name in names)] for axis in overlap["axes"]]
    heads += [Number("hidden, %", ".1f", 0.01)]
    note = "Mean over ranks. Beside: while the rank waits for another axis."
    yield Table("By axis", heads, rows, note=note)
    names = ("phase", "part", "op", "label", "axis", "seconds", "share_of_part")
    heads = [
        "beneath",
        "part",
        "travels",
        "of",
        "axis",
        ms("both"),
        Number("of part, %", ".1f", 0.01),
    ]
    rows = [[each[name] for name in names] for each in overlap["beneath"]]
    if rows:
        yield Table("At the same time, seconds of all ranks", heads, rows)


def _bytes(sent: Mapping[str, Any]) -> Iterator[Part]:
    yield from (axis["text"] for axis in sent["axes"])
    heads = (
        "phase",
        "axis",
        "collective",
        *(Number(name, ",.0f") for name in ("calls", "payload, bytes", "sent, bytes")),
    )
    names = ("phase", "axis", "op", "calls", "payload_bytes", "sent_bytes")
    rows = [[entry[name] for name in names] for entry in sent["entries"]]
    yield Table("What one rank sends in a step", heads, rows)


def _memory(memory: Mapping[str, Any]) -> Iterator[Part | Chart]:
    heads = ("of", mib("bytes"))
    sizes = {"peak of rank 0": "peak_bytes", "highest peak of any rank": "largest_bytes"}
    sizes |= {"RAM of rank 0's process": "resident_bytes"}
    rows = [(text, memory[name]) for text, name in sizes.items() if memory[name] is not None]
    if rows:
        yield Table("", heads, rows)
    if memory["kinds"]:
        heads = (
            "kind",
            mib("predicted"),
            mib("at most"),
            ERROR,
            mib("predicted at the peak"),
            mib("at the peak"),
        )
        names = (
            "kind",
            "predicted_bytes",
            "most_bytes",
            "error",
            "predicted_at_peak_bytes",
            "at_peak_bytes",
        )
        rows = [[row[name] for name in names] for row in memory["kinds"] if row["most_bytes"]]
        yield Table("What rank 0 holds in a step", heads, rows)
    if memory["ranks"]:
        heads = (
            Number("rank", ".0f"), Number("stage", ".0f"), mib("peak"), mib("predicted"), ERROR,
            "phase", ms("at"),
        )  # fmt: skip
        names = ("rank", "stage", "peak_bytes", "predicted_bytes", "error", "phase", "peak_s")
        rows = [[row[name] for name in names] for row in memory["ranks"]]
        yield Table("The peak of each rank", heads, rows)
    # Drawn are the highest peaks, of each stage one first.
    order = sorted(range(len(memory["ranks"])), key=lambda at: -memory["ranks"][at]["peak_bytes"])
    firsts = {memory["ranks"][at]["stage"]: at for at in reversed(order)}
    for at in sorted([*dict.fromkeys([*firsts.values(), *order])][:MAX_DRAWN]):
        rank, curve = memory["ranks"][at], memory["curves"][at]
        planned = rank["predicted_bytes"]
        yield Chart(
            f"Memory of rank {rank['rank']:.0f} over a step", "time in the step, ms", "MiB",
            curve, (1e-3, MIB), is_stacked=True, marks=[(rank["peak_s"], "peak")],
            levels=[] if planned is None else [(planned, "predicted peak")],
            keys={kind: points.key for kind, points in curve.items()},
        )  # fmt: skip


def _utilization(use: Mapping[str, Any]) -> Iterator[Part]:
    heads = (
        "relative to",
        *(
            Number(f"{name}, %", ".1f", 0.01)
            for name in ("MFU", "HFU", "MFU, full attention", "HFU, full attention")
        ),
    )
    row = [use["of"], use["mfu"], use["hfu"], use["mfu_full"], use["hfu_full"]]
    yield Table("", heads, [row])
    yield from filter(None, (use["grade"], use["rate"], use["formula"], *use["warnings"]))
    if use["published"]:
        heads = (
            "model", "hardware", Number("devices", ",.0f"), Number("parameters, M", ",.0f", 1e6),
             Number("MFU, %", ".1f", 0.01),
            Number("HFU, %", ".1f", 0.01), Number("TFLOP/s", ",.0f", 1e12), "source",
        )  # fmt: skip
        names = (
            "model",
            "hardware",
            "num_devices",
            "parameters",
            "mfu",
            "hfu",
            "flops_per_s",
            "source",
        )
        rows = [[row[name] for name in names] for row in use["published"]]
        yield Table("Published runs of like size", heads, rows, note=use["note"])


_PARTS: Final = {
    "curve": _curve,
    "planned": _planned,
    "ledger": _ledger,
    "timeline": _timeline,
    "overlap": _overlap,
    "bytes": _bytes,
    "memory": _memory,
    "utilization": _utilization,
}
