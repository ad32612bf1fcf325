"""Compare several runs: settings that differ, steps, bytes and memory beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.measure.trackers import sent_by_axis, settings_of
from phalanx.report.html import Drawn, Section
from phalanx.report.inline_svg import Chart
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.units import MIB, time_text
from phalanx.review.run_records import RunRecords
from phalanx.review.sections import curves_of, lines_of_run, medians_of, significant


def sections_of_comparison(runs: Sequence[RunRecords]) -> Iterator[Section]:
    """Yield the sections that compare runs; ratios are relative to the first of them."""
    settings = [settings_of(run.config) for run in runs]
    for names in (
        [str(each.get("strategy")) for each in settings],
        [run.folder.name for run in runs],
        [str(run.folder) for run in runs],
    ):
        if len({*names}) == len(runs):
            break
    differing = [
        (key, *values)
        for key, values in _union(settings)
        if key != "out" and any(value != values[0] for value in values)
    ]
    times = [*_union([medians_of(run)[0] for run in runs])]
    keys = [str(key) for key, *_ in differing if key != "nproc"]
    yield Section("In short", [Line(line, "bold") for line in _lines(names, keys, times)])
    if differing:
        heads = ["setting", *(Number(name, "g") for name in names)]
        yield Section("What differs in settings", [Table("", heads, differing)])
    curves = [curves_of(run) for run in runs]
    charts = list[Drawn]()
    for kind in ("training", "validation"):
        series = {
            name: each[kind] for name, each in zip(names, curves, strict=True) if kind in each
        }
        if series:
            charts.append(Chart(f"Loss, {kind}", "step", runs[0].loss_unit, series))
    yield Section("Learning curves", charts)
    held = [(run.summary.get("memory") or {}).get("at_peak", {}) for run in runs]
    for title, rows, unit in (
        ("Time of a step, median ms", times, 1e-3),
        (
            "MiB that a rank sends in a step",
            _union([sent_by_axis(run.summary) for run in runs]),
            MIB,
        ),
        ("Memory of rank 0 at its peak, MiB", _union(held), MIB),
    ):
        heads = ["what", *(Number(name, significant, unit) for name in names)]
        heads += [Number(f"{name} / {names[0]}", ".2f") for name in names[1:]]
        known = [(what, *values, *_ratios(values)[1:]) for what, values in rows if any(values)]
        if known:
            yield Section(title, [Table("", heads, known)])
    lines = [(*lines_of_run(run), Line(str(run.folder), "dim"), "") for run in runs]
    yield Section("Each run", [part for parts in lines for part in parts])


def _union(of: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name in any of the mappings, with its value in each, or None."""
    for name in dict.fromkeys(name for each in of for name in each):
        yield name, [each.get(name) for each in of]


def _ratios(values: Sequence[Any]) -> list[float | None]:
    return [each / values[0] if values[0] and each is not None else None for each in values]


def _lines(
    names: Sequence[str], keys: Sequence[str], times: Sequence[tuple[str, list[Any]]]
) -> Iterator[str]:
    """Yield what differs, how the steps compare, and the term that differs most."""
    words = ", ".join(keys[:6]) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
    differ = "differs" if len(keys) <= 1 else "differ"
    yield f"{names[0]} beside {', '.join(names[1:])}: {words or 'no setting'} {differ}"
    if not times:
        return
    triples = zip(names, times[0][1], _ratios(times[0][1]), strict=True)
    yield "; ".join(
        f"{name} takes {time_text(s)} a step"
        + (f", {ratio:.2f} times the step of {names[0]}" if ratio and name != names[0] else "")
        for name, s, ratio in triples
        if s is not None
    )
    known = [
        (what, [(n, s) for n, s in zip(names, each, strict=True) if s]) for what, each in times
    ]
    terms = [row for row in known[1:] or known if len(row[1]) > 1]  # in several runs
    if not terms:
        return
    what, most = max(terms, key=lambda row: max(s for _, s in row[1]) - min(s for _, s in row[1]))
    each = ", ".join(f"{name} {time_text(s)}" for name, s in most)
    yield f"The term that differs most is {what}: {each}"
