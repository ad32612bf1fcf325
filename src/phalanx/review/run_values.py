"""What a report says of a run, as plain values; screen, JSON and page show these alone."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from phalanx.measure.peaks import NO_GRADE, grade_of
from phalanx.measure.spans import (
    CollectiveSpan,
    ComputeSpan,
    StepSpans,
    WaitSpan,
    read_spans,
    span_files,
)
from phalanx.report.output import values_of
from phalanx.report.units import percent, size_text, tera, time_text
from phalanx.review.run_records import Record, RunRecords
from phalanx.strategy.kinds import WHY_SENT

Values = dict[str, Any]

WARMUP_STEPS: Final = 3
"""First steps of a process that the medians exclude, as in the table of `phalanx train`."""

MEASURED_STEPS: Final = 10_000
"""Latest steps that the medians are of."""

BUCKETS: Final = 500
"""Parts of a curve; the least and the largest value of each part are kept."""

DRAWN_PARTS: Final = 1500
"""Parts of the width of a timeline; spans of one kind closer than that are drawn as one."""

DRAWN_RANKS: Final = 8
"""Most ranks that a timeline has."""

SMALL: Final = 0.05
"""A part of a step or of the memory below this fraction is not named as the largest error."""

NUM_PUBLISHED: Final = 5

_NOT_TERMS: Final = {"wall", "tokens_per"}


def values_of_run(run: RunRecords) -> Values:
    """Return all values of the report of one run; a part is None where the run has no records."""
    summary, ledger = run.summary, _ledger(run)
    planned = _planned(summary, ledger)
    use = _utilization(run, ledger)
    return {
        "folder": str(run.folder),
        "lines": [*_first_lines(run, ledger, use, planned)],
        "num_steps": run.num_steps,
        "num_processes": run.num_processes,
        "num_damaged": run.num_damaged,
        "has_ended": bool(summary),
        "curve": _curve(run),
        "ledger": ledger,
        "planned": planned,
        **_profiled(run.folder),
        "bytes": _bytes(summary),
        "memory": _memory(run),
        "utilization": use,
        "environment": _environment(run.environment),
        "settings": dict(_flat(run.config)),
        "commands": _commands(run),
    }


def thinned(xs: Sequence[float], ys: Sequence[float]) -> list[list[float]]:
    """Return points of a curve: in each of BUCKETS parts the least and the largest y, and ends."""
    known = [at for at, y in enumerate(ys) if math.isfinite(y)]
    if len(known) > 2 * BUCKETS:
        kept = {known[0], known[-1]}
        for number in range(BUCKETS):
            part = known[number * len(known) // BUCKETS : (number + 1) * len(known) // BUCKETS]
            kept |= {min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)}
        known = sorted(kept)
    return [[xs[at], ys[at]] for at in known]


def _first_lines(
    run: RunRecords, ledger: Values | None, use: Values | None, planned: Values | None
) -> Iterator[str]:
    """Yield what ran, how fast, and what slows it or how wrong its plan was."""
    strategy = run.config.get("strategy", "unknown strategy")
    what = run.summary.get("run") or f"{run.config.get('model') or 'a model'}, {strategy}"
    if not run.summary:
        last = f"step {run.columns['step'][-1]:.0f}" if run.num_steps else "its first step"
        what += f"; no summary after {last}: it runs, or it was killed"
    yield what
    if ledger is None:
        yield "no step was recorded"
        return
    num = ledger["num_steps"]
    speed = f"{time_text(ledger['step_s'])} a step (median of {num:,})"
    if (rate := ledger["units_per_s"]) is not None:
        speed += f", {rate:,.0f} {run.unit}/s"
    if use is not None and use["mfu"] is not None:
        speed += f", MFU {percent(use['mfu'])} of the {use['of']}"
    yield speed
    largest = None if planned is None else planned["largest"]
    yield ledger["straggler"] or largest or ledger["advice"] or ledger["largest"]


def _curve(run: RunRecords) -> Values | None:
    if not run.num_steps:
        return None
    loss = run.columns.get("loss", [])
    names = {name for each in run.evaluations.values() for name in each} - {"step", "loss"}
    steps = sorted(run.evaluations)
    known = [each for each in loss if math.isfinite(each)]
    return {
        "unit": "nats a token" if run.unit == "tokens" else f"mean over {run.unit}",
        "first": known[0] if known else None,
        "last": known[-1] if known else None,
        "least": min(known, default=None),
        "loss": thinned(run.columns["step"], loss),
        "validation": thinned(steps, [run.evaluations[step]["loss"] for step in steps]),
        "metrics": {
            name: thinned(steps, [run.evaluations[step].get(name, math.nan) for step in steps])
            for name in sorted(names)
        },
    }


def _ledger(run: RunRecords) -> Values | None:
    """Return times of the steps of the last process by term, and by rank where recorded."""
    names = [name for name in run.columns if name.endswith("_s")]
    terms = [name[:-2] for name in names if name[:-2] not in _NOT_TERMS]
    wall = run.columns.get("wall_s", [])
    timed = [at for at in range(run.begin, len(wall)) if math.isfinite(wall[at])]
    timed = timed[WARMUP_STEPS:][-MEASURED_STEPS:] or timed[:1]
    if not timed:
        return None
    whole_s = sum(wall[at] for at in timed)
    units = [run.columns["tokens"][at] for at in timed] if "tokens" in run.columns else []
    step_s = statistics.median(wall[at] for at in timed)
    # Windows with a step of the warm-up are left out, unless there are no others.
    first = run.columns["step"][min(run.begin + WARMUP_STEPS, run.num_steps - 1)]
    windows = [each for each in run.ranks if each["steps"][0] >= first] or [*run.ranks]
    ranks = _ranks(windows)
    rows = list[Values]()
    for term in terms:
        seconds = [each for at in timed if math.isfinite(each := run.columns[f"{term}_s"][at])]
        of_ranks = sorted(rank["terms_s"][term] for rank in ranks if term in rank["terms_s"])
        row = {"term": term, "median_s": statistics.median(seconds) if seconds else None}
        row |= {"share": sum(seconds) / whole_s}
        rows.append(row | _spread(of_ranks))
    costs = [row for row in rows if row["term"] not in ("forward", "backward")]
    cost = max(costs, key=lambda row: row["share"], default=None)
    return {
        "num_steps": len(timed),
        "step_s": step_s,
        "units_per_s": statistics.median(units) / step_s if units else None,
        "terms": rows,
        "ranks": ranks,
        "exposed": [*_exposed(windows)],
        "straggler": _straggler(run),
        "advice": run.summary.get("advice"),
        "largest": cost
        and f"{cost['term'].capitalize()} takes {percent(cost['share'])} of the step, the most "
        "besides forward and backward.",
    }


def _spread(values: list[float]) -> Values:
    middle = statistics.median(values) if values else None
    return {
        "least_s": min(values, default=None),
        "middle_s": middle,
        "most_s": max(values, default=None),
    }


def _weighted(windows: Sequence[Record], group: str, name: str) -> list[float]:
    """Return for each rank the mean of a quantity over the steps of all windows that have it."""
    having = [window for window in windows if name in window.get(group, {})]
    weights = [len(window["steps"]) for window in having]
    columns = zip(*(window[group][name] for window in having), strict=False)
    return [sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights) for xs in columns]


def _ranks(windows: Sequence[Record]) -> list[Values]:
    """Return rank, host and mean seconds of each term, for each rank."""
    if not windows:
        return []
    names = dict.fromkeys(name for window in windows for name in window["by_rank"])
    means = {name: _weighted(windows, "by_rank", name) for name in names}
    found = list[Values]()
    for rank, host in enumerate(windows[-1]["hosts"]):
        terms_s = {name: each[rank] for name, each in means.items() if rank < len(each)}
        wall_s = terms_s.pop("wall", sum(terms_s.values()))
        found.append({"rank": rank, "host": host, "wall_s": wall_s, "terms_s": terms_s})
    return found


def _exposed(windows: Sequence[Record]) -> Iterator[Values]:
    for axis in dict.fromkeys(axis for window in windows for axis in window.get("exposed", {})):
        yield {"axis": axis, **_spread(_weighted(windows, "exposed", axis))}


def _straggler(run: RunRecords) -> str | None:
    """Return the sentence on a rank that others wait for; of a killed run from its records."""
    if "straggler" in run.summary or not run.ranks:
        return run.summary.get("straggler")
    if (straggler := _optional("phalanx.measure.straggler")) is None:
        return None
    window = _optional("phalanx.measure.rank_times").RankWindow
    fields = {field.name for field in dataclasses.fields(window)}
    windows = [
        window(**{name: value for name, value in record.items() if name in fields})
        for record in run.ranks
    ]
    accused = straggler.accuse(windows)
    return accused and accused.text()


def _planned(summary: Mapping[str, Any], ledger: Values | None) -> Values | None:
    """Return predicted beside measured values, and a sentence on the largest error."""
    predicted = summary.get("predicted")
    if predicted is None or ledger is None:
        return None

    def rows(of: str) -> list[Values]:
        return [{"what": name, **each} for name, each in predicted.get(of, {}).items()]

    groups = {of: rows(of) for of in ("time_s", "sent", "bytes")}
    words = list[tuple[float, str]]()
    for of, group in groups.items():
        text = time_text if of == "time_s" else size_text
        whole = max((each["measured"] or 0 for each in group), default=0)
        for each in group:
            error, what = each.get("error"), each["what"]
            if error is not None and max(each["predicted"], each["measured"]) > SMALL * whole:
                noun = {"time_s": "the time of ", "sent": "the bytes over "}.get(of, "memory: ")
                noun += "a step" if what == "step" else what
                both = f"predicted {text(each['predicted'])}, measured {text(each['measured'])}"
                words.append((abs(error), f"{noun}: {both} ({error:+.0%})"))
    largest = max(words, default=None)
    sentence = largest and f"The plan errs most on {largest[1]}."
    return {"machine": predicted["machine"], **groups, "largest": sentence}


def _bytes(summary: Mapping[str, Any]) -> Values | None:
    """Return the collectives of one rank in a step, and a sentence for each axis."""
    if not (entries := summary.get("sent")):
        return None
    by_axis = Counter[str]()
    for entry in entries:
        by_axis[entry["axis"]] += entry["sent_bytes"]
    axes = list[Values]()
    for axis, sent_bytes in by_axis.most_common():
        own = [entry for entry in entries if entry["axis"] == axis]
        own.sort(key=lambda entry: -entry["sent_bytes"])
        large = [each for each in own if each["sent_bytes"] > 0.01 * sent_bytes]
        words = [
            f"{each['calls']:,} {each['op']} of {size_text(each['payload_bytes'])} together in "
            f"{each['phase']}"
            for each in large
        ]
        why = WHY_SENT.get(axis.split("_")[0], "its ranks agree on counts and norms")
        sentence = f"{axis}: each rank sends {size_text(sent_bytes)} a step: "
        sentence += f"{'; '.join(words)}, because {why}."
        if small := [each["phase"] for each in own if each not in large]:
            sentence += f" Small calls: {', '.join(dict.fromkeys(small))}."
        axes.append({"axis": axis, "sent_bytes": sent_bytes, "text": sentence})
    return {"axes": axes, "entries": entries}


def _memory(run: RunRecords) -> Values | None:
    """Return bytes by kind of rank 0, the peak of each rank, and their curves over a step."""
    account, predicted = run.summary.get("memory"), run.summary.get("predicted") or {}
    if account is None and not run.memory:
        return None
    most, peak = predicted.get("bytes", {}), predicted.get("bytes_at_peak", {})
    found: Values = {"kinds": [], "ranks": [], "curves": []}
    account = account or {"at_most": {}, "at_peak": {}}
    for kind, num_bytes in account["at_most"].items():
        found["kinds"].append(
            {
                "kind": kind,
                "predicted_bytes": most.get(kind, {}).get("predicted"),
                "most_bytes": num_bytes,
                "error": most.get(kind, {}).get("error"),
                "predicted_at_peak_bytes": peak.get(kind, {}).get("predicted"),
                "at_peak_bytes": account["at_peak"][kind],
            }
        )
    for name in ("peak_bytes", "peak_phase", "largest_bytes", "resident_bytes"):
        found[name] = account.get(name)
    for rank, record in sorted(run.memory.items()):
        curve, at = record["curve"], record["peak"]
        num_bytes = sum(each[at] for each in curve["bytes"].values())
        planned = sum((record.get("predicted") or {}).get("at_peak", {}).values()) or None
        row = {"rank": rank, "stage": record.get("stage"), "peak_bytes": num_bytes}
        row |= {"predicted_bytes": planned, "error": planned and planned / num_bytes - 1}
        found["ranks"].append(row | {"phase": curve["phase"][at], "peak_s": curve["at_s"][at]})
        points = {
            kind: [[at_s, each] for at_s, each in zip(curve["at_s"], values, strict=True)]
            for kind, values in curve["bytes"].items()
            if any(values)
        }
        found["curves"].append(points)
    return found


def _utilization(run: RunRecords, ledger: Values | None) -> Values | None:
    """Return MFU and HFU with their grade, and published runs of the nearest size."""
    if not (use := run.summary.get("utilization")):
        return None
    of = "ceiling" if use["data_sheet_flops_per_s"] is None else "data sheet"
    found: Values = {"of": of, "peak_flops_per_s": use[f"{of.replace(' ', '_')}_flops_per_s"]}
    for name in ("mfu", "hfu"):
        for short, attention in (("", "causal"), ("_full", "full")):
            found[name + short] = use[f"{name}_{of.replace(' ', '_')}_{attention}"]
    rate = f"{tera(use['model_flops_per_s'])} of model FLOPs on {use['num_devices']} devices"
    found |= {"rate": rate, "formula": use["formula"], "warnings": use["warnings"]}
    found["grade"] = grade_of(found["mfu"]) if of == "data sheet" and found["mfu"] else NO_GRADE
    gpus = [gpu["name"] for gpu in run.environment.get("gpus", [])]
    is_gpu = of == "data sheet" or (bool(gpus) and run.config.get("device") != "cpu")
    found["published"], found["note"] = [], ""
    if run.unit == "tokens" and ledger is not None and ledger["units_per_s"]:
        # A parameter takes six FLOPs a token, forward and backward.
        size = use["model_flops_per_s"] / ledger["units_per_s"] / 6
        rows: list[Values] = json.loads(Path(__file__).with_name("published.json").read_text())
        kind = next((row["hardware"] for row in rows if is_gpu and _is_kind(row, gpus)), None)
        rows.sort(key=lambda row: abs(math.log(row["parameters"] / size)))
        rows.sort(key=lambda row: kind is not None and row["hardware"] != kind)
        found["published"] = rows[:NUM_PUBLISHED]
        found["note"] = "The nearest by parameters."
        if not is_gpu:
            found["note"] += " This run is on CPUs, these are on GPUs and TPUs."
    return found


def _is_kind(row: Values, gpus: Sequence[str]) -> bool:
    return any(row["hardware"].split("-")[0] in name for name in gpus)


def _profiled(folder: Path) -> Values:
    """Return lanes and overlap of the last step that all ranks profiled."""
    steps = dict[str, list[Path]]()
    for file in span_files(folder):
        steps.setdefault(file.parent.name, []).append(file)
    if not steps:
        return {"timeline": None, "overlap": None}
    most = max(map(len, steps.values()))
    ranks = [
        read_spans(file) for file in [each for each in steps.values() if len(each) == most][-1]
    ]
    begins_s = _begins(folder, ranks)
    first_s, lanes = min(begins_s), list[Values]()
    every = math.ceil(len(ranks) / DRAWN_RANKS)
    for step, begin_s in [*zip(ranks, begins_s, strict=True)][::every]:
        least_s = (step.end_s - step.begin_s) / DRAWN_PARTS
        own = list[tuple[float, float, str]]()
        axes = dict[str, list[tuple[float, float, str]]]()
        for span in step.spans:
            if isinstance(span, CollectiveSpan):
                axes.setdefault(span.axis, []).append((span.begin_s, span.end_s, "collective"))
            elif isinstance(span, ComputeSpan):
                own.append((span.begin_s, span.end_s, span.term))
            elif isinstance(span, WaitSpan):
                own.append((span.begin_s, span.end_s, f"wait: {span.term}"))
        for name, each in {"": own, **axes}.items():
            spans_s = _joined(sorted(each), step.begin_s + first_s - begin_s, least_s)
            lanes.append({"rank": step.rank, "axis": name, "spans": spans_s})
    number = ranks[0].step
    text = f"Step {number}, profiled on {len(ranks)} ranks"
    text += f"; one rank in {every} is drawn." if every > 1 else "."
    timeline = {"step": number, "text": text, "lanes": lanes}
    overlap = _optional("phalanx.review.overlap")
    return {"timeline": timeline, "overlap": overlap and values_of(overlap.overlap_of(ranks))}


def _begins(folder: Path, ranks: Sequence[StepSpans]) -> list[float]:
    """Return the begin of the step on each rank by the clock of rank 0, or zeros if unknown."""
    try:
        to_rank0 = _optional("phalanx.measure.clock").clocks(folder).to_rank0
        return [to_rank0(step.rank, step.begin_s) for step in ranks]
    except (OSError, KeyError, AttributeError):  # the clocks of these ranks were not compared
        return [0.0] * len(ranks)


def _optional(module: str) -> Any:
    """Return a module; None if this installation lacks it."""
    return import_module(module) if find_spec(module) is not None else None


def _joined(
    spans: Sequence[tuple[float, float, str]], begin_s: float, least_s: float
) -> list[list[Any]]:
    """Return spans from the begin of the step on; if two of a kind nearly touch, they are one."""
    found = list[list[Any]]()
    for begin, end, kind in spans:
        if found and found[-1][2] == kind and begin - begin_s - found[-1][1] < least_s:
            found[-1][1] = max(found[-1][1], end - begin_s)
        else:
            found.append([begin - begin_s, end - begin_s, kind])
    return found


def _environment(record: Record) -> dict[str, str]:
    if not record:
        return {}
    cpu = record["cpu"]
    gpus = Counter(f"{gpu['name']}, {size_text(gpu['memory_bytes'])}" for gpu in record["gpus"])
    return {
        "system": record["system"],
        "versions": ", ".join(f"{name} {each}" for name, each in record["versions"].items()),
        "processor": f"{cpu['name']}, {cpu['num_cores']} cores",
        "threads of a rank": str(cpu["num_threads"]),
        "features": ", ".join(cpu["flags"]),
        "memory": size_text(record["memory_bytes"]),
        "gpus": "; ".join(f"{number} x {gpu}" for gpu, number in gpus.items()) or "none",
    }


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each setting that is set."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None and name not in ("kind", "time"):
            yield before + name, value


def _commands(run: RunRecords) -> dict[str, str]:
    """Return the commands that repeat and resume the run, by name."""
    folder = shlex.quote(str(run.folder))
    file = run.folder / "config.toml"
    found, resume = dict[str, str](), run.summary.get("resume", "")
    if file.exists():
        found["repeat"] = f"phalanx train --config {shlex.quote(str(file))}"
    elif " --resume " in resume:  # of a job of the user's own
        settings = [(key, run.config.get(key)) for key in ("strategy", "steps", "seed")]
        words = [f"--{key} {value}" for key, value in settings if value is not None]
        found["repeat"] = " ".join([resume.partition(" --resume ")[0], *words])
    found["resume"] = resume or (
        f"phalanx train --resume {folder}"
        if file.exists()
        else f"phalanx.Options(out={str(run.folder)!r}, resume=True)"
    )
    return found
