"""The sections of the report of one run: the screen, --json and the page show these alone."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from phalanx.measure.clock import offset, read_comparisons
from phalanx.measure.peaks import NO_GRADE, grade_of
from phalanx.measure.rank_places import Placement
from phalanx.measure.spans import CollectiveSpan, CounterSample, StepSpans, read_spans, span_files
from phalanx.measure.straggler import accuse, window_from
from phalanx.measure.trackers import sent_by_axis, settings_of
from phalanx.report.html import Drawn, Section
from phalanx.report.inline_svg import Chart, HeatMap, SpanLanes
from phalanx.report.tabular import Line, Number, Table
from phalanx.report.units import MIB, percent, size_text, tera, time_text
from phalanx.review.overlap_by_axis import overlap_of
from phalanx.review.run_records import RunRecords
from phalanx.strategy.kinds import WHY_SENT

WARMUP_STEPS, MEASURED_STEPS = 3, 10_000
"""First steps of a process that medians exclude, and the latest that they are of: see `train`."""

BUCKETS: Final = 500
"""Parts of a curve; the least and the largest value of each part are kept."""

DRAWN_PARTS: Final = 1500
"""Parts of the width of a timeline; spans of one kind closer than that are drawn as one."""

DRAWN_RANKS: Final = 8
"""Most ranks whose timeline or memory is drawn."""

DRAWN_LAYERS: Final = 64
DRAWN_EXPERTS: Final = 128
"""Most rows and columns of a picture of the loads of experts."""

SMALL: Final = 0.05
"""An error of a prediction below this part of the step or of the memory slows no run."""

NUM_PUBLISHED: Final = 5

_KINDS: Final = (
    *("forward", "backward", "optimizer", "data", "other", "collective"),
    *("wait: bubble", "wait: communication"),
)
"""Kinds of the spans of a timeline, in the order of their colors."""

_OF_RANKS: Final = ("least rank", "median rank", "most rank")

Parts = Iterator[Drawn]


def significant(value: float) -> str:
    """Return a number with four digits, at most five of them behind the point."""
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(digits, 0), 5)}f}"


def ms(*names: str) -> list[Number]:
    """Return heads of columns of times."""
    return [Number(f"{name}, ms", significant, 1e-3) for name in names]


def mib(*names: str) -> list[Number]:
    """Return heads of columns of sizes."""
    return [Number(f"{name}, MiB", significant, MIB) for name in names]


def percents(*names: str, sign: str = "") -> list[Number]:
    """Return heads of columns of fractions."""
    return [Number(f"{name}, %", f"{sign}.1f", 0.01) for name in names]


_FORECASTS: Final = {
    "time_s": ("Time of a step", ms, time_text, "the time of "),
    "sent": ("Bytes that a rank sends in a step", mib, size_text, "the bytes over "),
    "bytes": ("Memory of rank 0, largest bytes", mib, size_text, "the memory, "),
}
"""Group of a prediction -> title of its table, heads, text of a value, and noun."""


def sections_of_run(run: RunRecords) -> Iterator[Section]:
    """Yield the sections of the report of a run; a section without records is left out."""
    for title, make in (
        ("In short", lines_of_run),
        ("Learning curve", _curve),
        ("Routing to experts", _routing),
        ("Planned beside measured", _planned),
        ("Where the time of a step went", _ledger),
        ("A profiled step", _profiled),
        ("Bytes by axis", _bytes),
        ("Memory", _memory),
        ("MFU and HFU", _utilization),
        ("Environment", _environment),
        ("Commands", _commands),
    ):
        if parts := [*make(run)]:
            yield Section(title, parts)
    rows = [*settings_of(run.config).items()]
    settings = Table("", ("setting", Number("value", "g")), rows)
    yield Section("Settings", [settings], is_detail=True)


def lines_of_run(run: RunRecords) -> Parts:
    """Yield what ran, how fast, and what slows it or how wrong its plan was."""
    strategy = run.config.get("strategy", "unknown strategy")
    what = run.summary.get("run") or f"{run.config.get('model') or 'a model'}, {strategy}"
    if not run.summary:
        last = f"step {run.columns['step'][-1]:.0f}" if run.num_steps else "its first step"
        what += f"; no summary after {last}: it runs, or it was killed"
    yield Line(what, "bold")
    medians_s, num_steps = medians_of(run)
    if not medians_s:
        yield Line("no step was recorded", "bold")
        return
    speed = f"{time_text(medians_s['step'])} a step (median of {num_steps:,})"
    if (rate := units_per_s(run)) is not None:
        speed += f", {rate:,.0f} {run.unit}/s"
    use, of = run.summary.get("utilization") or {}, _peak_of(run)
    if (mfu := use.get(f"mfu_{of}_causal")) is not None:
        basis = " by active FLOPs" if use.get("is_of_active") else ""
        speed += f", MFU {percent(mfu)}{basis} of the {of.replace('_', ' ')}"
    yield Line(speed, "bold")
    costs = {
        term: s for term, s in medians_s.items() if term not in ("step", "forward", "backward")
    }
    cost = max(costs, key=costs.__getitem__, default="other").capitalize()
    cause = _straggler(run) or _largest_error(run, least=SMALL) or run.summary.get("advice")
    cause = cause or f"{cost} takes most of the step besides forward and backward."
    yield Line(cause, "bold")
    if run.num_damaged:
        yield f"{run.num_damaged:,} lines of the records are damaged, and left out."


def _measured(run: RunRecords) -> list[int]:
    """Return the indices of the steps that medians are of: of the last process."""
    wall = run.columns.get("wall_s", [])
    timed = [at for at in range(run.begin, len(wall)) if math.isfinite(wall[at])]
    return timed[WARMUP_STEPS:][-MEASURED_STEPS:] or timed[:1]


def medians_of(run: RunRecords) -> tuple[dict[str, float], int]:
    """Return median seconds of a step and of each of its terms, and the number of steps."""
    measured, found = _measured(run), dict[str, float]()
    names = [name for name in run.columns if name[-2:] == "_s" and name != "tokens_per_s"]
    for name in sorted(names, key=lambda name: name != "wall_s") if measured else ():
        seconds = [s for at in measured if math.isfinite(s := run.columns[name][at])]
        if seconds:
            found["step" if name == "wall_s" else name[:-2]] = statistics.median(seconds)
    return found, len(measured)


def units_per_s(run: RunRecords) -> float | None:
    """Return tokens (or samples) per second at the medians."""
    units = [run.columns["tokens"][at] for at in _measured(run)] if "tokens" in run.columns else []
    return statistics.median(units) / medians_of(run)[0]["step"] if units else None


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


def curves_of(run: RunRecords) -> dict[str, list[list[float]]]:
    """Return the training and validation loss, and further metrics, over the steps."""
    steps = sorted(run.evaluations)
    names = dict.fromkeys(["loss", *(name for each in run.evaluations.values() for name in each)])
    found = {"training": thinned(run.columns["step"], run.columns.get("loss", []))}
    for name in names:
        curve = thinned(steps, [run.evaluations[step].get(name, math.nan) for step in steps])
        found["validation" if name == "loss" else name.replace("_", " ")] = curve
    found.pop("step", None)
    return {name: curve for name, curve in found.items() if curve}


def _curve(run: RunRecords) -> Parts:
    curves = curves_of(run)
    losses = {name: curves.pop(name) for name in ("training", "validation") if name in curves}
    if losses:
        yield Chart("Loss by step", "step", run.loss_unit, losses)
    if "training" in losses:
        ys = [y for _, y in losses["training"]]
        heads = [Number(f"{name} loss", significant) for name in ("first", "last", "least")]
        yield Table("", heads, [(ys[0], ys[-1], min(ys))])
    for name, curve in curves.items():
        yield Chart(f"Validation: {name} by step", "step", name, {name: curve})


def _routing(run: RunRecords) -> Parts:
    """Yield the balance of the experts over the steps, and the load of each in the last one."""
    if not run.routing:
        return
    steps = sorted(run.routing)
    first, last = (run.routing[step] for step in (steps[0], steps[-1]))
    columns = {name: [run.routing[step]["mean"][name] for step in steps] for name in last["mean"]}
    heads = ("", *(Number(f"step {step}", significant) for step in (steps[0], steps[-1])))
    names = {
        "entropy": "entropy of the load, 1 is even",
        "expert_load": "busiest expert / mean",
        "rank_load": "busiest rank of ep / mean",
        "dropped": "part of selections dropped",
    }
    rows = [(text, first["mean"][name], last["mean"][name]) for name, text in names.items()]
    for name in ("token_loss", "aux_loss", "z_loss"):
        rows.append((name.replace("_", " "), first[name], last[name]))
    note = "Balance is a mean over layers, of the global batch. " + _least_even(last)
    yield Table("", heads, rows, note=note)
    loads = {text: thinned(steps, columns[name]) for name, text in names.items() if "_" in name}
    if len(steps) > 1:
        yield Chart("Load of the busiest by step", "step", "factor of the mean", loads)
        curves = {name: thinned(steps, columns[name]) for name in ("entropy", "dropped")}
        yield Chart("Entropy and dropped share by step", "step", "share", curves)
    for record in (first, last)[len(steps) == 1 :]:
        layers, counts = record["layers"], record["counts"]
        every = -(-len(layers) // DRAWN_LAYERS)
        group = -(-len(counts[0]) // DRAWN_EXPERTS)
        drawn = dict[str, list[float]]()
        for layer, of in [*zip(layers, counts, strict=True)][::every]:
            mean = sum(of) / len(of)
            parts = (of[at : at + group] for at in range(0, len(of), group))
            drawn[str(layer)] = [max(part) / mean for part in parts]
        label = "expert" if group == 1 else f"expert; a cell is the busiest of {group}"
        yield HeatMap(
            f"Load of each expert in step {record['step']}, over its layer's mean",
            label,
            "layer" if every == 1 else f"layer, one in {every}",
            drawn,
            group,
        )


def _least_even(record: Mapping[str, Any]) -> str:
    """Return a sentence on the layer with the least entropy, and its busiest expert."""
    at = min(range(len(record["layers"])), key=record["entropy"].__getitem__)
    counts = record["counts"][at]
    return (
        f"Layer {record['layers'][at]} is the least even, of entropy {record['entropy'][at]:.3f}: "
        f"its expert {counts.index(max(counts))} has {percent(max(counts) / sum(counts))} of the "
        f"selections, and {counts.count(0)} of {len(counts)} experts have none."
    )


def _planned(run: RunRecords) -> Parts:
    predicted = run.summary.get("predicted") or {}
    if largest := _largest_error(run):
        yield largest
    for group, (title, heads, _, _) in _FORECASTS.items():
        rows = [
            (
                "exposed communication" if what == "communication" and group == "time_s" else what,
                *(each["predicted"], each["measured"]),
                each.get("error") if each["measured"] else None,
            )
            for what, each in predicted.get(group, {}).items()
            if each["predicted"] or each["measured"]
        ]
        if rows:
            heads = (*heads("predicted", "measured"), *percents("error", sign="+"))
            yield Table(title, ("what", *heads), rows)
    if machine := predicted.get("machine"):
        yield f"The prediction is based on: {machine}"


def _largest_error(run: RunRecords, least: float = 0.0) -> str | None:
    """Return a sentence on the error that is the largest part of the step, bytes or memory.

    The step is named only if its causes do not explain its error; errors below `least` are not.
    """
    errors = [(least, "")]
    for group, (_, _, text, noun) in _FORECASTS.items():
        of = (run.summary.get("predicted") or {}).get(group, {})
        whole = max((each["measured"] for each in of.values()), default=0)
        apart = {what: abs(each["predicted"] - each["measured"]) for what, each in of.items()}
        for what, each in of.items():
            planned, measured = each["predicted"], each["measured"]
            if whole and (what != "step" or 2 * apart[what] > sum(apart.values())):
                words = f"{noun}{'a step' if what == 'step' else what}: "
                words += f"predicted {text(planned)}, measured {text(measured)}"
                words += f" ({planned / measured - 1:+.0%})" if measured else ""
                errors.append((apart[what] / whole, words))
    words = max(errors)[1]
    return f"The plan errs most on {words}." if words else None


def _ledger(run: RunRecords) -> Parts:
    measured = _measured(run)
    if not measured:
        return
    yield from filter(None, (_straggler(run), run.summary.get("advice")))
    # Windows with a step of the warm-up are left out, unless there are no others.
    windows = [w for w in run.ranks if w["steps"][0] >= run.columns["step"][measured[0]]]
    windows = windows or [*run.ranks]
    by_rank = _by_rank(windows, "by_rank")
    heads, rows = ["term", *ms("rank 0, median"), *percents("part")], list[list[Any]]()
    if by_rank:
        heads += ms(*_OF_RANKS)
    wall_s = sum(run.columns["wall_s"][at] for at in measured)
    for term, median_s in medians_of(run)[0].items():
        of = "wall" if term == "step" else term
        seconds = (run.columns[f"{of}_s"][at] for at in measured)
        row = [term, median_s, sum(s for s in seconds if math.isfinite(s)) / wall_s]
        rows.append(row + (_spread(by_rank.get(of, [])) if by_rank else []))
    note = "Of ranks: the mean of a step." if by_rank else ""
    yield Table("By term", heads, rows, note=note)
    if by_rank:
        names = sorted(by_rank, key=lambda name: name != "wall")
        short = {"wall": "step", "communication": "comm."}
        numbers = [Number(short.get(name, name), significant, 1e-3) for name in names]
        rows = [
            [rank, host, *(by_rank[name][rank] for name in names)]
            for rank, host in enumerate(windows[-1]["hosts"])
        ]
        yield Table("By rank, mean ms of a step", (Number("rank", "d"), "host", *numbers), rows)
    if exposed := _by_rank(windows, "exposed"):
        rows = [[axis, *_spread(seconds)] for axis, seconds in exposed.items()]
        heads = ("axis", *ms(*_OF_RANKS))
        yield Table("Exposed communication by axis, mean of a step", heads, rows)


def _spread(values: list[float]) -> list[float | None]:
    return [min(values), statistics.median(values), max(values)] if values else [None] * 3


def _by_rank(windows: Sequence[Mapping[str, Any]], group: str) -> dict[str, list[float]]:
    """Return name -> mean of each rank over the steps of the windows that have the name."""
    found = dict[str, list[float]]()
    for name in dict.fromkeys(name for window in windows for name in window.get(group, {})):
        having = [window for window in windows if name in window.get(group, {})]
        num = sum(len(window["steps"]) for window in having)
        sums = zip(*([len(w["steps"]) * x for x in w[group][name]] for w in having), strict=False)
        found[name] = [sum(rank) / num for rank in sums]
    return found


def _straggler(run: RunRecords) -> str | None:
    """Return the sentence on a rank that others wait for; of a killed run from its records."""
    if "straggler" in run.summary or not run.ranks:
        return run.summary.get("straggler")
    accused = accuse([*map(window_from, run.ranks)])
    return accused and accused.text()


def _profiled(run: RunRecords) -> Parts:
    """Yield lanes and overlap of the last step with the spans of all ranks that took it."""
    steps = [[*files] for _, files in groupby(span_files(run.folder), key=lambda file: file.parent)]
    ranks = list[StepSpans]()
    for files in reversed(steps):  # a killed run lacks some files of its last step
        ranks = [read_spans(file) for file in files]
        if len(ranks) == ranks[0].num_ranks:
            break
    if not ranks:
        return
    try:  # by the clock of rank 0
        known = read_comparisons(run.folder)
        begins_s = [s.begin_s - float(offset(known[s.rank], s.begin_s)[0]) for s in ranks]
    except (OSError, KeyError):  # the clocks of these ranks were not compared
        begins_s = [0.0] * len(ranks)
    every, lanes = math.ceil(len(ranks) / DRAWN_RANKS), dict[str, list[list[Any]]]()
    for step, begin_s in [*zip(ranks, begins_s, strict=True)][::every]:
        least_s, first_s = (step.end_s - step.begin_s) / DRAWN_PARTS, min(begins_s) - begin_s
        lanes[f"rank {step.rank}"] = []
        for span in sorted(
            (span for span in step.spans if not isinstance(span, CounterSample)),
            key=lambda span: span.begin_s,
        ):
            name, kind = f"rank {step.rank}", getattr(span, "term", "collective")
            if isinstance(span, CollectiveSpan):
                name = f"{name} {span.axis}"
            elif hasattr(span, "axis"):
                kind = f"wait: {kind}"
            lane = lanes.setdefault(name, [])
            begin, end = (s - step.begin_s - first_s for s in (span.begin_s, span.end_s))
            if lane and lane[-1][2] == kind and begin - lane[-1][1] < least_s:
                lane[-1][1] = max(lane[-1][1], end)
            else:
                lane.append([begin, end, kind])
    text = f"Step {ranks[0].step}, profiled on {len(ranks)} ranks"
    yield text + (f"; one rank in {every} is drawn." if every > 1 else ".")
    yield SpanLanes("Compute, waits and collectives", lanes, _KINDS)
    yield from overlap_of(ranks).tables()


def _bytes(run: RunRecords) -> Parts:
    """Yield a sentence for each axis, and the collectives of one rank in a step."""
    entries: list[dict[str, Any]] = run.summary.get("sent") or []
    for axis, sent_bytes in sent_by_axis(run.summary).most_common():
        own = sorted((e for e in entries if e["axis"] == axis), key=lambda e: -e["sent_bytes"])
        large = [each for each in own if each["sent_bytes"] > 0.01 * sent_bytes]
        words = "; ".join(
            f"{each['calls']:,} {each['op']} of {size_text(each['payload_bytes'])} together in "
            f"{each['phase']}"
            for each in large
        )
        small = ", ".join(dict.fromkeys(each["phase"] for each in own if each not in large))
        why = WHY_SENT.get(axis.split("_")[0], "its ranks agree on counts and norms")
        text = f"{axis}: each rank sends {size_text(sent_bytes)} a step: {words}, because {why}."
        yield text + (f" Small calls: {small}." if small else "")
    names = ("phase", "axis", "op", "calls", "payload_bytes", "sent_bytes")
    numbers = (Number(name, ",.0f") for name in ("calls", "payload, bytes", "sent, bytes"))
    rows = [[entry[name] for name in names] for entry in entries]
    if rows:
        heads = ("phase", "axis", "collective", *numbers)
        yield Table("What one rank sends in a step", heads, rows)


def _memory(run: RunRecords) -> Parts:
    account, predicted = run.summary.get("memory") or {}, run.summary.get("predicted") or {}
    if account:
        names = ("peak of rank 0", "highest peak of any rank", "RAM of rank 0's process")
        values = (account[f"{each}_bytes"] for each in ("peak", "largest", "resident"))
        rows = [*zip(names, values, strict=True)]
        yield Table("", ("of", *mib("bytes")), rows)
        most, peak = predicted.get("bytes", {}), predicted.get("bytes_at_peak", {})
        rows = [
            (
                kind,
                most.get(kind, {}).get("predicted"),
                num_bytes,
                most.get(kind, {}).get("error"),
                peak.get(kind, {}).get("predicted"),
                account["at_peak"][kind],
            )
            for kind, num_bytes in account["at_most"].items()
            if num_bytes
        ]
        heads = (*mib("predicted", "at most"), *percents("error", sign="+"))
        heads = ("kind", *heads, *mib("predicted at the peak", "at the peak"))
        yield Table("What rank 0 holds in a step", heads, rows)
    rows = list[tuple[Any, ...]]()
    for rank, record in sorted(run.memory.items()):
        curve, at = record["curve"], record["peak"]
        peak_bytes = sum(each[at] for each in curve["bytes"].values())
        planned = sum((record.get("predicted") or {}).get("at_peak", {}).values()) or None
        row = (rank, record.get("stage"), peak_bytes, planned, planned and planned / peak_bytes - 1)
        rows.append((*row, curve["phase"][at], curve["at_s"][at]))
    if rows:
        heads = (*mib("peak", "predicted"), *percents("error", sign="+"), "phase", *ms("at"))
        heads = (Number("rank", "d"), Number("stage", "d"), *heads)
        yield Table("The peak of each rank", heads, rows)
    # A kind that any rank holds is drawn for each, so that it has the same color in all drawings.
    held = [record["curve"]["bytes"] for record in run.memory.values()]
    kinds = {kind for each in held for kind, values in each.items() if any(values)}
    # Drawn are the highest peaks, of each stage one first.
    rows.sort(key=lambda row: -row[2])
    drawn = {**{row[1]: row for row in reversed(rows)}, **{("rest", *row): row for row in rows}}
    for row in sorted([*dict.fromkeys(drawn.values())][:DRAWN_RANKS]):
        curve = run.memory[row[0]]["curve"]
        series = {
            kind: [*map(list, zip(curve["at_s"], values, strict=True))]
            for kind, values in curve["bytes"].items()
            if kind in kinds
        }
        yield Chart(
            f"Memory of rank {row[0]} over a step", "time in the step, ms", "MiB", series,
            (1e-3, MIB), is_stacked=True, peak_at=row[6], planned=row[3],
        )  # fmt: skip


def _peak_of(run: RunRecords) -> str:
    """Return the peak that MFU is relative to, as in names of the record."""
    use = run.summary.get("utilization") or {}
    return "ceiling" if use.get("data_sheet_flops_per_s") is None else "data_sheet"


def _utilization(run: RunRecords) -> Parts:
    """Yield MFU and HFU with their grade, and published runs of the nearest size."""
    if not (use := run.summary.get("utilization")):
        return
    of = _peak_of(run)
    heads = ("relative to", *percents("MFU", "HFU", "MFU, full attention", "HFU, full attention"))
    shares = [use[f"{name}_{of}_{kind}"] for kind in ("causal", "full") for name in ("mfu", "hfu")]
    yield Table("", heads, [[of.replace("_", " "), *shares]])
    yield grade_of(shares[0]) if of == "data_sheet" and shares[0] is not None else NO_GRADE
    yield f"{tera(use['model_flops_per_s'])} of model FLOPs on {use['num_devices']} devices"
    yield from (use["formula"], *use["warnings"])
    rate = units_per_s(run)
    if run.unit != "tokens" or not rate:  # published runs are of language models
        return
    size = use["model_flops_per_s"] / rate / 6  # 6 FLOPs a parameter and token
    rows: list[Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    gpus = " ".join(gpu["name"] for gpu in run.environment.get("gpus", []))
    is_gpu = bool(gpus) and run.config.get("device") != "cpu"
    rows.sort(key=lambda row: abs(math.log(row["parameters"] / size)))
    rows.sort(key=lambda row: is_gpu and row["hardware"].split("-")[0] not in gpus)
    names = ("model", "hardware", "num_devices", "parameters")
    names = (*names, "mfu", "hfu", "flops_per_s", "source")
    numbers = (Number("devices", ",.0f"), Number("parameters, M", ",.0f", 1e6))
    rates = (*percents("MFU", "HFU"), Number("TFLOP/s", ",.0f", 1e12))
    note = "" if is_gpu else "This run is on CPUs, these are on GPUs and TPUs."
    rows = [[row[name] for name in names] for row in rows[:NUM_PUBLISHED]]
    heads = ("model", "hardware", *numbers, *rates, "source")
    yield Table("Published runs, the nearest by parameters", heads, rows, note=note)


def _environment(run: RunRecords) -> Parts:
    if not (record := run.environment):
        return
    cpu = record["cpu"]
    gpus = Counter(f"{gpu['name']}, {size_text(gpu['memory_bytes'])}" for gpu in record["gpus"])
    rows = {
        "system": record["system"],
        "versions": ", ".join(f"{name} {each}" for name, each in record["versions"].items()),
        "processor": f"{cpu['name']}, {cpu['num_cores']} cores",
        "threads of a rank": str(cpu["num_threads"]),
        "features": ", ".join(cpu["flags"]),
        "memory": size_text(record["memory_bytes"]),
        "gpus": "; ".join(f"{number} x {gpu}" for gpu, number in gpus.items()) or "none",
    }
    yield Table("", ("", ""), [*rows.items()])
    if at := run.placement:
        yield Placement(at["axes"], at["ranks"]).table()


def _commands(run: RunRecords) -> Parts:
    """Yield the commands that repeat and resume the run."""
    file, resume = run.folder / "config.toml", run.summary.get("resume", "")
    if file.exists():
        yield "To repeat the run:"
        yield Line(f"phalanx train --config {shlex.quote(str(file))}", wraps=False)
    elif " --resume " in resume:  # of a job of the user's own
        known = [(key, run.config.get(key)) for key in ("strategy", "steps")]
        words = [f"--{key} {value}" for key, value in known if value is not None]
        yield "To repeat the run:"
        yield Line(" ".join([resume.partition(" --resume ")[0], *words]), wraps=False)
    if not resume and file.exists():
        resume = f"phalanx train --resume {shlex.quote(str(run.folder))}"
    yield "To resume the run:"
    yield Line(resume or f"phalanx.Options(out={str(run.folder)!r}, resume=True)", wraps=False)
